"""A slice of the sweep: every failpoint once, the faults taking turns; and the points reached against the list."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.sweep import FAULTS, Sweeper, cases, sliced
from tests.harness import points


@pytest.fixture(scope="module")
def sweeper() -> Iterator[Sweeper]:
    with Sweeper() as one:
        yield one


@pytest.fixture(scope="module")
def generated() -> points.Generated:
    return points.generated()


@pytest.mark.parametrize("operation", ["launch", "exec", "create", "destroy", "update", "pause"])
def test_the_points_of_a_plain_operation_are_exactly_the_generated_ones(
    sweeper: Sweeper, generated: points.Generated, operation: str
) -> None:
    assert sweeper.plain(operation) == set(generated.operations[operation])


@pytest.mark.timeout(900)
def test_containerd_4048_a_slice_of_the_sweep(generated: points.Generated) -> None:
    every = cases(generated)
    some = sliced(every)
    assert {case.fault for case in some} == set(FAULTS)
    assert {case.point for case in some} == {case.point for case in every}
    failures = []
    queue = list(some)
    while queue:
        with Sweeper() as sweeper:
            while queue:
                case = queue.pop(0)
                try:
                    sweeper.run(case)
                except Exception as error:
                    failures.append(f"{case}: {error}")
                    break
    print(f"{len(some)} of {len(every)} cases")
    assert not failures, "\n".join(failures)
