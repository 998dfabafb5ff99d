"""Messages as text for people: rows of tables, sizes, times, and what happened to a container."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

    from tightship.v1 import containerizer_pb2 as pb
    from tightship.v1 import switchboard_pb2

# Finding.OPEN_FILE of containerizer.proto; other kinds are called as they are there.
_KINDS = {3: "descriptor"}

# STREAM_STDOUT and STREAM_STDERR of switchboard.proto.
_OUTPUTS = (2, 3)


def container_rows(containers: Iterable[pb.Container]) -> Iterable[Sequence[str]]:
    for each in containers:
        yield (
            each.name,
            state(each),
            str(each.pid or "-"),
            age(each.record.ended if each.HasField("record") else each.created),
            each.id,
            words(each.command) or "-",
        )


def state(container: pb.Container) -> str:
    name = type(container).State.Name(container.state)
    if container.HasField("record"):
        return f"{name} ({ending(container.record)})"
    return f"{name} ({container.pending_reason})" if container.pending_reason else name


def ending(record: pb.Record) -> str:
    """How it ended, in few words: `exited 1`, `signalled 9, timeout`."""
    reason = type(record).Reason.Name(record.reason).lower()
    if reason == "failed":
        return f"failed: {record.error}" if record.error else "failed"
    if record.HasField("exit_code"):
        how = f"exited {record.exit_code}"
    elif record.HasField("signal"):
        how = f"signalled {record.signal}"
    else:
        return "unknown" if reason == "unknown" else f"unknown, {reason}"
    if reason in ("exited", "signalled"):
        return how
    told = record.cancel_reason not in ("", reason)
    return f"{how}, {reason}" + (f" ({record.cancel_reason})" if told else "")


def record_lines(record: pb.Record) -> Iterable[str]:
    yield f"{record.name} ({record.id}): {ending(record)}"
    facts = [f"wall {seconds(record.wall_time):.3f} s", f"CPU {seconds(record.cpu_time):.3f} s"]
    if record.HasField("peak_memory"):
        facts.append(f"peak memory {size(record.peak_memory)}")
    if record.oom_kills:
        facts.append(f"{record.oom_kills} killed for lack of memory")
    yield "  " + ", ".join(facts)


def cleanup_lines(cleanup: pb.Cleanup) -> Iterable[str]:
    """What was removed, what is left, and the sum."""
    for line in cleanup.removed:
        yield f"removed {line}"
    for line in cleanup.left:
        yield f"left {line}"
    yield cleanup_sum(cleanup) if cleanup.removed or cleanup.left else "nothing to remove"


def cleanup_sum(cleanup: pb.Cleanup) -> str:
    outcome = type(cleanup).Outcome.Name(cleanup.outcome).lower()
    return (
        f"{outcome} in {seconds(cleanup.took):.3f} s: {cleanup.cgroups_removed} cgroups, "
        f"{cleanup.processes_killed} processes, {cleanup.leases_closed} leases"
    )


def finding_rows(findings: Iterable[pb.Finding]) -> Iterable[Sequence[str]]:
    for each in findings:
        fate = "fixed" if each.fixed else each.error or ("ours" if each.ours else "not ours")
        yield _KINDS.get(each.kind) or type(each).Kind.Name(each.kind).lower(), fate, each.what, each.origin or "-"


def lease_rows(leases: Iterable[switchboard_pb2.Lease]) -> Iterable[Sequence[str]]:
    for each in leases:
        left = f"{seconds(each.time_left):.1f} s" if each.HasField("time_left") else "-"
        sizes = {int(stream.stream): stream.size for stream in each.streams}
        out = " ".join(size(sizes[stream]) if stream in sizes else "-" for stream in _OUTPUTS)
        why = f" ({each.end_reason})" if each.end_reason else ""
        yield (
            each.lease_id,
            type(each).State.Name(each.state) + why,
            left,
            ",".join(each.holders) or "-",
            out,
            each.labels.get("container", "") or "-",
        )


def examined(counts: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def size(number: int) -> str:
    amount, unit = float(number), "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, bigger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def age(time: Timestamp) -> str:
    if not time.seconds:
        return "-"
    past = max(0, int(datetime.datetime.now(datetime.UTC).timestamp()) - time.seconds)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if past >= length:
            return f"{past // length}{unit}"
    return f"{past}s"


def words(command: Sequence[str], longest: int = 60) -> str:
    text = " ".join(command).encode("unicode_escape").decode()
    return text if len(text) <= longest else text[: longest - 1] + "…"


def stats_rows(found: pb.StatsResponse) -> list[tuple[str, str]]:
    """One row for each number that is told."""
    rows = []
    for field, value in found.ListFields():
        if field.name == "pressure":
            for resource in sorted(value):
                rows += _numbers(f"pressure.{resource}", value[resource])
        elif field.name == "io":
            for each in value:
                rows += [row for row in _numbers(f"io.{each.device}", each) if not row[0].endswith(".device")]
        elif field.name != "time":
            rows += _numbers(field.name, value)
    return rows


def _numbers(where: str, message: Message) -> list[tuple[str, str]]:
    return [
        (
            f"{where}.{field.name}",
            f"{value.ToNanoseconds() / 1e9:.6f}" if field.message_type is not None else str(value),
        )
        for field, value in message.ListFields()
    ]
