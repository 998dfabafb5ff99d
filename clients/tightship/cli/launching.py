"""A launch as a command has it: its words taken from the command line, its output and status as ours, and nothing left
of it however we end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tightship.cli import completion, failure, output, progress, render, signals, specs, terminal, values
from tightship.cli.context import Options, connect, plain, print_json
from tightship.cli.failure import RUN_FAILED

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tightship.cli.embedded import EmbeddedPair
    from tightship.client import AsyncClient, AsyncLaunch, TightshipError
    from tightship.client.requests import LaunchOptions
    from tightship.v1 import containerizer_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])

NOT_EXECUTABLE = 126
NOT_FOUND = 127

# Output after a cancel: what the switchboard's own bounds for its end allow, and a little.
_LAST_OUTPUT_S = 3.0


class LaunchCommand(click.Command):
    """Options, then `[NAME] [--] CMD...`: the first word is NAME unless it is `--`; what follows is the command's."""

    needs_name = False

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        name = "NAME" if self.needs_name else "[NAME]"
        return [*super().collect_usage_pieces(ctx), f"{name} [--] CMD..."]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = self._options_end(args)
        rest = super().parse_args(ctx, args[:end])
        name, command = split(args[end:])
        if not ctx.resilient_parsing:
            self._check(ctx, name, command)
        ctx.params["name"], ctx.params["command"] = name, command
        return rest

    def _check(self, ctx: click.Context, name: str | None, command: list[str]) -> None:
        if self.needs_name and name is None:
            raise click.UsageError("NAME is missing: the container to run it in", ctx)
        if not command:
            hint = f"; for a generated name write: tightship run -- {name}" if name and not self.needs_name else ""
            raise click.UsageError(f"a command is missing{hint}", ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Options, or, of the command, files."""
        if incomplete.startswith("-") and not ctx.params.get("command") and not ctx.params.get("name"):
            return super().shell_complete(ctx, incomplete)
        return completion.files(ctx, self.params[0], incomplete)

    def _options_end(self, args: Sequence[str]) -> int:
        """Where our options end: at `--`, or at the first word that is neither an option nor an option's value."""
        takes_value = {
            name: not (param.is_flag or param.count)
            for param in self.params
            if isinstance(param, click.Option)
            for name in param.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
            word = args[at]
            at += 1
            if word.startswith("--"):
                at += takes_value.get(word, False)  # `--spec=X` holds its value
                continue
            for index, letter in enumerate(word[1:], 2):
                if takes_value.get("-" + letter, False):
                    at += index == len(word)  # `-cFILE` holds its value
                    break
        return at


def split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """NAME, where the first word is not `--`, and the command."""
    if not words:
        return None, []
    if words[0] == "--":
        return None, [*words[1:]]
    command = [*words[1:]]
    if command[:1] == ["--"]:
        del command[0]
    return words[0], command


_OPTIONS = (
    click.option(
        "-i", "--stdin", is_flag=True, help="Pass standard input, whatever it is; with -n: a pipe for `attach`."
    ),
    click.option("--spec", "spec_text", metavar="SPEC", help="Limits, as protobuf text; with --json also as JSON."),
    click.option(
        "-c",
        "--config",
        metavar="FILE",
        help="Read the spec from FILE, or from standard input (-).",
        shell_complete=completion.files,
    ),
    click.option(
        "--env", multiple=True, metavar="K=V", help="A variable; K alone takes ours. Nothing else is inherited."
    ),
    click.option("--cwd", default="", metavar="DIR", help="Working directory [/]."),
    click.option(
        "--timeout",
        type=values.Seconds(),
        metavar="TIME",
        help="End it after TIME: 2, 500ms, 1.5s, 10m, 1h [no limit].",
    ),
    click.option("--label", multiple=True, metavar="K=V", help="A label; may be repeated."),
    click.option("-v", "--verbose", is_flag=True, help="Tell limits in force, record and cleanup on stderr."),
)


def launch_options(command: F) -> F:
    """Gives a command the options that say how something is launched, for `asked`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def asked(
    options: Options,
    *,
    detach: bool = False,
    stdin: bool,
    spec_text: str | None,
    config: str | None,
    env: tuple[str, ...],
    cwd: str,
    timeout: float | None,
    label: tuple[str, ...],
    verbose: bool,
) -> tuple[LaunchOptions, str | None]:
    """What the options ask for, and the spec as it was written."""
    if stdin and config == values.STDIN and not detach:
        raise click.UsageError("-i and -c - both want standard input", click.get_current_context())
    passed = stdin if detach else stdin or (config != values.STDIN and terminal.input_is_passed())
    given = values.spec(spec_text, config)
    return {
        "env": values.environment(env),
        "cwd": cwd,
        "timeout": timeout,
        "labels": values.pairs(label, "--label"),
        "detach": detach,
        "report_in_force": verbose or options.json,
        "stdin": passed,
        "spec": None if given is None else specs.parse(given, json=options.json),
    }, given


@dataclass
class Runner:
    """One run on a pair that is up."""

    options: Options
    verbose: bool
    command: list[str]
    asked: LaunchOptions
    given: str | None
    """The spec as the user wrote it."""
    directory: str
    embedded: EmbeddedPair | None

    def run(self) -> int:
        self.signal = 0
        self.stopped = asyncio.Event()
        try:
            return asyncio.run(self._main())
        except asyncio.CancelledError:
            return 128 + self.signal  # while leaving

    async def _main(self) -> int:
        from tightship.client import TightshipError

        self.task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in signals.STOP:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        async with connect(self.directory) as client:
            try:
                if self.embedded is not None:
                    await client.ready(10.0)
                status = await self._launch(client)
            except TightshipError as error:
                return self._failed(error)
            except asyncio.CancelledError:
                if not self.signal:
                    raise
                return self._cancelled("before it ran")
            if self.verbose and self.embedded is not None:
                found = await client.audit()
                failure.say(f"audit: {len(found.findings)} left; examined: {render.examined(dict(found.examined))}")
            return status

    def _on_signal(self, number: int) -> None:
        if self.signal:
            signals.leave(number, None)
        self.signal = number
        if self.stopped.is_set():
            return
        self.stopped.set()
        if not self.started and self.task is not None:
            self.task.cancel()

    started = False

    async def _launch(self, client: AsyncClient) -> int:
        async with client.launch(self.command, **self.asked) as launched:
            self.started = True
            try:
                self._tell_started(launched)
            except OSError:
                if self.asked.get("detach"):  # whoever started it can't know it
                    await client.destroy(launched.id, force=True)
                raise
            if self.asked.get("detach"):
                return failure.OK
            return await self._follow(launched)

    async def _follow(self, launched: AsyncLaunch) -> int:
        """Output and input until the end of both the process and its output, or a signal; the status."""
        copying = asyncio.create_task(output.copy(launched.output()))
        tasks: list[asyncio.Task[Any]] = [copying]
        if self.asked.get("stdin"):
            tasks.append(asyncio.create_task(output.feed(launched.stdin())))
        gone = asyncio.create_task(launched.wait())
        stopped = asyncio.create_task(self.stopped.wait())
        tasks += [gone, stopped]
        try:
            await asyncio.wait([copying, stopped], return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return await self._cancel(launched, copying)
            try:
                await copying
            except BrokenPipeError:
                return failure.BROKEN_PIPE  # leaving cancels it
            self._tell_output(launched)
            await asyncio.wait([gone, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                return await self._cancel(launched, copying)
            record = await gone
            self._tell_ended(record, await launched.gone())
            return _status(record)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # told already, or of no interest when leaving

    async def _cancel(self, launched: AsyncLaunch, copying: asyncio.Task[None]) -> int:
        """After a signal to us: ends it, prints its last output, and reports."""
        begun = time.monotonic()
        with progress.shown(f"cancelling {launched.name}"):
            await launched.cancel()
        took = time.monotonic() - begun
        await asyncio.wait([copying], timeout=_LAST_OUTPUT_S)
        return self._cancelled(f"nothing of {launched.name} is left after {took:.2f} s")

    def _cancelled(self, state: str) -> int:
        message = f"cancelled by {signal.Signals(self.signal).name}; {state}"
        if self.options.json:
            failure.tell(failure.Failure(failure.CANCELLED, message), as_json=True)
        else:
            failure.say(message)
        return 128 + self.signal

    def _failed(self, error: TightshipError) -> int:
        specs.place(self.given, error.metadata)
        failed = failure.failed_call(error, self.directory, embedded=self.embedded is not None)
        missing = error.errno == "ENOENT"
        if error.stage == "exec":
            program = self.command[0]
            failed.message = f"{program}: {'not found' if missing else error.message}{_hint(program, missing)}"
        failure.tell(failed, as_json=self.options.json)
        if error.stage != "exec":
            return RUN_FAILED
        return NOT_FOUND if missing else NOT_EXECUTABLE

    def _tell_started(self, launched: AsyncLaunch) -> None:
        started = launched.started
        if self.asked.get("detach"):
            if self.options.json:
                print_json(plain(started))
            else:
                click.echo(started.name)
        if self.verbose:
            failure.say(f"{started.name} ({started.id}) started, pid {started.pid}")
            for each in started.in_force:
                failure.say(f"in force: {each.field} {each.value} ({each.file})")

    def _tell_output(self, launched: AsyncLaunch) -> None:
        if launched.output_cut:
            failure.say(f"output may be incomplete: {launched.output_cut}")

    def _tell_ended(self, record: pb.Record, cleanup: pb.Cleanup) -> None:
        if self.options.json:
            import json

            with contextlib.suppress(OSError):
                click.echo(json.dumps({"record": plain(record), "cleanup": plain(cleanup)}), err=True)
        elif self.verbose:
            for line in render.record_lines(record):
                failure.say(line)
            failure.say(f"cleanup {render.cleanup_sum(cleanup)}")
        elif record.reason not in (record.EXITED, record.SIGNALLED):
            failure.say(f"{record.name}: {render.ending(record)}")
        for line in cleanup.left:
            failure.say(f"cleanup goes on: {line}")


def _hint(program: str, missing: bool) -> str:
    """What may have been meant, where the program can't be executed."""
    if program.startswith("-"):
        return "; options after NAME are the command's: write them before it"
    if missing and "/" in program and os.path.exists(program):
        return "; the file is there: its interpreter, named in its first line, is not"
    return ""


def _status(record: pb.Record) -> int:
    if record.HasField("exit_code"):
        return record.exit_code
    return 128 + record.signal if record.HasField("signal") else RUN_FAILED
