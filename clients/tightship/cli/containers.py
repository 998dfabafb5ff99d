"""Commands on containers: create, destroy, cleanup, kill, wait, list, spec, rm, audit, leases."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import click

from tightship.cli import completion, failure, progress, render, specs, tables, values
from tightship.cli.context import Options, common, plain, print_json

if TYPE_CHECKING:
    from tightship.client import AsyncClient


@click.command()
@click.option("-p", "--parents", is_flag=True, help="Make missing parents too.")
@click.option(
    "-c",
    "--config",
    metavar="FILE",
    help="Read the spec from FILE, or from standard input (-).",
    shell_complete=completion.files,
)
@click.option("--label", multiple=True, metavar="K=V", help="A label; may be repeated.")
@click.argument("name")
@click.argument("spec", required=False)
@common
def create(
    options: Options, *, parents: bool, config: str | None, label: tuple[str, ...], name: str, spec: str | None
) -> int:
    """Make a container without a process, with its limits in force.

    SPEC is protobuf text, with --json also JSON; '' is no limit at all. Its fields: tightship help specs.

    \b
    Examples:
      tightship create -p /test/one 'cpu { limit: 1000 } memory { limit: -1 }'
      tightship --json create /test/two '{"memory": {"limit": 67108864}}'

    Exit status: 0 made, with its limits in force; 3 a bad spec; 5 no such parent; 6 the name is taken.
    """
    text = values.spec(spec, config)
    if text is None:
        raise click.UsageError("give a spec, as text or as -c FILE ('' is the empty one)")
    given = specs.parse(text, json=options.json)
    labels = values.pairs(label, "--label")

    async def call(client: AsyncClient) -> None:
        from tightship.client import TightshipError

        try:
            made = await client.create(options.name(name), given, parents=parents, labels=labels)
        except TightshipError as error:
            specs.place(text, error.metadata)
            raise
        if options.json:
            print_json(plain(made))

    return options.call(call)


@click.command()
@click.option("-f", "--force", is_flag=True, help="Also when it has children or processes [refused].")
@click.option(
    "--budget", type=values.Seconds(), metavar="TIME", help="Time for the cleanup [its spec's, else 10s; at most 60s]."
)
@click.argument("name", shell_complete=completion.containers)
@common
def destroy(options: Options, *, force: bool, budget: float | None, name: str) -> int:
    """End a container (NAME or id) and all below it; returns when everything is gone.

    Its processes get the stop signal (TERM), and KILL when the grace is over. On a terminal it tells what is left.

    \b
    Example: tightship destroy -f /test

    Exit status: 0 all is gone; 4 the budget was spent, and the cleanup goes on; 5 no such container; 9 it is in use.
    """

    async def call(client: AsyncClient) -> None:
        target = options.name_or_id(name)
        with progress.shown(f"ending {target}") as shown:
            async with _counting(client, target, shown):
                cleanup = await client.destroy(target, force=force, budget=budget)
        if options.json:
            print_json(plain(cleanup))

    return options.call(call)


@click.command()
@click.option("--all", "everything", is_flag=True, help="The residue of all names; nothing alive.")
@click.option(
    "--budget", type=values.Seconds(), metavar="TIME", help="Time for the cleanup [its spec's, else 10s; at most 60s]."
)
@click.argument("name", required=False, shell_complete=completion.containers)
@common
def cleanup(options: Options, *, everything: bool, budget: float | None, name: str | None) -> int:
    """Remove all that is left of a name, whatever state it is in, and say what was removed.

    \b
    Example: tightship cleanup /test/one

    Exit status: 0 nothing is left; 4 something is, and the cleanup goes on.
    """
    if everything == (name is not None):
        raise click.UsageError("give NAME or --all" + (", not both" if everything else ""))

    async def call(client: AsyncClient) -> int:
        target = options.name(name) if name is not None else ""
        with progress.shown(f"cleaning up {target or 'all that is left'}"):
            done = await client.cleanup(target, all=everything, budget=budget)
        if options.json:
            print_json(plain(done))
        else:
            for line in render.cleanup_lines(done):
                click.echo(line)
        return failure.OK if not done.left else failure.DEADLINE_EXCEEDED

    return options.call(call)


@click.command()
@click.option(
    "-s", "--signal", default="KILL", metavar="SIGNAL", help="Name or number [KILL].",
    shell_complete=completion.signals,
)  # fmt: skip
@click.argument("name", shell_complete=completion.containers)
@common
def kill(options: Options, *, signal: str, name: str) -> int:
    """Send a signal to the main process of a container (NAME or id).

    \b
    Example: tightship kill /web -s TERM

    Exit status: 0 signalled; 3 no such signal; 5 no such container; 9 its process has ended.
    """
    if not signal.strip():
        raise failure.Failure(failure.INVALID_ARGUMENT, "signal: it is empty; give a name or a number, as TERM or 15")

    async def call(client: AsyncClient) -> None:
        target = options.name_or_id(name)
        await client.kill(target, signal)
        if options.json:
            print_json({"name": target, "signal": signal})

    return options.call(call)


@click.command()
@click.option("--timeout", type=values.Seconds(), metavar="TIME", help="Wait no longer [no limit].")
@click.argument("name", shell_complete=completion.containers)
@common
def wait(options: Options, *, timeout: float | None, name: str) -> int:
    """Wait until a container's main process (NAME or id) has ended, and print how.

    \b
    Example: tightship wait /web

    Exit status: 0 it has ended, however it did; 4 not within TIME; 5 no such container; 9 it has no process.
    """

    async def call(client: AsyncClient) -> None:
        target = options.name_or_id(name)
        with progress.shown(f"waiting for {target}"):
            record = await client.wait(target, timeout=timeout)
        if options.json:
            print_json(plain(record))
        else:
            for line in render.record_lines(record):
                click.echo(line)

    return options.call(call)


@click.command("list")
@click.option("-r", "--recursive", is_flag=True, help="All levels below, not the direct children alone.")
@click.option("-a", "--all", "records", is_flag=True, help="Also the ended, while their records are kept.")
@click.argument("what", required=False, shell_complete=completion.containers)
@click.argument("name", required=False)
@common
def list_(options: Options, *, recursive: bool, records: bool, what: str | None, name: str | None) -> int:
    """List containers at and below NAME (the caller's own container), or ids of the processes or threads in NAME.

    \b
    Usage:    tightship list [containers|pids|tids] [-r] [-a] [NAME]
    Examples: tightship list -ra
              tightship list pids -r /web

    Exit status: 0 listed; 5 no such container.
    """
    if what in ("pids", "tids"):  # a container of that name is ./pids
        return options.call(_ids(options, name or ".", recursive=recursive, threads=what == "tids"))
    if what is not None and what != "containers":
        if name is not None:
            raise click.UsageError(f"{what!r} can't be listed; write list containers {name}")
        name = what

    async def call(client: AsyncClient) -> None:
        found = await client.list(options.name(name or "."), recursive=recursive, records=records)
        if options.json:
            options.print_messages("containers", [*found])
        else:
            tables.table(("NAME", "STATE", "PID", "AGE", "ID", "COMMAND"), render.container_rows(found))

    return options.call(call)


def _ids(options: Options, name: str, *, recursive: bool, threads: bool) -> Callable[[AsyncClient], Awaitable[None]]:
    async def call(client: AsyncClient) -> None:
        found = await client.processes(options.name(name), recursive=recursive, threads=threads)
        if options.json:
            print_json({"tids" if threads else "pids": [*found]})
        else:
            for each in found:
                click.echo(each)

    return call


@click.command()
@click.option("--in-force", is_flag=True, help="The values that the kernel holds, too.")
@click.argument("name", shell_complete=completion.containers)
@common
def spec(options: Options, *, in_force: bool, name: str) -> int:
    """Print the spec of a container (NAME or id) as it was given.

    \b
    Example: tightship spec --in-force /test/one

    Exit status: 0 printed; 5 no such container.
    """

    async def call(client: AsyncClient) -> None:
        container = await client.get(options.name_or_id(name))
        if options.json:
            made = {"spec": plain(container.spec)}
            if in_force:
                made["in_force"] = [plain(each) for each in container.in_force]  # type: ignore[assignment]
            print_json(made)
            return
        from google.protobuf import text_format

        click.echo(text_format.MessageToString(container.spec), nl=False)
        if in_force:
            click.echo("# in force")
            tables.table(
                ("# FIELD", "VALUE", "FILE"),
                [(f"# {each.field}", each.value, each.file) for each in container.in_force],
            )

    return options.call(call)


@click.command()
@click.argument("name", shell_complete=completion.containers)
@common
def rm(options: Options, *, name: str) -> int:
    """Forget the record and the logs of a container that has ended (NAME or id).

    \b
    Example: tightship rm /web

    Exit status: 0 forgotten; 5 no such container; 9 it has not ended.
    """

    async def call(client: AsyncClient) -> None:
        removed = await client.remove(options.name_or_id(name))
        if options.json:
            print_json({"records": removed})

    return options.call(call)


@click.command()
@click.option("--fix", is_flag=True, help="Remove what this pair has made.")
@common
def audit(options: Options, *, fix: bool) -> int:
    """Look for processes, cgroups, descriptors and leases that nothing alive explains.

    The exit status is 0 when there is nothing (left), 1 otherwise.

    \b
    Example: tightship audit --fix

    Exit status: 0 nothing (is left); 1 something is; 14 a service that should know does not answer.
    """

    async def call(client: AsyncClient) -> int:
        with progress.shown("looking at processes, cgroups, descriptors and leases"):
            found = await client.audit(fix=fix)
        if options.json:
            print_json(plain(found))
        else:
            if found.findings:
                tables.table(("KIND", "STATE", "WHAT", "ORIGIN"), render.finding_rows(found.findings))
            click.echo(f"{len(found.findings)} found; examined: {render.examined(dict(found.examined))}")
        return 1 if any(not each.fixed for each in found.findings) else failure.OK

    return options.call(call)


@click.command()
@click.option("-a", "--all", "closed", is_flag=True, help="Also the closed, while their logs are kept.")
@common
def leases(options: Options, *, closed: bool) -> int:
    """List the switchboard's leases: who holds which descriptors, and until when.

    \b
    Example: tightship leases -a

    Exit status: 0 listed; 14 no switchboard.
    """

    async def call(client: AsyncClient) -> None:
        found = await client.leases(closed=closed)
        if options.json:
            options.print_messages("leases", [*found])
        else:
            header = ("LEASE", "STATE", "LEFT", "HOLDERS", "OUT ERR", "CONTAINER")
            tables.table(header, render.lease_rows(found))

    options.need("switchboard")
    return options.call(call)


@contextlib.asynccontextmanager
async def _counting(client: AsyncClient, target: str, shown: progress.Progress) -> AsyncIterator[None]:
    """Around the end of a tree: tells how much of it is left."""
    import asyncio  # not for a command that ends before

    from tightship.client import TightshipError

    async def count() -> None:
        with contextlib.suppress(TightshipError):  # of a name that is gone, too
            while True:
                await asyncio.sleep(1.0)
                shown.detail = f"{len(await client.list(target, recursive=True))} left"

    counting = asyncio.create_task(count())
    try:
        yield
    finally:
        counting.cancel()
