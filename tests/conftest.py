"""Fixtures that every suite shares: real pairs. Tests that kill services use `faulty`, which has failpoints."""

from __future__ import annotations

import os

# Before anything imports grpc: the tests start processes beside it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from collections.abc import Iterator

import pytest

from tests.harness import census
from tests.harness.pair import Pair
from tests.harness.waiting import until


def _need_cgroups() -> None:
    if not any(os.access(mount, os.W_OK) for mount in census.cgroup_mounts()):
        pytest.skip("needs cgroups that this user may write: run as root, or in a delegated cgroup")


@pytest.fixture(scope="session")
def _shared_pair() -> Iterator[Pair]:
    _need_cgroups()
    with Pair() as pair:
        yield pair


@pytest.fixture
def pair(_shared_pair: Pair) -> Iterator[Pair]:
    """A pair that all tests share. A test leaves no container on it; what it cancelled is waited for."""
    yield _shared_pair
    until(lambda: not _shared_pair.calls.living(), "the test's containers are gone")


@pytest.fixture(scope="module")
def faulty() -> Iterator[Pair]:
    """A pair of this module's own, with failpoints, whose services may be killed."""
    _need_cgroups()
    with Pair(failpoints=True) as pair:
        yield pair


@pytest.fixture
def own_pair() -> Iterator[Pair]:
    """A pair of this test's own, with failpoints."""
    _need_cgroups()
    with Pair(failpoints=True) as pair:
        yield pair


@pytest.fixture(scope="module")
def own_pair_module() -> Iterator[Pair]:
    """A pair of this module's own, as a user has it: without failpoints."""
    _need_cgroups()
    with Pair() as pair:
        yield pair
