"""The `tightship` command and its subcommands. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from tightship.cli import failure

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Command, module under tightship.cli, attribute, and what --help says, which must not import the module.
_COMMANDS = {
    "up": ("service", "up", "Start the services (-d: in the background)."),
    "down": ("service", "down", "End the services of `up -d`."),
    "run": ("run", "run", "Run a command in a container."),
    "exec": ("exec", "exec_", "Run a command in a running container."),
    "create": ("containers", "create", "Make a container without a process."),
    "destroy": ("containers", "destroy", "End a container and all below it."),
    "cleanup": ("containers", "cleanup", "Remove all that is left of a name."),
    "kill": ("containers", "kill", "Signal a container's main process."),
    "killall": ("living", "killall", "Signal all processes of a container."),
    "pause": ("living", "pause", "Stop a container's processes where they are."),
    "resume": ("living", "resume", "Go on with what was paused."),
    "update": ("living", "update", "Change a living container's limits."),
    "stats": ("living", "stats", "Print what a container uses."),
    "detect": ("living", "detect", "Print the container that a process is in."),
    "wait": ("containers", "wait", "Wait for a container's main process."),
    "list": ("containers", "list_", "List containers."),
    "spec": ("containers", "spec", "Print a container's spec."),
    "logs": ("output", "logs", "Print a container's output."),
    "attach": ("output", "attach", "Follow a container's output, pass it input."),
    "top": ("top", "top", "Show what containers use, live."),
    "trace": ("trace", "trace", "Draw what happened to a container."),
    "leases": ("containers", "leases", "List leases on standard streams."),
    "audit": ("containers", "audit", "Look for what nothing alive explains."),
    "rm": ("containers", "rm", "Forget an ended container's record and logs."),
    "doctor": ("doctor", "doctor", "Say what this machine offers, and what is missing."),
    "completion": ("completion", "completion", "Print what makes a shell complete our commands."),
    "help": ("help", "help_", "Explain a command, exit codes, names, or specs."),
}


class _Commands(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"tightship.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands with what they do, without importing them; options."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=short) for name, (_, _, short) in _COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, _, short) in _COMMANDS.items()])


def _tell_version(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from importlib import metadata

    version = metadata.version("tightship")
    # --json may come after it.
    click.echo(json.dumps({"version": version}) if _wants_json(None, context.obj) else f"tightship {version}")
    context.exit()


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="COMMAND ...",
)
@click.option("--run-dir", metavar="DIR", help="Run directory [TIGHTSHIP_RUN_DIR, else /run/tightship].")
@click.option("--json", is_flag=True, help="Print JSON.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_tell_version,
    help="Print the version.",
)  # fmt: skip
def cli(**_options: object) -> None:
    """Launch contained processes, own their standard streams, never leak.

    \b
    Try it, with nothing up:  tightship run -- echo hello
    With services:            tightship up -d
                              tightship run --spec 'memory { limit: 67108864 }' /job -- make

    A relative NAME is joined to the caller's own container, "/" for an ordinary shell. TIME is 2, 500ms, 1.5s, 10m or
    1h. The exit status is the gRPC code (5 not found, 14 no service ...); that of `run` is the command's. More:
    tightship help exit-codes, names, specs, environment.
    """


def execute(argv: list[str]) -> int:
    """Runs the command; its exit status. Every failure is told on stderr."""
    context: click.Context | None = None
    if (instruction := os.environ.get("_TIGHTSHIP_COMPLETE")) is not None:
        from tightship.cli import completion

        return completion.complete(cli, instruction)
    try:
        # Not `cli()`: it would take a broken pipe for its own.
        with cli.make_context("tightship", [*argv], obj=argv) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else failure.OK
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "tightship"
        failed = failure.Failure(failure.INVALID_ARGUMENT, error.format_message(), step=f"{path} --help")
        if _wants_json(context, argv):
            failure.tell(failed, as_json=True)
        else:
            with contextlib.suppress(OSError):
                error.show()
    except failure.Failure as error:
        failed = error
        failure.tell(failed, as_json=_wants_json(context, argv))
    except BrokenPipeError:
        return failure.BROKEN_PIPE  # whoever read our output has gone
    except OSError as error:
        failed = failure.of_system(error)
        failure.tell(failed, as_json=_wants_json(context, argv))
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return failure.RUN_FAILED if context is not None and context.invoked_subcommand in ("run", "exec") else failed.code


def _wants_json(context: click.Context | None, argv: list[str]) -> bool:
    """Also where the options could not be read to their end."""
    if context is not None and (context.params.get("json") or failure.JSON in context.meta):
        return True
    return "--json" in itertools.takewhile(lambda word: word != "--", argv)
