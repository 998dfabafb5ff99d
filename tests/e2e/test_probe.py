"""The health probe against the services themselves, which must not keep anything of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.pair import Pair
from tightship.common.probe import SERVICES, probe


@pytest.mark.parametrize("service", SERVICES)
def test_both_services_serve(pair: Pair, service: str) -> None:
    with pair.unchanged():
        for _ in range(200):
            probe(pair.run_dir / f"{service}.sock")


def test_as_a_program(pair: Pair) -> None:
    environment = {**pair.environment, "TIGHTSHIP_RUN_DIR": str(pair.run_dir)}
    subprocess.run([sys.executable, "-m", "tightship.common.probe", "switchboard"], env=environment, check=True)
