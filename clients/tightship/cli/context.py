"""What every command has: the run directory, the form of its output, and a client with its errors told."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tightship.cli import failure, names, values
from tightship.client.where import answers, run_dir

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from tightship.client import AsyncClient

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Options:
    run_dir: str
    json: bool

    def own(self) -> str:
        return names.own_container(self.run_dir)

    def name(self, typed: str) -> str:
        """A name as typed, absolute."""
        if not typed:
            raise failure.Failure(failure.INVALID_ARGUMENT, "name: a name is needed")
        return names.resolve(typed, self.own())

    def name_or_id(self, typed: str) -> str:
        if not typed:
            raise failure.Failure(failure.INVALID_ARGUMENT, "name: a name or an id is needed")
        return names.resolve_or_id(typed, self.own())

    def call(self, what: Callable[[AsyncClient], Awaitable[int | None]]) -> int:
        """Runs `what` with a client of the services that are up; its exit status, 0 for None."""
        self.need("containerizer")
        import asyncio  # not for a command that ends before

        return asyncio.run(self._call(what)) or failure.OK

    def need(self, service: str) -> None:
        """Raises Failure where the service does not answer: said before gRPC is imported."""
        try:
            up = answers(self.run_dir, service)
        except OSError as error:
            raise failure.of_directory(self.run_dir, error) from None
        if not up:
            raise failure.no_service(self.run_dir)

    def print_messages(self, key: str, messages: list[Message]) -> None:
        """As JSON: `{key: [...]}`."""
        print_json({key: [plain(message) for message in messages]})

    async def _call(self, what: Callable[[AsyncClient], Awaitable[int | None]]) -> int | None:
        from tightship.client import TightshipError

        async with connect(self.run_dir) as client:
            try:
                return await what(client)
            except TightshipError as error:
                raise failure.failed_call(error, self.run_dir) from None


def connect(directory: str) -> AsyncClient:
    """A client as commands use it."""
    import logging

    from tightship.client import AsyncClient

    # Of a dead collector one line is enough.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return AsyncClient(directory, patience_s=5.0)


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON has it, with the proto's field names."""
    from google.protobuf.json_format import MessageToDict

    made: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return made


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def common(command: F) -> F:
    """Gives a command `--run-dir` and `--json`, also taken before the command's name, as its first argument."""

    def wrapped(*args: Any, run_dir_here: str | None, json_here: bool, **keywords: Any) -> Any:
        context = click.get_current_context()
        for word in sys.argv[1:]:
            if not values.is_text(word):
                raise click.UsageError(f"{word!a} is not UTF-8", context)
        above = context.find_root().params
        options = Options(run_dir(run_dir_here or above.get("run_dir")), json_here or bool(above.get("json")))
        if options.json:
            context.meta[failure.JSON] = True
        return command(options, *args, **keywords)

    wrapped = update_wrapper(wrapped, command)
    wrapped = click.option("--json", "json_here", is_flag=True, help="Print JSON.")(wrapped)
    return click.option(  # type: ignore[return-value]
        "--run-dir", "run_dir_here", metavar="DIR", help="Run directory [TIGHTSHIP_RUN_DIR, else /run/tightship]."
    )(wrapped)
