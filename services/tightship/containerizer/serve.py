"""The process of the containerizer: its parts put together, recovery begun, and the orderly end.

It ends at SIGTERM, having cancelled what is attached; and at once when the spawner's connection ends, since the journal
and the next pair take it from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sqlite3
import time

from tightship.common import metrics, threads
from tightship.common.clients import ConfigError
from tightship.common.configured import EX_CONFIG
from tightship.common.doors import Doors, DoorSettings
from tightship.common.packets import Packet
from tightship.common.rundir import RunDir
from tightship.common.serving import Serving
from tightship.common.telemetry import Tracer
from tightship.containerizer import admission, counts, machine, recovery
from tightship.containerizer.journal import Journal, Kind, Phase, remove_other_boots
from tightship.containerizer.machine import Machine
from tightship.containerizer.operations import Operation, Parts
from tightship.containerizer.records import Exit
from tightship.containerizer.registry import Registry
from tightship.containerizer.service import SHARED, Service
from tightship.containerizer.settings import Settings
from tightship.containerizer.spans import SLOW_S
from tightship.containerizer.spawner_link import SpawnerLink, VersionRefused
from tightship.containerizer.switchboard_link import SwitchboardLink
from tightship.kernel import malloc
from tightship.v1 import containerizer_pb2_grpc
from tightship.v1 import switchboard_pb2 as sb

log = logging.getLogger(__name__)

# Worker threads for cgroup steps; each may hang in a system call.
_THREADS = 8
_RETIRE_EVERY_S = 5.0
# grpc leaves a cycle of five objects for each call: collected every twenty calls they don't add up.
_COLLECT = (100, 5, 5)
# After so many launches, and when for so long none has come, what they needed is given back.
_BURST = 50
_QUIET_S = 0.25
# The spawner kills 20 s after its SIGTERM.
_STOP_S = 14.0
_SERVER_GRACE_S = 1.0
_FLUSH_S = 2.0


async def serve(
    run: RunDir, found: Machine, settings: Settings, door_settings: DoorSettings, scraped_at: metrics.Address | None
) -> int:
    """Until SIGTERM, SIGINT or the end of the spawner; the exit status. Metrics are served at `scraped_at`."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    remove_other_boots(run.path)
    journal = Journal(
        run.journal(found.boot), retention_age=settings.retention_age, retention_count=settings.retention_count
    )
    if journal.rebuilt:
        log.error("the journal was unreadable and has been set aside; rebuilding it")
    registry = Registry()
    tracer = Tracer.from_environment("tightship-containerizer")
    parts = Parts(
        run_dir=run,
        settings=settings,
        machine=found,
        journal=journal,
        registry=registry,
        spawner=SpawnerLink(run.spawner_sock, lambda event: _on_event(registry, event)),
        switchboard=SwitchboardLink(
            run.switchboard_sock,
            admission.owner(found.instance),
            lambda lease: _on_closed(registry, lease),
            lambda leases: _on_welcome(registry, leases),
        ),
        tracer=tracer,
        pool=threads.pool(_THREADS, "cgroup"),
        counts=counts.Counts(),
    )
    measured = metrics.Metrics.start("tightship-containerizer", scraped_at, counts.told(parts))
    if found.oom_floor > -1000:
        log.info(
            "CAP_SYS_RESOURCE is missing: memory.eviction_priority can't lower oom_score_adj below %d", found.oom_floor
        )
    operations = recovery.load(parts)
    serving = Serving(run.containerizer_sock)
    service = Service(parts, serving)
    serving.add(containerizer_pb2_grpc.add_ContainerizerServiceServicer_to_server, service, SHARED)
    doors = Doors(serving, run, "containerizer", door_settings)
    loop.add_signal_handler(signal.SIGHUP, doors.reload)
    try:
        await doors.open()
    except ConfigError as error:
        log.error("%s", error)
        return EX_CONFIG
    except OSError as error:
        log.error("%s", error.strerror)
        return 1
    parts.switchboard.start()
    try:
        hello = await _connect(parts, stop)
    except VersionRefused as error:
        log.error("the spawner speaks no version of ours: %s", error)
        return EX_CONFIG
    except (OSError, TimeoutError) as error:
        log.error("the spawner can't be reached: %s", error)
        return 1
    if hello is not None:
        recoveries = recovery.begin(parts, operations, hello)
        service.ready.set()
        await serving.ready()
        gc.collect()
        gc.freeze()  # what is here now stays; collections need not look at it
        gc.set_threshold(*_COLLECT)
        keeping = [asyncio.create_task(each(parts), name=each.__name__) for each in (_retire, _settle, _tidy)]
        await _first(stop, parts.spawner.ended)
        for each in keeping:
            each.cancel()
        if parts.spawner.ended.is_set():
            log.warning("the spawner's connection has ended")
            return 1
        await _end(parts, service, recoveries)
    await doors.close(_SERVER_GRACE_S)
    await parts.switchboard.stop()
    parts.spawner.close()
    machine.leave(found)
    registry.finish()
    journal.close()
    await asyncio.gather(
        asyncio.to_thread(tracer.shutdown, _FLUSH_S),
        asyncio.to_thread(measured.stop, _FLUSH_S),
    )
    return 0


async def _connect(parts: Parts, stop: asyncio.Event) -> Packet | None:
    """The spawner's answer to HELLO; None when told to stop first."""
    connecting = asyncio.ensure_future(parts.spawner.connect())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((connecting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not connecting.done():
        connecting.cancel()
        return None
    return connecting.result()


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()


async def _end(parts: Parts, service: Service, recoveries: list[asyncio.Task[None]]) -> None:
    """Cancels what is attached, or everything, and waits for it."""
    service.stopping.set()
    ending = [each for each in parts.registry.by_id.values() if parts.settings.ephemeral or _is_attached(each)]
    for operation in ending:
        operation.ask("shutdown")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await asyncio.gather(*recoveries)
            for operation in ending:
                await operation.until(lambda operation=operation: operation.over)  # type: ignore[misc]


def _is_attached(operation: Operation) -> bool:
    row = operation.row
    if row.phase is not Phase.COMMITTED:
        return True
    return row.kind is Kind.LAUNCH and not row.detach


async def _retire(parts: Parts) -> None:
    """Forgets records past retention, and has their logs forgotten."""
    while True:
        await asyncio.sleep(_RETIRE_EVERY_S)
        try:
            gone = parts.journal.retire()
        except sqlite3.Error as error:
            log.error("records can't be retired: %s", error)
            continue
        for lease in gone:
            parts.switchboard.forget(lease)


async def _settle(parts: Parts) -> None:
    """What lives for longer needs less memory."""
    while True:
        await asyncio.sleep(SLOW_S)
        parts.registry.settle(time.time_ns() - int(SLOW_S * 1e9))


async def _tidy(parts: Parts) -> None:
    """Gives back what a burst of launches needed, when it is over."""
    removed = parts.registry.removed
    while True:
        begun = parts.registry.added
        await asyncio.sleep(_QUIET_S)
        if parts.registry.added == begun and parts.registry.removed - removed >= _BURST:
            removed = parts.registry.removed
            gc.collect()
            await asyncio.to_thread(malloc.trim)


def _on_event(registry: Registry, event: Packet) -> None:
    operation = registry.by_id.get(str(event.get("launch")))
    if operation is None:
        return
    match event.get("event"):
        case "exited":
            operation.on_exit(Exit.from_packet(event))
        case "closed":
            operation.on_lease_closed(operation.row.id)


def _on_closed(registry: Registry, lease: sb.Lease) -> None:
    operation = registry.by_id.get(lease.lease_id)
    if operation is not None:
        operation.on_lease_closed(lease.lease_id)


def _on_welcome(registry: Registry, leases: frozenset[str]) -> None:
    for operation in registry.by_id.values():
        operation.on_welcome(leases)
