"""Hundreds of launches: every event once and in order, and nothing grows with their number."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable

import grpc
import pytest

from tests.harness.calls import Calls, fresh_name
from tests.harness.census import anonymous_kib
from tests.harness.pair import SERVICES, Pair

NUMBER = 200
IN_FLIGHT = 16
# Allocators take their arenas, and records fill their table (1,000), whose retention starts its threads; what then
# grows goes on for ever.
WARM_UP = 2000
# Memory goes up and down by 100 KiB with what the collector has not come to: the least of several looks counts, and the
# growth of some hundreds, of which each may have its share.
LOOKS = 10
HUNDREDS = 8
WINDOWS = 4
GROWTH_KIB = 64
# More than the services wait before they tidy.
QUIET_S = 0.6


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
    _in_turn(own_pair_module.calls, WARM_UP // 2)
    _in_flight(own_pair_module.calls, WARM_UP // 2)
    return own_pair_module


def _least_memory(pair: Pair, launches: Callable[[Calls, int], None], number: int) -> dict[str, int]:
    """KiB by service: the least of LOOKS during `number` launches."""
    looks = []
    for _ in range(LOOKS):
        launches(pair.calls, number // LOOKS)
        looks.append({service: anonymous_kib(pair.pid(service)) for service in SERVICES})
    return {service: min(look[service] for look in looks) for service in SERVICES}


def _slope(values: list[int]) -> float:
    """The median growth from one value to the next, over all pairs."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (second - first) for (first, earlier), (second, later) in pairs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launches", [_in_turn, _in_flight], ids=["in turn", "in flight"])
def test_a_burst_gives_back_what_it_needed(own_pair_module: Pair, launches: Callable[[Calls, int], None]) -> None:
    _in_turn(own_pair_module.calls, 100)
    _in_flight(own_pair_module.calls, 100)

    def after_hundred() -> dict[str, int]:
        launches(own_pair_module.calls, 100)
        time.sleep(QUIET_S)
        return {service: anonymous_kib(own_pair_module.pid(service)) for service in SERVICES}

    growths = []
    for _ in range(WINDOWS):
        first, second = after_hundred(), after_hundred()
        growths.append({service: second[service] - first[service] for service in SERVICES})
        if max(growths[-1].values()) <= GROWTH_KIB:
            return
    raise AssertionError(f"KiB grown from one hundred launches to the next, in every window: {growths}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launches", [_in_turn, _in_flight], ids=["in turn", "in flight"])
def test_containerd_9719_each_event_once_and_nothing_grows(warm: Pair, launches: Callable[[Calls, int], None]) -> None:
    before = warm.census()
    launches(warm.calls, NUMBER)
    warm.settle(before)
    # A leak is in every window of launches, a step of the allocator in one.
    windows = []
    for _ in range(WINDOWS):
        memory = [_least_memory(warm, launches, 100) for _ in range(HUNDREDS + 1)]
        growth = {service: _slope([look[service] for look in memory]) for service in SERVICES}
        windows.append((growth, memory))
        if max(growth.values()) <= GROWTH_KIB:
            break
    else:
        raise AssertionError(f"KiB grown over 100 launches, in every window: {windows}")
    warm.settle(before)


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
