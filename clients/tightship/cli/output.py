"""Output of containers on our own streams, and `logs` and `attach`, which print it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from tightship.cli import completion, failure, terminal
from tightship.cli.context import Options, common, plain

if TYPE_CHECKING:
    from tightship.client import AsyncClient, Chunk
    from tightship.client.streams import AsyncInput, StreamName

_FDS = {"stdout": 1, "stderr": 2}


async def copy(chunks: AsyncIterator[Chunk], into: int | None = None) -> None:
    """Each stream's bytes to ours, or to the FD `into`, exact; gaps are told on stderr.

    Raises BrokenPipeError, TightshipError.
    """
    from tightship.client.streams import closing

    async with closing(chunks):
        async for chunk in chunks:
            if chunk.lost:
                failure.say(f"{chunk.lost} bytes of {chunk.stream} at {chunk.offset} were not kept: {chunk.reason}")
            else:
                await terminal.write_output(into or _FDS[chunk.stream], chunk.data)


async def copy_json(client: AsyncClient, target: str, chunks: AsyncIterator[Chunk], *, follow: bool) -> None:
    """A JSON object a line: each piece, or gap, of the output, and last the record, where it ended.

    A piece has `stream`, `offset`, and `text`, or `data` (base64) where it is not UTF-8 by itself; a gap `lost` (bytes)
    and `reason`; the last `record`, or `state` of one that runs. Raises as `copy`.
    """
    from tightship.client.streams import closing

    async def write(value: dict[str, object]) -> None:
        await terminal.write_output(1, json.dumps(value, ensure_ascii=False).encode() + b"\n")

    async with closing(chunks):
        async for chunk in chunks:
            await write({"stream": chunk.stream, "offset": chunk.offset, **_content(chunk)})
    if follow:
        await write({"record": plain(await client.wait(target))})
        return
    container = await client.get(target)
    if container.HasField("record"):
        await write({"record": plain(container.record)})
    else:
        await write({"state": type(container).State.Name(container.state)})


def _content(chunk: Chunk) -> dict[str, object]:
    if chunk.lost:
        return {"lost": chunk.lost, "reason": chunk.reason}
    try:
        return {"text": chunk.data.decode()}
    except UnicodeDecodeError:
        return {"data": base64.b64encode(chunk.data).decode()}


async def feed(stdin: AsyncInput) -> None:
    """Our standard input to the container's, with its end of file, until the process reads no more."""
    from tightship.client import TightshipError

    with contextlib.suppress(BrokenPipeError):
        try:
            async for data in terminal.read_input():
                await stdin.write(data)
            await stdin.close()
        except TightshipError as error:
            if error.number != failure.FAILED_PRECONDITION:  # ended meanwhile
                failure.say(f"standard input: {error}")


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until the output ends.")
@click.option("--stdout", "only_stdout", is_flag=True, help="Its standard output alone.")
@click.option("--stderr", "only_stderr", is_flag=True, help="Its standard error alone, to our standard output.")
@click.argument("name", shell_complete=completion.containers)
@common
def logs(options: Options, *, follow: bool, only_stdout: bool, only_stderr: bool, name: str) -> int:
    """Print the output of a container (NAME or id), living or ended, from the start.

    Its standard error goes to ours, unless it is asked for alone.

    \b
    Example: tightship logs -f /web

    Exit status: 0 printed; 5 no such container, or its output is not kept any more.
    """
    streams: list[StreamName] = []
    if only_stdout:
        streams.append("stdout")
    if only_stderr:
        streams.append("stderr")
    into = 1 if len(streams) == 1 else None
    options.need("switchboard")

    async def call(client: AsyncClient) -> None:
        target = options.name_or_id(name)
        chunks = client.logs(target, *streams, follow=follow)
        if options.json:
            await copy_json(client, target, chunks, follow=follow)
        else:
            await copy(chunks, into)

    return options.call(call)


@click.command()
@click.argument("name", shell_complete=completion.containers)
@common
def attach(options: Options, *, name: str) -> int:
    """Follow the output of a container (NAME or id) from the start; input that is piped in goes to its process.

    \b
    Example: tightship run -n -i /cat -- cat
             echo hello | tightship attach /cat

    Exit status: 0 its output has ended; 5 no such container; 141 whoever read the output has gone.
    """

    async def call(client: AsyncClient) -> None:
        target = options.name_or_id(name)
        feeding = None
        if terminal.input_is_passed():
            feeding = asyncio.create_task(feed(await client.input(target)))
        try:
            chunks = client.logs(target, follow=True)
            if options.json:
                await copy_json(client, target, chunks, follow=True)
            else:
                await copy(chunks)
        finally:
            if feeding is not None:
                feeding.cancel()

    options.need("switchboard")
    return options.call(call)
