"""Completion in the shell: `completion`, which prints what a shell needs, and what the words on a command line may be.

The shell runs us with _TIGHTSHIP_COMPLETE set for each TAB, so that commands are completed without importing them, and
names of containers by one short call, where a service is up. Nothing here fails aloud.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click import shell_completion
from click.shell_completion import CompletionItem

from tightship.cli.context import Options, common, print_json

if TYPE_CHECKING:
    from tightship.client import AsyncClient

VARIABLE = "_TIGHTSHIP_COMPLETE"
PROGRAM = "tightship"
SHELLS = ("bash", "zsh", "fish")

_PATIENCE_S = 1.0


def complete(cli: click.Command, instruction: str) -> int:
    """Answers a shell's question; the exit status."""
    return shell_completion.shell_complete(cli, {}, PROGRAM, VARIABLE, instruction)


def containers(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Living containers, as `incomplete` begins: absolute, or from the caller's own container."""
    from tightship.client.where import answers, run_dir

    directory = run_dir(context.params.get("run_dir_here") or context.find_root().params.get("run_dir"))
    try:
        found = _names(directory) if answers(directory, "containerizer") else []
    except Exception:  # noqa: BLE001  a question of the shell is never answered with an error
        return []
    if not incomplete.startswith("/"):
        own = Options(directory, json=False).own().rstrip("/") + "/"
        found = [name.removeprefix(own) for name in found if name.startswith(own)]
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def signals(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    import signal

    names = [each.name.removeprefix("SIG") for each in signal.Signals]
    return [CompletionItem(name) for name in names if name.startswith(incomplete.upper())]


def _names(directory: str) -> list[str]:
    import asyncio

    from tightship.client import AsyncClient
    from tightship.telemetry import Tracer

    async def listed(client: AsyncClient) -> list[str]:
        async with client:
            return sorted(each.name for each in await client.list(recursive=True))

    return asyncio.run(listed(AsyncClient(directory, timeout_s=_PATIENCE_S, patience_s=0.0, tracer=Tracer())))


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@common
def completion(options: Options, *, shell: str) -> int:
    """Print what makes SHELL complete commands, options, and names of containers.

    \b
    Examples:
      eval "$(tightship completion bash)"        in ~/.bashrc
      eval "$(tightship completion zsh)"         in ~/.zshrc, after compinit
      tightship completion fish > ~/.config/fish/completions/tightship.fish

    Exit status: 0 printed; 3 an unknown shell.
    """
    from tightship.cli.commands import cli

    kind = shell_completion.get_completion_class(shell)
    assert kind is not None
    # The class's own asks the shell for its version first, which may be another machine's.
    script = shell_completion.ShellComplete.source(kind(cli, {}, PROGRAM, VARIABLE))
    if options.json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
    return 0
