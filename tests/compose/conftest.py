"""The engine and two rigs, each up for the tests of a file: as the repository has it, and with failpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.engine import engine
from tests.compose.rig import Rig, rig


@pytest.fixture(scope="session")
def _engine() -> Iterator[None]:
    with engine():
        yield


@pytest.fixture(scope="session")
def _images(_engine: None) -> None:
    Rig("tightship-build").compose("--profile", "test", "build", timeout=900)


@pytest.fixture(scope="module")
def plain(_images: None) -> Iterator[Rig]:
    with rig("tightship-plain") as one:
        yield one


@pytest.fixture(scope="module")
def faulty(_images: None) -> Iterator[Rig]:
    with rig("tightship-faulty", "docker-compose.faults.yml") as one:
        yield one
