"""`up` and `down`: the pair of services on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import subprocess
from types import FrameType
from typing import TYPE_CHECKING

import click

from tightship.cli import failure, machine, progress, signals, supervisor
from tightship.cli.context import Options, common, print_json

if TYPE_CHECKING:
    from tightship.client import AsyncClient

_HEALTHY_S = 15.0

# Over the supervisor's own bounds for ending the pair.
_DOWN_S = 40.0


@click.command()
@click.option("-d", "--detach", is_flag=True, help="In the background; returns when the services are healthy.")
@click.option(
    "--metrics", metavar="HOST:PORT",
    help="Serve metrics to Prometheus: the containerizer there, the switchboard one port higher [TIGHTSHIP_METRICS].",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(("text", "json")), help="Of the services' log [TIGHTSHIP_LOG_FORMAT, else text]."
)
@common
def up(options: Options, *, detach: bool, metrics: str | None, log_format: str | None) -> int:
    """Start the two services and keep them running, in the foreground unless -d. Ctrl-C or `down` ends them.

    In the background their log is service.log in the run directory. Variables that they read: tightship help
    environment.

    \b
    Examples:
      tightship up -d
      tightship up --metrics 127.0.0.1:9464 --log-format json

    Exit status: 0 up, or ended by down; 7 no cgroups for this user; 9 already up; 14 it did not start.
    """
    missing = machine.missing()
    if missing is not None:
        raise failure.Failure(failure.PERMISSION_DENIED, missing)
    already = supervisor.running(options.run_dir)
    if already is not None:
        raise failure.Failure(
            failure.FAILED_PRECONDITION,
            f"already up on {options.run_dir} (pid {already[0]})",
            step="end it: tightship down",
        )
    _refuse_public(options.run_dir)
    if metrics is not None:
        os.environ["TIGHTSHIP_METRICS"] = metrics
    if log_format is not None:
        os.environ["TIGHTSHIP_LOG_FORMAT"] = log_format
    if not detach:
        command = supervisor.command(options.run_dir)
        # They wait until it has handlers: it is Python too, and tells of a Ctrl-C with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP)
        os.execv(command[0], command)  # noqa: S606  no shell is wanted
    logged = supervisor.log_size(options.run_dir)
    process, ready = supervisor.start(options.run_dir)
    signals.handle(functools.partial(_stop, process))
    with progress.shown("starting the services"):
        is_ready = supervisor.await_ready(ready)
    if not is_ready:
        raise _did_not_start(options, process, logged)
    try:
        with progress.shown("waiting until both services are healthy"):
            options.call(_healthy)
    except failure.Failure:
        raise _did_not_start(options, process, logged) from None
    if options.json:
        print_json({"run_dir": options.run_dir, "pid": process.pid})
    else:
        log = os.path.join(options.run_dir, "service.log")
        click.echo(f"tightship is up on {options.run_dir} (pid {process.pid}, log {log}); end it: tightship down")
    return failure.OK


@click.command()
@common
def down(options: Options) -> int:
    """End the services that `up -d` started. Attached launches are cancelled; detached containers stay.

    \b
    Example: tightship down

    Exit status: 0 ended; 4 still ending; 14 nothing is up.
    """
    found = supervisor.running(options.run_dir)
    if found is None:
        raise failure.Failure(failure.UNAVAILABLE, f"nothing is up on {options.run_dir}")
    pid, pidfd = found
    try:
        with progress.shown("ending the services, and what is attached to them"):
            ended = supervisor.stop(pidfd, _DOWN_S)
    except PermissionError:
        raise failure.Failure(failure.PERMISSION_DENIED, f"pid {pid} is another user's") from None
    finally:
        os.close(pidfd)
    if not ended:
        raise failure.Failure(failure.DEADLINE_EXCEEDED, f"pid {pid} is still ending after {_DOWN_S:.0f} s")
    if options.json:
        print_json({"run_dir": options.run_dir, "pid": pid})
    return failure.OK


def _refuse_public(directory: str) -> None:
    """Raises Failure where others could put a socket of theirs in the place of ours."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(directory).st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IWOTH:
            raise failure.Failure(
                failure.FAILED_PRECONDITION,
                f"everybody may write in {directory}, so anybody could replace the sockets: chmod o-w it, or use"
                " another --run-dir",
            )


async def _healthy(client: AsyncClient) -> None:
    await client.ready(_HEALTHY_S)


def _stop(process: subprocess.Popen[bytes], number: int, frame: FrameType | None) -> None:
    """On a signal before it is up: ends what has begun, then this process."""
    signals.handle(signals.leave)
    _end(process)
    signals.leave(number, frame)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_DOWN_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _did_not_start(options: Options, process: subprocess.Popen[bytes], logged: int) -> failure.Failure:
    _end(process)
    tail = supervisor.log_tail(options.run_dir, logged)
    return failure.Failure(
        failure.UNAVAILABLE, f"the services on {options.run_dir} did not start:\n{tail}".rstrip(":\n")
    )
