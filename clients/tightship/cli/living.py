"""Commands on living containers: killall, pause, resume, update, stats, detect."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from tightship.cli import completion, failure, progress, render, specs, tables, values
from tightship.cli.context import Options, common, plain, print_json

if TYPE_CHECKING:
    from tightship.client import AsyncClient


@click.command()
@click.option(
    "-s", "--signal", default="KILL", metavar="SIGNAL", help="Name or number [KILL].",
    shell_complete=completion.signals,
)  # fmt: skip
@click.argument("name", shell_complete=completion.containers)
@common
def killall(options: Options, *, signal: str, name: str) -> int:
    """Send a signal to every process of a container (NAME or id), and of those below it.

    \b
    Example: tightship killall /web -s HUP

    Exit status: 0 signalled; 3 no such signal; 5 no such container.
    """
    if not signal.strip():
        raise failure.Failure(failure.INVALID_ARGUMENT, "signal: it is empty; give a name or a number, as TERM or 15")

    async def call(client: AsyncClient) -> None:
        target = options.name_or_id(name)
        count = await client.kill_all(target, signal)
        if options.json:
            print_json({"name": target, "signal": signal, "processes": count})

    return options.call(call)


@click.command()
@click.option("--budget", type=values.Seconds(), metavar="TIME", help="Time for it [5s; at most 60s].")
@click.argument("name", shell_complete=completion.containers)
@common
def pause(options: Options, *, budget: float | None, name: str) -> int:
    """Stop all processes of a container (NAME or id), and of those below it, where they are.

    \b
    Example: tightship pause /web

    Exit status: 0 all stand still; 4 not within TIME, so they run on; 5 no such container; 9 it is closing.
    """

    async def call(client: AsyncClient) -> None:
        target = options.name_or_id(name)
        with progress.shown(f"pausing {target}"):
            await client.pause(target, budget=budget)
        if options.json:
            print_json({"name": target, "state": "PAUSED"})

    return options.call(call)


@click.command()
@click.argument("name", shell_complete=completion.containers)
@common
def resume(options: Options, *, name: str) -> int:
    """Go on with what was paused in a container (NAME or id).

    \b
    Example: tightship resume /web

    Exit status: 0 it goes on; 5 no such container; 9 one above it is paused, or it is closing.
    """

    async def call(client: AsyncClient) -> None:
        target = options.name_or_id(name)
        await client.resume(target)
        if options.json:
            print_json({"name": target})

    return options.call(call)


@click.command()
@click.option(
    "-c",
    "--config",
    metavar="FILE",
    help="Read the spec from FILE, or from standard input (-).",
    shell_complete=completion.files,
)
@click.argument("how", type=click.Choice(["replace", "diff"]))
@click.argument("name", shell_complete=completion.containers)
@click.argument("spec", required=False)
@common
def update(options: Options, *, config: str | None, how: str, name: str, spec: str | None) -> int:
    """Change the limits of a living container (NAME or id): all of what is asked, or nothing.

    `replace`: SPEC is the whole, and what it does not say is not limited any more. `diff`: SPEC is what changes. It is
    protobuf text, with --json also JSON.

    \b
    Examples:
      tightship update diff /web 'memory { limit: 134217728 }'
      tightship spec /web | sed s/1000/2000/ | tightship update replace /web -c -

    Exit status: 0 changed; 3 a bad spec, or a value that the kernel refuses, and nothing is changed; 5 no such
    container; 9 it is closing; 12 a field that can't be changed, or not here.
    """
    text = values.spec(spec, config)
    if text is None:
        raise click.UsageError("give a spec, as text or as -c FILE ('' is the empty one)")
    given = specs.parse(text, json=options.json)

    async def call(client: AsyncClient) -> None:
        from tightship.client import TightshipError

        try:
            changed = await client.update(options.name_or_id(name), given, diff=how == "diff")
        except TightshipError as error:
            specs.place(text, error.metadata)
            raise
        if options.json:
            print_json(plain(changed))

    return options.call(call)


@click.command()
@click.argument("name", shell_complete=completion.containers)
@common
def stats(options: Options, *, name: str) -> int:
    """Print what a container (NAME or id), with those below it, has used and uses.

    What the kernel does not tell is left out. Times in seconds, sizes in bytes.

    \b
    Example: tightship stats /web

    Exit status: 0 printed; 5 no such container.
    """

    async def call(client: AsyncClient) -> None:
        found = await client.stats(options.name_or_id(name))
        if options.json:
            print_json(plain(found))
        else:
            tables.table(("WHAT", "VALUE"), render.stats_rows(found))

    return options.call(call)


@click.command()
@click.argument("pid", required=False, type=click.IntRange(min=1))
@common
def detect(options: Options, *, pid: int | None) -> int:
    """Print the container that a process is in (PID, else this one).

    \b
    Example: tightship detect $$

    Exit status: 0 printed; 5 no such process, or it is in no container.
    """

    async def call(client: AsyncClient) -> None:
        found = await client.detect(os.getpid() if pid is None else pid)
        if options.json:
            print_json(plain(found))
        else:
            click.echo(found.name)

    return options.call(call)
