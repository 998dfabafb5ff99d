"""The compose rig as the repository's files have it, brought up and used from the host.

Its services are reached by the sockets in their volume, its cgroups are the host's, and its engine is asked with docker
and docker-compose as a person would.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from tests.compose.engine import BASE, docker
from tests.harness import census
from tests.harness.calls import Calls
from tests.harness.pair import CHANNEL_OPTIONS, ROOT
from tests.harness.points import Failpoints
from tightship.v1 import containerizer_pb2 as cpb

_NO_JAEGER = "tests/compose/docker-compose.yml"
_UP_S = 120.0


class Rig:
    """Use as a context manager. `calls` and `points` are the rig's after `up`; `program` is which Compose is used."""

    def __init__(self, project: str, *overrides: str, program: Sequence[str] = ("docker-compose",)) -> None:
        self.project = project
        self.program = program
        self.files = ("docker-compose.yml", *overrides, _NO_JAEGER)
        ports = _free_ports(3)
        self.collector = f"http://127.0.0.1:{ports[2]}"
        self.environment = {
            **os.environ,
            "TIGHTSHIP_BASE": BASE,
            "TIGHTSHIP_TAG": "rig",
            "TIGHTSHIP_JAEGER_PORT": str(ports[0]),
            "TIGHTSHIP_OTLP_PORT": str(ports[1]),
            "TIGHTSHIP_OTLP_HTTP_PORT": str(ports[2]),
            "COMPOSE_IGNORE_ORPHANS": "1",
        }
        self._channels: list[grpc.Channel] = []

    def __enter__(self) -> Self:
        self.compose("down", "--volumes", check=False)  # of a run that was killed
        try:
            self.up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.add_note(self.logs())
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.compose("down", "--volumes", timeout=180)

    # The engine

    def compose(self, *words: str, check: bool = True, timeout: float = 300) -> str:
        """What the command printed, both streams."""
        command = [*self.program, "--project-name", self.project, *(w for f in self.files for w in ("--file", f))]
        done = subprocess.run(
            [*command, *words], cwd=ROOT, env=self.environment, timeout=timeout, check=False, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(words)}: status {done.returncode}\n{done.stdout}"
        return done.stdout

    def up(self) -> None:
        self.compose("up", "--detach", timeout=_UP_S)
        self.connect()
        for service in ("switchboard", "containerizer"):
            self.await_healthy(service)

    def container(self, service: str) -> str:
        """The id of the service's container, running or not."""
        words = [f"label=com.docker.compose.{key}" for key in (f"project={self.project}", f"service={service}")]
        return docker("ps", "--all", "--quiet", "--no-trunc", "--filter", words[0], "--filter", words[1])

    def inspect(self, service: str) -> dict[str, Any]:
        (found,) = json.loads(docker("inspect", self.container(service)))
        return dict(found)

    def await_healthy(self, service: str, timeout_s: float = 60.0) -> None:
        self._await(lambda: self.inspect(service)["State"]["Health"]["Status"] == "healthy", f"{service} is healthy",
                    timeout_s)  # fmt: skip

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60", check=False)

    def volume(self, name: str) -> Path:
        """Where the host has the named volume."""
        return Path(docker("volume", "inspect", "--format", "{{.Mountpoint}}", f"{self.project}_{name}"))

    # The pair

    def connect(self) -> None:
        """`calls`, by the sockets in the run directory's volume."""
        self.run_dir = self.volume("run")
        for service in ("containerizer", "switchboard"):
            address = f"unix:{self.run_dir}/{service}.sock"
            self._channels.append(grpc.insecure_channel(address, options=CHANNEL_OPTIONS))
        self.calls = Calls(self._channels[-2], self._channels[-1])

    @property
    def points(self) -> Failpoints:
        return Failpoints(self.volume("failpoints"))

    @property
    def instance(self) -> str:
        return (self.run_dir / "instance").read_text().strip()

    def command(self, *words: str, service: str = "containerizer", check: bool = True) -> str:
        """Runs a command in the service's container."""
        return self.compose("exec", "-T", service, *words, check=check)

    def await_ready(self, timeout_s: float = 60.0) -> None:
        """Until nothing is under recovery and a launch works."""

        def ready() -> bool:
            try:
                listed = self.calls.containerizer.List(cpb.ListRequest(recursive=True), timeout=5).containers
                if any(one.state == cpb.Container.RECOVERING for one in listed):
                    return False
                return self.calls.run(["/bin/true"], timeout=10).code == 0
            except grpc.RpcError:
                return False

        self._await(ready, "the pair is ready", timeout_s)

    def spans(self, trace: str) -> list[dict[str, Any]]:
        """What the collector has of a trace."""
        with urllib.request.urlopen(f"{self.collector}/spans", timeout=10) as answer:
            return [span for span in json.load(answer) if span["trace"] == trace]

    def audit(self) -> list[str]:
        """What audit finds, as text."""
        findings = self.calls.containerizer.Audit(cpb.AuditRequest(), timeout=30).findings
        return [f"{one.what}: {one.origin}" for one in findings]

    def settle(self, names: Sequence[str] = (), timeout_s: float = 20.0) -> None:
        """Until nothing lives but `names`, no lease is left without them, and audit finds nothing."""

        def settled() -> bool:
            living = self.calls.living().keys()
            return not living - set(names) and len(self.calls.leases()) <= len(names) and not self.audit()

        try:
            self._await(settled, "all is gone", timeout_s)
        except AssertionError as error:
            state = f"living {sorted(self.calls.living())}, leases {sorted(self.calls.leases())}, audit {self.audit()}"
            raise AssertionError(f"{error}: {state}") from None
        bases = tuple(f"/{self.instance}{name}" for name in names)
        assert [path for path in census.cgroups(self.instance) if not any(base in path for base in bases)] == []

    def _await(self, condition: Any, what: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until, f"not within {timeout_s:g} s: {what}\n{self.logs()}"
            time.sleep(0.2)


@contextlib.contextmanager
def rig(project: str, *overrides: str, program: Sequence[str] = ("docker-compose",)) -> Iterator[Rig]:
    """A rig; after it nothing of its instance is on the host."""
    with Rig(project, *overrides, program=program) as one:
        yield one
        instance = one.instance
    assert census.cgroup_bases(instance) == [], "down has left cgroups"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
