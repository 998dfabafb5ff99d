"""`run`: one command in a container of its own, or in one that is there.

Where no service is up, a pair of services of our own runs it (see embedded.py).
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tightship.cli import failure, launching, progress, signals, values
from tightship.cli.context import Options, common
from tightship.cli.failure import RUN_FAILED
from tightship.cli.launching import LaunchCommand, Runner, launch_options

if TYPE_CHECKING:
    from tightship.cli.embedded import EmbeddedPair
    from tightship.client.requests import LaunchOptions


@click.command(cls=LaunchCommand)
@click.option("-n", "--detach", is_flag=True, help="Leave it running; print its name.")
@launch_options
@click.option("--max-lifetime", type=values.Seconds(), metavar="TIME", help="End a detached one after TIME [no limit].")
@common
def run(
    options: Options,
    *,
    detach: bool,
    max_lifetime: float | None,
    verbose: bool,
    name: str | None,
    command: list[str],
    **given: Any,
) -> int:
    """Run CMD in a container and destroy it afterwards, whatever happens.

    In the container NAME where that exists (which stays), else in a new one of that name, or of a generated name. Its
    output is ours, standard input is passed on when it is a pipe or a file. With no service up, a pair of services of
    its own runs it.

    Ctrl-C cancels and waits for the cleanup; a second one leaves at once. With --json record and cleanup are told as a
    line on stderr, and a spec may be JSON. Its fields: tightship help specs.

    \b
    Examples:
      tightship run -- sh -c 'echo $$; sleep 1'
      tightship run --spec 'memory { limit: 67108864 }' --timeout 10m /job make -j4
      tightship run -n --max-lifetime 1h /web -- python3 -m http.server

    Exit status: the command's; 128+n for a signal, 127 not found, 126 not executable,
    125 any failure of ours, its code in the message.
    """
    try:
        asked, text = launching.asked(options, detach=detach, verbose=verbose, **given)
        asked["max_lifetime"] = max_lifetime
        if name is not None:
            asked["name"], asked["within_existing"] = options.name(name), True
        return _run(options, verbose, command, asked, text)
    except failure.Failure as error:
        failure.tell(error, as_json=options.json)
        return RUN_FAILED


def _run(options: Options, verbose: bool, command: list[str], asked: LaunchOptions, given: str | None) -> int:
    try:
        options.need("containerizer")
        return Runner(options, verbose, command, asked, given, options.run_dir, None).run()
    except failure.Failure as error:
        if error.code != failure.UNAVAILABLE:
            raise
    if asked.get("detach"):
        absent = failure.no_service(options.run_dir)
        raise failure.Failure(
            failure.FAILED_PRECONDITION, f"-n needs services that stay: {absent.message}", step=absent.step
        )
    with _embedded(verbose) as pair:
        return Runner(options, verbose, command, asked, given, pair.directory, pair).run()


@contextlib.contextmanager
def _embedded(verbose: bool) -> Iterator[EmbeddedPair]:
    from tightship.cli.embedded import EmbeddedPair

    # Until the event loop has handlers of its own, and after. The pair's start is not split.
    held: list[int] = []
    signals.handle(lambda number, _frame: held.append(number))
    try:
        pair = EmbeddedPair()
    finally:
        signals.handle(signals.leave)
    stopping = functools.partial(_stop_pair, pair)
    signals.handle(stopping)
    try:
        if held:
            stopping(held[0], None)
        if verbose:
            failure.say(f"no service is up; a pair for this command runs on {pair.directory}")
        import tightship.client.aio  # noqa: F401  while the services start

        with progress.shown("starting services for this command"):
            pair.await_ready()
        yield pair
    finally:
        signals.handle(signals.leave)  # the services notice, and clean up
        left = pair.stop()
        if left is not None:
            failure.say(left)


def _stop_pair(pair: EmbeddedPair, number: int, _frame: object) -> None:
    """On a signal: ends the pair, then this process."""
    signals.handle(signals.leave)
    left = pair.stop()
    failure.say(left or f"cancelled by {signal.Signals(number).name}; nothing is left")
    signals.leave(number, None)
