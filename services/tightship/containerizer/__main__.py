"""`python -m tightship.containerizer`: serves, lists failpoints, or sweeps what a dead pair has left."""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported: nothing forks here

import json
import logging
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from tightship.common import logs, metrics
from tightship.common.clients import ConfigError
from tightship.common.configured import EX_CONFIG, LOG_LEVEL, ServiceGroup
from tightship.common.door_options import door_options
from tightship.common.doors import DoorSettings
from tightship.common.errors import ServiceError
from tightship.common.rundir import DEFAULT, RunDir, RunDirError
from tightship.containerizer import failpoint_names, machine, serve, spec
from tightship.containerizer.settings import Settings
from tightship.kernel import cgroup, malloc
from tightship.v1 import containerizer_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = Settings()
_LOCK_WAIT_S = 5.0
_SWEEP_S = 15.0
# Limits of every controller, each of which is a step.
_LISTED_SPEC = "cpu { limit: 500 max_limit: 1500 } memory { limit: 268435456 } tasks { limit: 64 }"

_run_dir = click.option(
    "--run-dir", envvar="TIGHTSHIP_RUN_DIR", default=DEFAULT, show_default=True, type=click.Path(path_type=Path),
    help="Directory of the pair's sockets.",
)  # fmt: skip


def _seconds(name: str, default: float, help_text: str, minimum: float = 0.0) -> Callable[[F], F]:
    variable = "TIGHTSHIP_" + name.upper().replace("-", "_")
    return click.option(
        f"--{name}",
        envvar=variable,
        default=default,
        show_default=True,
        type=click.FloatRange(min=minimum),
        help=help_text,
    )


@click.group(cls=ServiceGroup, invoke_without_command=True)
@_run_dir
@click.option("--log-level", envvar="TIGHTSHIP_LOG_LEVEL", default="INFO", show_default=True, type=LOG_LEVEL)
@click.option(
    "--log-format", envvar="TIGHTSHIP_LOG_FORMAT", default="text", show_default=True, type=click.Choice(logs.FORMATS),
    help="Text for people, or a JSON object a line.",
)  # fmt: skip
@click.option(
    "--metrics", "metrics_at", metavar="HOST:PORT", help="Serve metrics to Prometheus there [TIGHTSHIP_METRICS]."
)
@click.option(
    "--ephemeral", is_flag=True, envvar="TIGHTSHIP_EPHEMERAL", help="At SIGTERM destroy everything, detached too."
)
@_seconds("grace", _DEFAULTS.grace, "Seconds between the stop signal and the kill, where the spec does not say.")
@_seconds("cleanup-budget", _DEFAULTS.budget, "Seconds for a cleanup, where spec and caller do not say.", 0.1)
@_seconds("cleanup-floor", _DEFAULTS.budget_floor, "Least seconds for a cleanup, however little the caller has.", 0.1)
@_seconds("cleanup-max", _DEFAULTS.budget_max, "Most seconds for a cleanup.", 0.1)
@_seconds("rejoin-grace", _DEFAULTS.rejoin_grace, "Seconds an attached launch waits for its caller after a restart.")
@_seconds("retention-age", _DEFAULTS.retention_age, "Seconds for which the record of an ended container is kept.")
@click.option(
    "--retention-number", envvar="TIGHTSHIP_RETENTION_NUMBER", default=_DEFAULTS.retention_count, show_default=True,
    type=click.IntRange(min=0), help="Records kept, at most.",
)  # fmt: skip
@click.option(
    "--containers-max", envvar="TIGHTSHIP_CONTAINERS_MAX", default=_DEFAULTS.containers_max, show_default=True,
    type=click.IntRange(min=1), help="Containers that may live.",
)  # fmt: skip
@click.option(
    "--node", envvar="TIGHTSHIP_NODE", default=_DEFAULTS.node, show_default=True,
    help="Name of this machine in answers.",
)  # fmt: skip
@door_options("containerizer")
@click.pass_context
def main(
    context: click.Context,
    *,
    doors: Callable[[], DoorSettings],
    run_dir: Path,
    log_level: str,
    log_format: str,
    metrics_at: str | None,
    ephemeral: bool,
    grace: float,
    cleanup_budget: float,
    cleanup_floor: float,
    cleanup_max: float,
    rejoin_grace: float,
    retention_age: float,
    retention_number: int,
    containers_max: int,
    node: str,
) -> None:
    """Serves containers: names, limits and processes. Started by the spawner."""
    if context.invoked_subcommand is not None:
        return
    logs.set_up("containerizer", log_level, log_format)
    settings = Settings(
        grace=grace,
        budget=cleanup_budget,
        budget_floor=cleanup_floor,
        budget_max=cleanup_max,
        rejoin_grace=rejoin_grace,
        retention_age=retention_age,
        retention_count=retention_number,
        containers_max=containers_max,
        ephemeral=ephemeral,
        node=node,
    )
    try:
        scraped_at = metrics.address(metrics_at, 0)
        door_settings = doors()
        run = RunDir.open(run_dir)
        instance = run.instance()
        found = machine.look(instance)
    except (RunDirError, ConfigError, ValueError) as error:
        click.echo(f"containerizer: {error}", err=True)
        sys.exit(EX_CONFIG)
    _lock(run)
    malloc.one_arena()
    uvloop.run(_serve(run, found, settings, door_settings, scraped_at))


async def _serve(
    run: RunDir, found: machine.Machine, settings: Settings, doors: DoorSettings, scraped_at: metrics.Address | None
) -> None:
    """Does not return: neither a thread stuck in a system call nor an operation that is pending may hold the end."""
    status = await serve.serve(run, found, settings, doors, scraped_at)
    logging.shutdown()
    os._exit(status)


def _lock(run: RunDir) -> None:
    """The one before may be ending: it is given some time."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            run.lock("containerizer")
            return
        except RunDirError as error:
            if time.monotonic() > deadline:
                click.echo(f"containerizer: {error}", err=True)
                sys.exit(1)
            time.sleep(0.02)


@main.command("failpoints")
@click.option("--op", "operation", type=click.Choice(failpoint_names.OPERATIONS), help="Of this operation alone.")
@click.option("--spec", "text", default=_LISTED_SPEC, show_default=True, help="Spec of the container.")
@click.option("--json", "as_json", is_flag=True, help="An object of lists, by operation.")
def list_failpoints(operation: failpoint_names.Operation | None, text: str, as_json: bool) -> None:
    """Prints the failpoints that operations reach on this machine."""
    try:
        given = spec.parse(pb.SpecInput(text=text))
        found = machine.look(secrets.token_hex(4))
        machine.leave(found)
        lists = {
            each: failpoint_names.listed(found, given, each)
            for each in ((operation,) if operation else failpoint_names.OPERATIONS)
        }
    except (RunDirError, ServiceError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(lists, indent=2))
    else:
        for name in dict.fromkeys(name for names in lists.values() for name in names):
            click.echo(name)


@main.command("sweep")
@_run_dir
@click.argument("directories", nargs=-1, metavar="[DIR]...", type=click.Path(path_type=Path))
def sweep(run_dir: Path, directories: tuple[Path, ...]) -> None:
    """Removes what dead pairs have left: an instance's processes and cgroups, then its run directory.

    Of the run directory, or of each DIR, one after the other, all within 15 s.
    """
    signal.alarm(int(_SWEEP_S) + 5)  # whatever it hangs in
    deadline = time.monotonic() + _SWEEP_S
    left = []
    for path in directories or (run_dir,):
        try:
            left += _sweep(path, deadline)
        except RunDirError as error:
            left.append(str(error))
    if left:
        raise click.ClickException("; ".join(left))


def _sweep(path: Path, deadline: float) -> list[str]:
    """What could not be removed, and why. Raises RunDirError where the pair may be alive."""
    if not (path / "lock.supervisor").exists() and not (path / "instance").exists():
        return []  # no run directory
    run = RunDir.open(path)
    locks = [run.lock(service) for service in ("spawner", "containerizer", "switchboard")]
    try:
        if not (path / "instance").exists():
            # It died before it could name a cgroup.
            run.remove_files()
            return []
        found = machine.look(run.instance())
        left: dict[str, str] = {}
        for hierarchy in found.trees:
            left.update(cgroup.remove(hierarchy.base, deadline).left)
        machine.leave(found)
        if not left:
            shutil.rmtree(path, ignore_errors=True)
        return [f"{each}: {why}" for each, why in left.items()]
    finally:
        for lock in locks:
            os.close(lock)


if __name__ == "__main__":
    main()
