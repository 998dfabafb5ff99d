"""A pair of services of a test's own, in a short private run directory, under the keeper.

`Pair` starts and ends it, kills and restarts its parts, and gives stubs, shorthands for calls, and the census. Nothing
of it outlives the test run: see keeper.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import grpc

from tests.harness import census as censuses
from tests.harness.calls import Calls
from tests.harness.patience import PATIENCE
from tests.harness.points import Failpoints
from tests.harness.waiting import await_end
from tightship.v1 import containerizer_pb2 as cpb

ROOT = Path(__file__).parents[2]
Service = Literal["spawner", "containerizer", "switchboard"]
SERVICES: tuple[Service, ...] = ("spawner", "containerizer", "switchboard")

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class Pair:
    """Use as a context manager, or `start` and `close`."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        failpoints: bool = False,
        planted: Service | None = None,
    ) -> None:
        """`planted`: the service that inherits a pipe which nothing explains."""
        self.planted = planted
        self.run_dir = Path(tempfile.mkdtemp(prefix="ts", dir="/tmp"))
        self.points = Failpoints(self.run_dir / "fp")
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("OTEL_", "TIGHTSHIP_")) and not key.startswith("PYTEST")
        }
        if failpoints:
            self.environment["TIGHTSHIP_FAILPOINTS"] = str(self.points.directory)
        self.environment |= dict(environment or {})
        run = ["--run-dir", str(self.run_dir)]
        self.commands = {
            "spawner": [sys.executable, "-I", "-S", str(ROOT / "services/tightship/spawner/__main__.py"), *run],
            "switchboard": [sys.executable, "-m", "tightship.switchboard", *run],
        }
        self._keeper: subprocess.Popen[str] | None = None
        self._channels: list[grpc.Channel] = []

    # Start and end

    def start(self) -> Self:
        config = {
            "run_dir": str(self.run_dir),
            "planted": self.planted,
            "environment": self.environment,
            "services": self.commands,
        }
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(ROOT / "tests/harness/keeper.py"), json.dumps(config)],
            stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self._order("start", "switchboard")
            self._order("start", "spawner")
            self.await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(60)
        finally:
            self._keeper = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.log_tail())
        self.close()

    # Calls

    def channel(self, service: Literal["containerizer", "switchboard"]) -> grpc.Channel:
        """A channel of its own, closed with the pair."""
        channel = grpc.insecure_channel(f"unix:{self.run_dir}/{service}.sock", options=CHANNEL_OPTIONS)
        self._channels.append(channel)
        return channel

    @property
    def calls(self) -> Calls:
        """Stubs and shorthands on channels that all tests of this pair share."""
        if not hasattr(self, "_calls"):
            self._calls = Calls(self.channel("containerizer"), self.channel("switchboard"))
        return self._calls

    def command(self, *arguments: str, input: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs the command line client on this pair."""
        return subprocess.run(
            [Path(sys.executable).with_name("tightship"), *arguments],
            input=input, capture_output=True, text=True, timeout=timeout, check=False,
            env=self.environment | {"TIGHTSHIP_RUN_DIR": str(self.run_dir)},
        )  # fmt: skip

    def await_ready(self, timeout_s: float = 20.0) -> None:
        """Until all three run, nothing is under recovery, and a lease can be had."""
        until = time.monotonic() + timeout_s * PATIENCE
        while True:
            try:
                self.pids()
                listed = self.calls.containerizer.List(cpb.ListRequest(recursive=True), timeout=5).containers
                if all(one.state != cpb.Container.RECOVERING for one in listed):
                    self.calls.run(["/bin/true"], timeout=10)
                    return
                problem = "containers under recovery"
            except (grpc.RpcError, LookupError) as error:
                problem = str(error)
            assert time.monotonic() < until, (
                f"the pair is not ready after {timeout_s:g} s: {problem}\n{self.log_tail()}"
            )
            time.sleep(0.02)

    # Processes

    def pid(self, service: Service) -> int:
        """Raises LookupError where it does not run."""
        keeper = self._living_keeper().pid
        for pid in censuses.descendants(keeper):
            words = censuses.command(pid)
            if service == "spawner" and "tightship/spawner/__main__.py" in words and _parent(pid) == keeper:
                return pid
            if service == "switchboard" and "-m tightship.switchboard" in words and _parent(pid) == keeper:
                return pid
            if service == "containerizer" and "-m tightship.containerizer" in words:
                return pid
        raise LookupError(f"no {service} runs")

    def pids(self) -> dict[str, int]:
        return {service: self.pid(service) for service in SERVICES}

    def kill(self, service: Service, number: int = signal.SIGKILL, *, again: bool = True) -> None:
        """Sends the signal and returns when the process is gone; who keeps it starts a new one, with `again`."""
        if not again:
            self._order("hold", service)
        pid = self.pid(service)
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, number)
            await_end(pidfd, 30)
        finally:
            os.close(pidfd)

    def stop(self, service: Service, timeout_s: float = 20.0) -> float:
        """SIGTERM, and no new start; seconds until it was gone."""
        begun = time.monotonic()
        self.kill(service, signal.SIGTERM, again=False)
        took = time.monotonic() - begun
        assert took < timeout_s, f"{service} took {took:.1f} s to stop"
        return took

    def restart(self, service: Service) -> None:
        self._order("start", service)

    def await_service(self, service: Service, timeout_s: float = 15.0) -> int:
        """Until it runs; its pid."""
        until = time.monotonic() + timeout_s * PATIENCE
        while True:
            try:
                return self.pid(service)
            except LookupError:
                assert time.monotonic() < until, f"{service} was not started again\n{self.log_tail()}"
                time.sleep(0.01)

    # What there is

    @property
    def instance(self) -> str:
        return (self.run_dir / "instance").read_text().strip()

    def census(self) -> censuses.Census:
        """Looks now. The connections of `calls` are in it: a test has used both of them before."""
        return censuses.take(self.instance, self._living_keeper().pid, self.pids())

    def settle(self, before: censuses.Census, timeout_s: float = 10.0) -> None:
        """Until the census is as before. Raises AssertionError with the difference."""

        def look() -> censuses.Census:
            while True:
                with contextlib.suppress(LookupError, FileNotFoundError, grpc.RpcError):
                    self.calls.touch()
                    return self.census()
                time.sleep(0.02)

        try:
            censuses.settle(look, before, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_tail()}") from None

    @contextlib.contextmanager
    def unchanged(self, timeout_s: float = 10.0) -> Iterator[None]:
        """What is there after the block must be what was before it."""
        before = self.census()
        yield
        self.settle(before, timeout_s)

    def log_tail(self, size: int = 3000) -> str:
        parts = []
        for path in sorted(self.run_dir.glob("*.log")):
            text = path.read_text(errors="replace")[-size:]
            if text:
                parts.append(f"--- {path.name}\n{text}")
        return "\n".join(parts)

    # The keeper

    def _living_keeper(self) -> subprocess.Popen[str]:
        assert self._keeper is not None, "the pair is not started"
        return self._keeper

    def _order(self, verb: Literal["start", "hold"], service: Service) -> None:
        stdin = self._living_keeper().stdin
        assert stdin is not None
        stdin.write(f"{verb} {service}\n")
        stdin.flush()


def _parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[1])
