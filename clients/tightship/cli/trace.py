"""`trace`: what happened to a container, drawn as a tree of spans in the terminal, from the services' own rows."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tightship.cli import completion, render, style, tables
from tightship.cli.context import Options, common, plain, print_json
from tightship.telemetry import child
from tightship.telemetry import conventions as names

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

    from tightship.client import AsyncClient
    from tightship.v1 import containerizer_pb2 as pb
    from tightship.v1 import switchboard_pb2

LAST = "last"


@click.command()
@click.argument("name", shell_complete=completion.containers)
@common
def trace(options: Options, *, name: str) -> int:
    """Draw what happened to a container (NAME or id), step by step; `last`: to the one that began or ended last.

    It needs no tracing system: a container that lives has its trace, and one that has ended keeps it as long as its
    record. A container named "last" is written ./last. With --json each span is an object, as in the protos.

    \b
    Example: tightship trace last

    Exit status: 0 drawn; 5 no such container.
    """

    async def call(client: AsyncClient) -> None:
        told = await client.trace(LAST if name == LAST else options.name_or_id(name))
        await _add_lease(client, told)
        if options.json:
            print_json(plain(told))
            return
        for line in _heading(told, await _ending(client, told.id)):
            click.echo(line)
        width = style.width()
        for text, failed in _drawn(told):
            fitting = text if width is None else tables.cut(text, width, middle=False)
            click.echo(style.paint(fitting, "red") if failed else fitting)

    return options.call(call)


async def _add_lease(client: AsyncClient, told: pb.TraceResponse) -> None:
    """The lease's span, which is the switchboard's, where it can be had."""
    from tightship.client import TightshipError

    launch = next((span for span in told.spans if span.name == "launch"), None)
    if launch is None:
        return
    try:
        lease = await client.lease(told.id)
    except TightshipError:
        return  # never made, forgotten, or nobody there to ask
    span = told.spans.add(
        name=names.LEASE,
        span_id=child(f"00-{told.trace_id or told.id * 2}-{launch.span_id}-00", names.LEASE_KEY)[36:52],
        parent_span_id=launch.span_id,
        start=lease.acquired,
        attributes=_lease_attributes(lease),
    )
    if lease.HasField("closed"):
        span.end.CopyFrom(lease.closed)


def _lease_attributes(lease: switchboard_pb2.Lease) -> dict[str, str]:
    told = {names.LEASE_ID: lease.lease_id, names.LEASE_END: lease.end_reason}
    for key, stream in zip((names.STDOUT_BYTES, names.STDERR_BYTES), lease.streams, strict=False):
        told[key] = str(stream.size)
    if lease.exit.HasField("code"):
        told[names.EXIT_CODE] = str(lease.exit.code)
    if lease.exit.HasField("signal"):
        told[names.EXIT_SIGNAL] = str(lease.exit.signal)
    return told


async def _ending(client: AsyncClient, identity: str) -> str:
    """How it is, or how it ended; empty for what leaves no record."""
    from tightship.client import TightshipError

    try:
        container = await client.get(identity)
    except TightshipError:
        return ""
    return render.ending(container.record) if container.HasField("record") else render.state(container)


def _heading(told: pb.TraceResponse, ending: str) -> Iterator[str]:
    yield f"{told.name} ({told.id})" + (f": {ending}" if ending else "")
    begun = datetime.datetime.fromtimestamp(told.spans[0].start.ToNanoseconds() / 1e9).astimezone()
    where = f", trace {told.trace_id}" if told.trace_id else ""
    yield f"{begun:%Y-%m-%d %H:%M:%S}{where}{' (not sampled)' if told.trace_id and not told.sampled else ''}"


def _drawn(told: pb.TraceResponse) -> Iterator[tuple[str, bool]]:
    """A line for each span, in the order of the tree; and whether it failed."""
    known = {span.span_id for span in told.spans}
    below: dict[str, list[pb.TraceSpan]] = {}
    for span in told.spans:
        below.setdefault(span.parent_span_id if span.parent_span_id in known else "", []).append(span)
    zero = told.spans[0].start.ToNanoseconds()
    lines: list[tuple[str, pb.TraceSpan]] = []

    def draw(parent: str, indent: str) -> None:
        spans = sorted(below.get(parent, ()), key=lambda span: span.start.ToNanoseconds())
        for span in spans:
            last = span is spans[-1]
            lines.append((indent + ("" if not parent else "└─ " if last else "├─ ") + _label(span), span))
            draw(span.span_id, indent + ("" if not parent else "   " if last else "│  "))

    draw("", "")
    width = max(len(label) for label, _ in lines)
    for label, span in lines:
        begins = _time(span.start.ToNanoseconds() - zero)
        lasts = _lasted(span.start, span.end) if span.HasField("end") else "goes on"
        yield f"{label.ljust(width)}  {'+' + begins:>10}  {lasts:>10}  {_notes(span)}".rstrip(), bool(span.error)


def _label(span: pb.TraceSpan) -> str:
    return "lease (switchboard)" if names.LEASE_ID in span.attributes else span.name


def _notes(span: pb.TraceSpan) -> str:
    """What its attributes say, in few words."""
    told = span.attributes
    notes = []
    if names.CANCEL_REASON in told:
        at = f" at {told[names.CANCEL_STEP]}" if names.CANCEL_STEP in told else ""
        notes.append(told[names.CANCEL_REASON] + at)
        notes.append(f"budget {_time(int(told[names.CLEANUP_BUDGET_MS]) * 1_000_000)}")
        counts = f"{told[names.CLEANUP_CGROUPS]} cgroups, {told[names.CLEANUP_PROCESSES]} processes"
        outcome = told.get(names.CLEANUP_OUTCOME, "so far")
        notes.append(f"{outcome}: {counts}, {told[names.CLEANUP_LEASES]} leases")
    if names.LEASE_ID in told:
        notes.append(told[names.LEASE_END] or "open")
        if names.EXIT_CODE in told:
            notes.append(f"exit code {told[names.EXIT_CODE]}")
        if names.EXIT_SIGNAL in told:
            notes.append(f"signal {told[names.EXIT_SIGNAL]}")
        notes.append(f"{told.get(names.STDOUT_BYTES, '0')} + {told.get(names.STDERR_BYTES, '0')} bytes")
    if span.error:
        notes.append(f"{span.error_type}: {' '.join(span.error.split())}")
    return "; ".join(notes)


def _lasted(start: Timestamp, end: Timestamp) -> str:
    return _time(end.ToNanoseconds() - start.ToNanoseconds())


def _time(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms" if abs(ns) < 1_000_000_000 else f"{ns / 1e9:.2f} s"
