"""Fixtures that every suite shares: real pairs. Tests that kill services use `faulty`, which has failpoints.

With TIGHTSHIP_TEST_RUN_DIR the shared pair is the one that runs there, and the tests that start their own are left out.
"""

from __future__ import annotations

import os

# Before anything imports grpc: the tests start processes beside it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import signal
from collections.abc import Iterator

import pytest

from tests.harness import census
from tests.harness.pair import Pair
from tests.harness.remote import VARIABLE, RemotePair
from tests.harness.waiting import until

# What is started here is to have them as from a shell: nohup, and a shell's background, ignore some.
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _need_cgroups() -> None:
    if not any(os.access(mount, os.W_OK) for mount in census.cgroup_mounts()):
        pytest.skip("needs cgroups that this user may write: run as root, or in a delegated cgroup")


@pytest.fixture(scope="session")
def _shared_pair() -> Iterator[Pair]:
    _need_cgroups()
    with RemotePair(os.environ[VARIABLE]) if VARIABLE in os.environ else Pair() as pair:
        yield pair


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if VARIABLE in os.environ:
        left_out = [item for item in items if "_shared_pair" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
