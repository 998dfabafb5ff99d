"""`python -m tightship.switchboard`: starts the service, and ends it within 5 s of SIGTERM.

At the end it refuses new leases, takes its sockets away, copies what is in the pipes, closes every lease (containers
still running get EPIPE from then on), ends its readers with a status that says resume, and sends its spans.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported: nothing forks here

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import uvloop

from tightship.common import logs, metrics, threads
from tightship.common.clients import ConfigError
from tightship.common.configured import EX_CONFIG, LOG_LEVEL, ServiceCommand
from tightship.common.door_options import door_options
from tightship.common.doors import Doors, DoorSettings
from tightship.common.rundir import DEFAULT, RunDir, RunDirError
from tightship.common.serving import Serving
from tightship.common.telemetry import Tracer
from tightship.kernel import clone
from tightship.switchboard import counts
from tightship.switchboard.attach import Attachments
from tightship.switchboard.audit import Audit
from tightship.switchboard.catalogue import RETENTION_AGE_S, RETENTION_NUMBER, Catalogue, Retention
from tightship.switchboard.fdserver import FdServer
from tightship.switchboard.leases import Leases
from tightship.switchboard.segments import Store
from tightship.switchboard.service import Service
from tightship.switchboard.session import Sessions
from tightship.switchboard.settings import LEASES_MAX, LOG_CAP, Settings, affordable_leases, raise_file_limit

DRAIN_S = 4.0
# Counted by the kernel, for whatever may hang.
END_S = 4.9
_FILE_THREADS = 2
_log = logging.getLogger(__name__)


@click.command(cls=ServiceCommand)
@click.option(
    "--run-dir", envvar="TIGHTSHIP_RUN_DIR", default=DEFAULT, show_default=True, type=click.Path(path_type=Path),
    help="Directory of the pair's sockets.",
)  # fmt: skip
@click.option("--log-dir", type=click.Path(path_type=Path), help="Directory of the output; RUN_DIR/logs by default.")
@click.option(
    "--log-cap", type=click.IntRange(min=0), default=LOG_CAP, show_default=True,
    help="Bytes of output kept for a container, where its launch does not say.",
)  # fmt: skip
@click.option(
    "--retention-age", type=click.FloatRange(min=0), default=RETENTION_AGE_S, show_default=True,
    help="Seconds for which the output of an ended container is kept.",
)  # fmt: skip
@click.option(
    "--retention-number", type=click.IntRange(min=0), default=RETENTION_NUMBER, show_default=True,
    help="Ended containers whose output is kept, at most.",
)  # fmt: skip
@click.option(
    "--leases-max", type=click.IntRange(min=1), default=LEASES_MAX, show_default=True,
    help="Leases that may live; fewer where the limit of open files asks for it.",
)  # fmt: skip
@click.option(
    "--peer-uid", type=click.IntRange(min=0), multiple=True, envvar="TIGHTSHIP_PEER_UID",
    help="User, by number, that may take descriptors; our own always may.",
)  # fmt: skip
@door_options("switchboard")
@click.option("--log-level", envvar="TIGHTSHIP_LOG_LEVEL", default="INFO", show_default=True, type=LOG_LEVEL)
@click.option(
    "--log-format", envvar="TIGHTSHIP_LOG_FORMAT", default="text", show_default=True, type=click.Choice(logs.FORMATS),
    help="Text for people, or a JSON object a line.",
)  # fmt: skip
@click.option(
    "--metrics", "metrics_at", metavar="HOST:PORT",
    help="Serve metrics to Prometheus there [TIGHTSHIP_METRICS, one port higher].",
)  # fmt: skip
def main(
    *,
    run_dir: Path,
    log_dir: Path | None,
    log_cap: int,
    retention_age: float,
    retention_number: int,
    leases_max: int,
    peer_uid: tuple[int, ...],
    doors: Callable[[], DoorSettings],
    log_level: str,
    log_format: str,
    metrics_at: str | None,
) -> None:
    """Serves leases on containers' standard streams, and their bytes."""
    clone.close_range(3, clone.LAST_FD)  # an inherited end of somebody's pipe would be held for ever
    logs.set_up("switchboard", log_level, log_format)
    try:
        scraped_at = metrics.address(metrics_at, 1)
        door_settings = doors()
        run = RunDir.open(run_dir)
        run.lock("switchboard")
    except ConfigError as error:
        click.echo(f"switchboard: {error}", err=True)
        sys.exit(EX_CONFIG)
    except RunDirError as error:
        raise click.ClickException(str(error)) from None
    raise_file_limit()
    settings = Settings(
        run=run,
        log_dir=Path(os.path.abspath(log_dir)) if log_dir else run.logs,
        log_cap=log_cap,
        retention=Retention(retention_age, retention_number),
        leases_max=affordable_leases(leases_max),
        peer_uids=frozenset(peer_uid),
        doors=door_settings,
    )
    sys.exit(uvloop.run(serve(settings, scraped_at)))


async def serve(settings: Settings, scraped_at: metrics.Address | None) -> int:
    """Until SIGTERM or SIGINT; the exit status. Metrics are served at `scraped_at`."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(threads.pool(_FILE_THREADS, "files"))
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)

    tracer = Tracer.from_environment("tightship-switchboard")
    store = Store(settings.log_dir)
    catalogue = Catalogue(store, settings.retention)
    catalogue.adopt_directories()
    leases = Leases(settings, store, catalogue, tracer)
    measured = metrics.Metrics.start("tightship-switchboard", scraped_at, counts.told(leases, tracer))
    sessions = Sessions(leases)
    serving = Serving(settings.run.switchboard_sock)
    service = Service(serving, leases, sessions, Attachments(leases), tracer)
    descriptors = FdServer(settings, leases)
    doors = Doors(serving, settings.run, "switchboard", settings.doors)
    loop.add_signal_handler(signal.SIGHUP, doors.reload)
    try:
        descriptors.start()
        await doors.open()
    except (ConfigError, OSError) as error:
        _log.error("%s", error.strerror if isinstance(error, OSError) else error)
        await leases.close()
        await asyncio.to_thread(measured.stop, 1.0)
        return EX_CONFIG if isinstance(error, ConfigError) else 1
    service.audit = Audit(leases)
    await serving.ready()

    await ending.wait()
    begun = time.monotonic()
    # Its default action ends the process, whatever state the interpreter is in.
    signal.setitimer(signal.ITIMER_REAL, END_S)
    leases.stop_admitting()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(settings.run.switchboard_sock)
    descriptors.stop_listening()
    await leases.shut_down(DRAIN_S)
    sessions.end_all()
    descriptors.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(doors.close(0.2), 0.5)
    await leases.close()
    left = END_S - 0.2 - (time.monotonic() - begun)
    bound = max(0.0, min(2.0, left))
    await asyncio.gather(asyncio.to_thread(tracer.shutdown, bound), asyncio.to_thread(measured.stop, bound))
    logging.shutdown()
    return 0


if __name__ == "__main__":
    main()
