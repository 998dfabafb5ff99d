"""Hundreds of launches: every event once and in order, and nothing grows with their number."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from tests.harness.calls import Calls, fresh_name
from tests.harness.census import anonymous_kib
from tests.harness.pair import SERVICES, Pair

NUMBER = 200
IN_FLIGHT = 16
# Bounded tables fill, allocators take their arenas, pools start their threads: growth counts after that.
WARM_UP = 300
POOLS_ROUNDS = 10
GROWTH_KIB = 64


def _launch(calls: Calls) -> None:
    launching = calls.launch(["/bin/true"], fresh_name("many"), timeout=60)
    launching.started()
    assert launching.exited().exit_code == 0
    launching.gone()
    assert launching.events == ["started", "exited", "gone"]


def _in_turn(calls: Calls, number: int) -> None:
    for _ in range(number):
        _launch(calls)


def _in_flight(calls: Calls, number: int) -> None:
    """`number` launches, IN_FLIGHT at a time."""
    left = iter(range(number))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                if next(left, None) is None:
                    return
            try:
                _launch(calls)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture(scope="module")
def warm(own_pair_module: Pair) -> Pair:
    pair = own_pair_module
    _in_turn(pair.calls, WARM_UP // 2)
    threads = None
    for _ in range(POOLS_ROUNDS):
        _in_flight(pair.calls, WARM_UP // 2)
        if (now := pair.census().threads) == threads:
            return pair
        threads = now
    raise AssertionError(f"threads go on growing: {threads}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launches", [_in_turn, _in_flight], ids=["in turn", "in flight"])
def test_containerd_9719_each_event_once_and_nothing_grows(warm: Pair, launches: Callable[[Calls, int], None]) -> None:
    before = warm.census()
    launches(warm.calls, NUMBER // 2)
    warm.settle(before)
    half = {service: anonymous_kib(warm.pid(service)) for service in SERVICES}
    launches(warm.calls, NUMBER // 2)
    warm.settle(before)
    after = warm.census()
    growth = {service: anonymous_kib(warm.pid(service)) - half[service] for service in SERVICES}
    assert after.threads == before.threads
    assert max(growth.values()) <= GROWTH_KIB, f"KiB grown over {NUMBER // 2} launches: {growth}"


@pytest.mark.timeout(300)
def test_moby_30063_failed_launches_leave_nothing(warm: Pair) -> None:
    with warm.unchanged():
        for _ in range(100):
            with pytest.raises(grpc.RpcError):
                warm.calls.run(["/nonexistent"])


@pytest.mark.timeout(300)
def test_containerd_4048_cancelled_launches_leave_nothing(warm: Pair) -> None:
    with warm.unchanged(timeout_s=30):
        for number in range(100):
            launching = warm.calls.launch(["/bin/sleep", "600"])
            if number % 2:
                launching.started()
            launching.cancel()


def test_a_repeated_name_is_refused_and_touches_nothing(pair: Pair) -> None:
    name = fresh_name()
    started = pair.calls.detach(["/bin/sleep", "600"], name)
    with pair.unchanged():
        error = pair.calls.launch(["/bin/true"], name).error()
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert pair.calls.get(name).pid == started.pid
    pair.calls.destroy(name)
