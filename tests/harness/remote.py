"""A pair that somebody else runs: the compose file's, from the container beside its containerizer.

That container has the containerizer's pid namespace, network and cgroup tree; the switchboard's processes and
descriptors are out of sight, so here the census is of one side, and no test may kill what it did not start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import grpc
import pytest

from tests.harness import census as censuses
from tests.harness.pair import Pair, Service

VARIABLE = "TIGHTSHIP_TEST_RUN_DIR"

# The spawner is the first process of its container.
_SPAWNER = 1


class RemotePair(Pair):
    def __init__(self, run_dir: str) -> None:
        self.run_dir = Path(run_dir)
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "PYTEST"))}
        self._channels: list[grpc.Channel] = []

    def start(self) -> Self:
        self.await_ready()
        return self

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def pid(self, service: Service) -> int:
        if service == "spawner":
            return _SPAWNER
        if service == "switchboard":
            pytest.skip("the switchboard is in another container")
        for pid in censuses.descendants(_SPAWNER):
            if "-m tightship.containerizer" in censuses.command(pid):
                return pid
        raise LookupError("no containerizer runs")

    def pids(self) -> dict[str, int]:
        return {service: self.pid(service) for service in ("spawner", "containerizer")}

    def census(self) -> censuses.Census:
        found = censuses.take(self.instance, _SPAWNER, self.pids())
        for counted in found.descriptors.values():
            del counted["socket"]  # the engine's health checks and the export of spans come and go
        return found

    def log_tail(self, size: int = 3000) -> str:
        return "(see the log of the containers)"
