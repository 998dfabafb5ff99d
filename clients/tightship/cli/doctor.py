"""`doctor`: what this machine offers, what the run directory holds, what is up; what is missing, and what to do.

The machine is looked at by a program of the services (clients import none of them), the run directory and the sockets
from here, as any client sees them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pwd
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from tightship.cli import failure, style, supervisor, tables
from tightship.cli.context import Options, common, print_json
from tightship.client.where import address, answers, socket_of

_MARKS = {"ok": "ok", "note": "note", "warn": "warn", "missing": "MISSING"}
_LOOKS = {"ok": "green", "note": "cyan", "warn": "yellow", "missing": "red"}

_MACHINE_S = 30.0
_CALL_S = 3.0

# sun_path less the longest name of ours and its suffix while it is made: unix(7).
_RUN_DIR_MAX = 107 - len("/containerizer.sock.new")
_FREE_MIN = 64 << 20

# In the order in which they start.
_SOCKETS = ("spawner", "fd", "containerizer", "switchboard")
_SERVICES = ("containerizer", "switchboard")


@dataclass(frozen=True)
class Finding:
    """`state`: ok; note, for your knowledge; warn, something is not as good or refused; missing, it must be mended."""

    group: str
    what: str
    state: str
    found: str
    step: str = ""


@click.command()
@common
def doctor(options: Options) -> int:
    """Say what this machine offers to tightship, what is missing, and what to do about it.

    It looks at kernel, capabilities, cgroup controllers, limits, the run directory with its sockets, and the services
    that are up. No service is needed, and nothing is changed. "note" is for your knowledge, "warn" means that something
    will be refused or is not as good, "MISSING" that it does not work without. With --json all are in one list.

    \b
    Examples:
      tightship doctor
      tightship doctor --json | jq '.findings[] | select(.state != "ok")'

    Exit status: 0 nothing is missing (warnings may be); 1 something is.
    """
    findings = [*_machine(), *_directory(options.run_dir), *_services(options.run_dir)]
    missing = sum(each.state == "missing" for each in findings)
    if options.json:
        print_json({"ok": not missing, "findings": [asdict(each) for each in findings]})
    else:
        _print(findings)
        click.echo(_sum(findings))
    return 1 if missing else failure.OK


def _machine() -> Iterator[Finding]:
    if importlib.util.find_spec("tightship.containerizer") is None:
        yield Finding("system", "services", "note", "not installed here, only the client")
        return
    try:
        told = subprocess.run(
            [sys.executable, "-m", "tightship.containerizer.doctor"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_MACHINE_S,
            check=True,
        )
        yield from (Finding(**each) for each in json.loads(told.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        last = said.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        yield Finding("system", "look at the machine", "missing", last[0], "run it as root, or install it anew")


def _directory(directory: str) -> Iterator[Finding]:
    group = "run directory"
    if len(os.fsencode(directory)) > _RUN_DIR_MAX:
        step = f"use a --run-dir of {_RUN_DIR_MAX} bytes at most"
        yield Finding(group, "path", "missing", f"{directory} is too long for Unix sockets", step)
        return
    try:
        found = os.stat(directory)
    except FileNotFoundError:
        yield Finding(group, "path", "note", f"{directory} is not there; up makes it")
        return
    except OSError as error:
        yield Finding(
            group, "path", "missing", f"{directory}: {error.strerror}", "use another --run-dir, or another user"
        )
        return
    if not stat.S_ISDIR(found.st_mode):
        yield Finding(group, "path", "missing", f"{directory} is no directory", "use another --run-dir")
        return
    owned = f"{directory}, {stat.filemode(found.st_mode)} {_user(found.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        yield Finding(group, "path", "missing", f"{owned}: anybody may replace the sockets", f"chmod o-w {directory}")
    else:
        yield Finding(group, "path", "ok", owned)
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    step = "" if free >= _FREE_MIN else "make room: journal and output are there (output: --log-dir of the switchboard)"
    yield Finding(group, "free space", "warn" if step else "ok", f"{free >> 20} MiB", step)
    for name in _SOCKETS:
        if name not in _SERVICES or address(directory, name) == socket_of(directory, name):
            yield from _socket(group, directory, name)


def _socket(group: str, directory: str, name: str) -> Iterator[Finding]:
    """Those of the services: what is there, and whether somebody accepts. fd.sock and spawner.sock take no probe."""
    path = socket_of(directory, name)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        yield Finding(group, f"{name}.sock", "warn", error.strerror or "", "look as another user")
        return
    told = f"{stat.filemode(found.st_mode)} {_user(found.st_uid)}"
    try:
        accepted = name not in _SERVICES or answers(directory, name)
    except OSError:
        yield Finding(group, f"{name}.sock", "warn", f"{told}: not for this user", "run it as root, or in its group")
        return
    if accepted:
        yield Finding(group, f"{name}.sock", "ok", told)
    else:
        step = "its service died: tightship up -d starts one, which replaces it"
        yield Finding(group, f"{name}.sock", "warn", f"{told}: nobody accepts", step)


def _services(directory: str) -> Iterator[Finding]:
    group = "services"
    try:
        up = {name: answers(directory, name) for name in _SERVICES}
        holder = supervisor.running(directory)
    except (OSError, failure.Failure):
        return  # told with the run directory
    if holder is not None:
        os.close(holder[1])
        yield Finding(group, "supervisor", "ok", f"pid {holder[0]}")
    if not any(up.values()):
        yield Finding(group, "pair", "note", "none is up", "start one: tightship up -d; run needs none")
        return
    for name in _SERVICES:
        if up[name]:
            yield _health(group, directory, name)
        else:
            yield Finding(
                group, name, "missing", "does not answer", "start it, or all: tightship down; tightship up -d"
            )


def _health(group: str, directory: str, name: str) -> Finding:
    from tightship.client import TightshipError

    try:
        state, version = asyncio.run(_asked(directory, name))
    except TightshipError as error:
        step = "look whether it runs, and into its log: service.log in the run directory, or its stderr"
        return Finding(group, name, "missing", f"{error.code.name}: {error.message}", step)
    at = address(directory, name)
    told = f"{'serves' if state == 'SERVING' else state}, version {version}"
    told += "" if at == socket_of(directory, name) else f", at {at}"
    if state != "SERVING":
        return Finding(group, name, "missing", told, "wait for its peers; its log says more: service.log, or stderr")
    ours = _version()
    if version != ours:
        return Finding(group, name, "warn", told, f"this command is version {ours}: install the same for both")
    return Finding(group, name, "ok", told)


async def _asked(directory: str, name: str) -> tuple[str, str]:
    """What health says, and the version. Raises TightshipError."""
    import grpc
    from grpc_health.v1 import health_pb2

    from tightship.client import TightshipError, channel

    async with channel.connect(channel.target(directory, name)) as opened:
        check = opened.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        call = check(health_pb2.HealthCheckRequest(), timeout=_CALL_S)
        try:
            answer = await call
            told = dict(await call.initial_metadata())
        except grpc.aio.AioRpcError as error:
            raise TightshipError.of(error) from None
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return state, str(told.get("tightship-version", "unknown"))


def _version() -> str:
    from importlib import metadata

    return metadata.version("tightship")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _print(findings: list[Finding]) -> None:
    width = style.width()
    group = ""
    widest = max(len(each.what) for each in findings)
    for each in findings:
        if each.group != group:
            group = each.group
            click.echo(style.paint(group, "bold"))
        mark = style.paint(_MARKS[each.state].ljust(7), _LOOKS[each.state])
        told = f"{each.what.ljust(widest)}  {each.found}"
        click.echo(f"  {mark}  {told if width is None else tables.cut(told, max(20, width - 11), middle=False)}")
        if each.step and each.state != "ok":
            lines = [each.step] if width is None else textwrap.wrap(each.step, max(20, width - 14))
            click.echo(f"           {style.paint('->', _LOOKS[each.state])} {lines[0]}")
            for line in lines[1:]:
                click.echo(f"              {line}")


def _sum(findings: list[Finding]) -> str:
    counts: dict[str, Any] = {state: sum(each.state == state for each in findings) for state in _MARKS}
    warnings = f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"
    if counts["missing"]:
        return f"{counts['missing']} missing, {warnings}: see the lines with ->"
    return "nothing is missing" + (f"; {warnings}" if counts["warn"] else "")
