"""`top`: containers and what they use, drawn again and again on a terminal; elsewhere one plain table, or JSON."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from tightship.cli import completion, failure, render, signals, style, tables, terminal, values
from tightship.cli.context import Options, common, plain

if TYPE_CHECKING:
    from tightship.client import AsyncClient
    from tightship.v1 import containerizer_pb2 as pb

HEADER = ("NAME", "STATE", "CPU%", "MEMORY", "LIMIT", "TASKS", "CPU", "AGE", "PID", "COMMAND")
SORTS = ("cpu", "memory", "tasks", "age", "name")

# The shortest time over which a rate is measured, and between two drawings.
_SHORTEST_S = 0.1

# The other screen, without a cursor; and back.
_ENTER = b"\x1b[?1049h\x1b[?25l"
_LEAVE = b"\x1b[?25h\x1b[?1049l"


@dataclass
class Sample:
    """All containers at one moment."""

    time: float
    containers: list[pb.Container]
    cpu: dict[str, float] = field(default_factory=dict)
    """Percent of one CPU by id, since the sample before."""

    def since(self, earlier: Sample | None) -> Sample:
        """With rates."""
        if earlier is not None and self.time > earlier.time:
            before = {each.id: _cpu_s(each) for each in earlier.containers}
            for each in self.containers:
                # What began meanwhile has used all of it meanwhile.
                used = max(0.0, _cpu_s(each) - before.get(each.id, 0.0))
                self.cpu[each.id] = 100 * used / (self.time - earlier.time)
        return self

    def sort(self, by: str) -> None:
        keys: dict[str, Any] = {
            "cpu": lambda each: -self.cpu.get(each.id, 0.0),
            "memory": lambda each: -each.usage.memory,
            "tasks": lambda each: -each.usage.tasks,
            "age": lambda each: each.created.ToNanoseconds(),
            "name": lambda each: each.name,
        }
        self.containers.sort(key=lambda each: (keys[by](each), each.name))

    def rows(self) -> list[Sequence[str]]:
        return [self._row(each) for each in self.containers]

    def _row(self, each: pb.Container) -> Sequence[str]:
        usage = each.usage
        rate = self.cpu.get(each.id)
        return (
            each.name,
            render.state(each),
            "-" if rate is None else f"{rate:.1f}",
            render.size(usage.memory) if usage.HasField("memory") else "-",
            render.size(usage.memory_limit) if usage.memory_limit > 0 else "-",
            str(usage.tasks) if usage.HasField("tasks") else "-",
            f"{_cpu_s(each):.1f}s",
            render.age(each.created),
            str(each.pid or "-"),
            render.words(each.command, 200) or "-",
        )

    def summary(self) -> str:
        """How many of each state, and what those at the top of the tree use together."""
        states = Counter(type(each).State.Name(each.state).lower() for each in self.containers)
        counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no containers"
        names = {each.name for each in self.containers}
        tops = [each for each in self.containers if not _has_above(each.name, names)]
        cpu = sum(self.cpu.get(each.id, 0.0) for each in tops)
        return f"{counted}; CPU {cpu:.1f}%, memory {render.size(sum(each.usage.memory for each in tops))}"

    def json(self) -> dict[str, Any]:
        listed = []
        for each in self.containers:
            told = plain(each)
            told["cpu_percent"] = round(self.cpu.get(each.id, 0.0), 1)
            listed.append(told)
        return {"containers": listed}


def _cpu_s(container: pb.Container) -> float:
    return render.seconds(container.usage.cpu_time)


def _has_above(name: str, names: set[str]) -> bool:
    parts = name.split("/")
    return any("/".join(parts[:length]) in names for length in range(2, len(parts)))


@click.command()
@click.option(
    "-d", "--delay", type=values.Seconds(), default=1.0, metavar="TIME",
    help="Between two drawings, and the time over which CPU% is measured (500ms, 2s) [1s].",
)  # fmt: skip
@click.option("-n", "--count", type=click.IntRange(min=1), metavar="N", help="End after N drawings [when told].")
@click.option("-s", "--sort", type=click.Choice(SORTS), default="cpu", help="What comes first [cpu].")
@click.argument("name", required=False, shell_complete=completion.containers)
@common
def top(options: Options, *, delay: float, count: int | None, sort: str, name: str | None) -> int:
    """Show the containers at and below NAME (the caller's own), and what they use, until q or Ctrl-C.

    CPU% is of one CPU, in the last TIME; MEMORY and TASKS are now; CPU is since it was made. All of them include what
    is below. Where standard output is no terminal, one plain table is printed, or N; with --json an object a line.

    \b
    Examples:
      tightship top
      tightship top -s memory /ci
      tightship top -n 1 --json | jq '.containers[] | {name, cpu_percent}'

    Exit status: 0 ended by q, Ctrl-C or N; 5 no such container; 14 no service.
    """
    live = os.isatty(1) and not options.json and os.environ.get("TERM") != "dumb"
    view = _Top(options, options.name(name or "."), max(delay, _SHORTEST_S), count, sort)
    return options.call(view.live if live else view.plain)


@dataclass
class _Top:
    options: Options
    name: str
    delay: float
    count: int | None
    sort: str

    async def plain(self, client: AsyncClient) -> None:
        """Tables one after the other. Each needs a moment for its rates."""
        sample = await self._sample(client, None)
        for number in range(self.count or 1):
            await asyncio.sleep(self.delay)
            sample = await self._sample(client, sample)
            if self.options.json:
                import json

                click.echo(json.dumps(sample.json(), ensure_ascii=False))
                continue
            if number:
                click.echo("")
            tables.table(HEADER, sample.rows())
            sys.stdout.flush()

    async def live(self, client: AsyncClient) -> int:
        from tightship.client import TightshipError

        self.woken = asyncio.Event()
        self.stopped = 0
        sample = await self._sample(client, None)
        problem = ""
        drawn = 0
        with self._screen():
            while not self.stopped:
                self.woken.clear()
                await terminal.write_output(1, self._frame(sample, problem))
                drawn += 1
                if drawn == self.count:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.woken.wait(), self.delay)
                try:
                    sample, problem = await self._sample(client, sample), ""
                except TightshipError as error:
                    if error.number != failure.UNAVAILABLE:
                        raise
                    problem = f"the service is away ({error.message}); trying again"
        return failure.OK if self.stopped in (0, signal.SIGINT) else 128 + self.stopped

    async def _sample(self, client: AsyncClient, earlier: Sample | None) -> Sample:
        found = await client.list(self.name, recursive=True, usage=True)
        sample = Sample(time.monotonic(), found).since(earlier)
        sample.sort(self.sort)
        return sample

    def _frame(self, sample: Sample, problem: str) -> bytes:
        """A screenful, drawn over the one before."""
        size = os.get_terminal_size(1)
        width, height = size.columns or 80, size.lines or 24
        head = f"tightship on {self.options.run_dir}, {time.strftime('%H:%M:%S')}: {sample.summary()}"
        lines = [tables.cut(head, width, middle=False)]
        lines.append(style.paint(tables.cut(problem, width, middle=False), "red"))
        shown = tables.lines(HEADER, sample.rows(), width)
        room = max(2, height - len(lines))
        if len(shown) > room:
            hidden = len(shown) - room + 1
            shown = [*shown[: room - 1], style.paint(f"... and {hidden} more", "dim")]
        drawn = "\n".join(f"{line}\x1b[K" for line in [*lines, *shown])
        return f"\x1b[H{drawn}\x1b[J".encode()

    @contextlib.contextmanager
    def _screen(self) -> Iterator[None]:
        """The terminal is ours, keys come one by one; and it is as it was at the end, whatever that is."""
        loop = asyncio.get_running_loop()
        keys = os.isatty(0)
        settings = termios.tcgetattr(0) if keys else None
        for number in signals.STOP:
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGWINCH, self.woken.set)
        try:
            if keys:
                tty.setcbreak(0, termios.TCSANOW)
                loop.add_reader(0, self._key)
            os.write(1, _ENTER)
            yield
        finally:
            with contextlib.suppress(OSError):  # the terminal has gone
                os.write(1, _LEAVE)
                if settings is not None:
                    termios.tcsetattr(0, termios.TCSANOW, settings)
            loop.remove_reader(0)

    def _key(self) -> None:
        try:
            pressed = os.read(0, 64)
        except OSError:
            pressed = b""
        if b"q" in pressed or b"Q" in pressed or not pressed:
            self._stop(0)

    def _stop(self, number: int) -> None:
        self.stopped = number or signal.SIGINT
        self.woken.set()
