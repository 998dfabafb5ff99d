"""`exec`: one command in a container that runs."""

from __future__ import annotations

from typing import Any

import click

from tightship.cli import failure, launching
from tightship.cli.context import Options, common
from tightship.cli.failure import RUN_FAILED
from tightship.cli.launching import LaunchCommand, Runner, launch_options


class _Exec(LaunchCommand):
    needs_name = True


@click.command("exec", cls=_Exec)
@launch_options
@common
def exec_(options: Options, *, verbose: bool, name: str, command: list[str], **given: Any) -> int:
    """Run CMD in the running container NAME, in its namespaces, with its root, user and confinement.

    It gets a container of its own below NAME, whose limits hold for it too; it may have tighter ones. It ends with its
    own time-out, with us, or with NAME; NAME goes on when it ends. The rest is as in `run`.

    \b
    Examples:
      tightship exec /web ps ax
      tightship exec --timeout 2s /web -- curl -fs localhost:8000/health

    Exit status: the command's; 128+n for a signal, 127 not found, 126 not executable,
    125 any failure of ours, its code in the message.
    """
    try:
        asked, text = launching.asked(options, verbose=verbose, **given)
        asked["name"], asked["exec"] = options.name_or_id(name), True
        options.need("containerizer")
        return Runner(options, verbose, command, asked, text, options.run_dir, None).run()
    except failure.Failure as error:
        failure.tell(error, as_json=options.json)
        return RUN_FAILED
