"""`help`: the help of a command, and what all commands share: exit codes, names, specs, the environment."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from tightship.cli.context import Options, common, print_json

CODES = (
    (0, "OK", "done"),
    (1, "CANCELLED", "the call was cancelled; of `audit`: something was found; of `doctor`: something is missing"),
    (3, "INVALID_ARGUMENT", "a bad option, name, spec or value"),
    (4, "DEADLINE_EXCEEDED", "time was over; a cleanup goes on by itself"),
    (5, "NOT_FOUND", "no such container, parent, lease or file"),
    (6, "ALREADY_EXISTS", "the name is taken, or somebody else's directory is in its place"),
    (7, "PERMISSION_DENIED", "this user may not do that here"),
    (8, "RESOURCE_EXHAUSTED", "a limit of ours, or of the machine"),
    (9, "FAILED_PRECONDITION", "not in this state: in use, closing, already up"),
    (12, "UNIMPLEMENTED", "a field that this machine or version can't honour"),
    (13, "INTERNAL", "a failure of ours; the services' log says more"),
    (14, "UNAVAILABLE", "no service, or it is away; safe to try again"),
    (16, "UNAUTHENTICATED", "no certificate that is known"),
    (130, "", "Ctrl-C; 128 and the number for other signals"),
    (141, "", "whoever read the output has gone"),
)
RUN_CODES = (
    (125, "any failure of ours; its code is in the message"),
    (126, "the command can't be executed"),
    (127, "the command was not found"),
)


def _exit_codes() -> str:
    return "\n".join(
        [
            "The exit status of every command but `run` is the gRPC code:",
            "",
            *(f"  {number:>3}  {name:<20} {meaning}" for number, name, meaning in CODES),
            "",
            "That of `run` is the command's own; 128 and the signal's number where a signal ended it; and",
            "",
            *(f"  {number:>3}  {meaning}" for number, meaning in RUN_CODES),
            "",
            "Failures are told on stderr, with the next step; with --json as one object a line: code, status, reason,",
            "message, metadata, next.",
        ]
    )


_NAMES = """\
A name is a path, as /ci/jobs/one: components of [A-Za-z0-9_.-] that begin with a letter or digit, 255 bytes each at
most. What has a "/" in front is absolute; else it is joined to the container that the caller is in, which is "/" for
an ordinary shell. "//", ".", ".." and a "/" at the end are cleaned.

  in /top:   test -> /top/test     .. -> /     ../test -> /test     //t//x/ -> /t/x

A parent must exist (create -p makes it). Where a command takes NAME or an id: 16 hex digits are an id; a container
that is named so is written ./NAME."""

_SPEC = """\
A spec says what a container may use, as protobuf text:

  cpu { limit: 500 max_limit: 1500 } memory { limit: 268435456 } tasks { limit: 64 }

or, where --json is given, as JSON, which begins with "{":

  {"cpu": {"limit": 500, "max_limit": 1500}, "memory": {"limit": 268435456}, "tasks": {"limit": 64}}

  cpu.limit                    milli-CPU, a guaranteed share: 1000 is one CPU
  cpu.max_limit                milli-CPU, a hard cap, 10 at least
  cpu.scheduling_latency       BEST_EFFORT, NORMAL, PRIORITY or PREMIER
  cpu.mask { data: 3 }         CPUs as a bitmap: 3 is CPUs 0 and 1
  memory.limit                 bytes; -1 is no limit (the default)
  memory.swap_limit            bytes of memory and swap together; memory.swap_only: of swap alone
  memory.reservation           bytes that are reclaimed last; 0
  memory.eviction_priority     0 to 10000, higher is evicted later; 5000
  tasks.limit                  processes and threads
  virtual_host { network {} }  own pid, mount, ipc, uts (and network) namespaces
  lifecycle.stop_signal        TERM;   .grace: 2 s until KILL;   .cleanup_budget: 10 s
  owner, owner_group           uid and gid that may manage the cgroups
  children_limit               containers below

A field that is not honoured is refused by name. What the machine offers: tightship doctor. All fields:
protos/tightship/v1/spec.proto."""

_ENVIRONMENT = """\
  TIGHTSHIP_RUN_DIR        the run directory, where --run-dir is not given; /run/tightship
  TIGHTSHIP_CONTAINERIZER  HOST:PORT, or the path of a socket, to use instead of those in the run directory; likewise
  TIGHTSHIP_SWITCHBOARD
  TIGHTSHIP_TLS_CA         by TCP: a PEM file with whom to trust; TIGHTSHIP_TLS_CERT and TIGHTSHIP_TLS_KEY: our own
                           certificate and key
  TIGHTSHIP_METRICS        HOST:PORT at which the containerizer serves metrics to Prometheus; the switchboard takes the
                           next port
  TIGHTSHIP_LOG_FORMAT     text or json: the services' lines on stderr
  TIGHTSHIP_LOG_LEVEL      DEBUG, INFO, WARNING or ERROR; INFO
  TIGHTSHIP_FAILPOINTS     a directory of failpoints, for tests
  OTEL_EXPORTER_OTLP_*     traces over OTLP, of services and clients; with OTEL_METRICS_EXPORTER=otlp metrics too
  NO_COLOR                 when set and not empty: no colours"""

TOPICS = {
    "exit-codes": "What exit statuses mean.",
    "names": "How containers are named.",
    "specs": "What a spec may say, with units and defaults.",
    "environment": "Variables that commands and services read.",
}


def text(topic: str) -> str:
    match topic:
        case "exit-codes":
            return _exit_codes()
        case "names":
            return _NAMES
        case "specs":
            return _SPEC
        case _:
            return _ENVIRONMENT


def _complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from tightship.cli.commands import cli

    names = [*cli.list_commands(_context), *TOPICS]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("help")
@click.argument("topic", required=False, shell_complete=_complete)
@common
def help_(options: Options, *, topic: str | None) -> int:
    """Print the help of a command, or what a TOPIC is about: exit-codes, names, specs, environment.

    \b
    Examples:
      tightship help run
      tightship help exit-codes

    Exit status: 0 printed; 5 nothing is called so.
    """
    from tightship.cli import failure
    from tightship.cli.commands import cli

    root = click.get_current_context().find_root()
    if topic is None:
        told = root.get_help()
        told += "\n\nTopics of `tightship help`:\n" + "\n".join(f"  {name:<12} {what}" for name, what in TOPICS.items())
    elif topic in TOPICS:
        told = text(topic)
    else:
        command = cli.get_command(root, topic)
        if command is None:
            step = f"there are the commands, and: {', '.join(TOPICS)}"
            raise failure.Failure(failure.NOT_FOUND, f"{topic!r} is no command and no topic", step=step)
        told = command.get_help(click.Context(command, info_name=topic, parent=root))
    if options.json:
        print_json({"topic": topic or "", "text": told})
    else:
        click.echo(told)
    return failure.OK
