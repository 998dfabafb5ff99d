"""Budgets: min(maximum, asked, max(floor, what the caller has left - 250 ms))."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightship.containerizer.backoff import Backoff
from tightship.containerizer.settings import Settings

seconds = st.floats(0, 1e6, allow_nan=False)


@pytest.mark.parametrize(
    ("asked", "remaining", "budget"),
    [
        (None, None, 10.0),
        (3.0, None, 3.0),
        (300.0, None, 60.0),
        (None, 5.25, 5.0),
        (None, 0.0, 1.0),
        (None, 1000.0, 10.0),
        (0.5, 0.0, 0.5),
    ],
)
def test_examples(asked: float | None, remaining: float | None, budget: float) -> None:
    assert Settings().budget_for(asked, remaining) == budget


@given(st.none() | seconds, st.none() | seconds)
def test_never_over_the_maximum_nor_over_the_caller_but_for_the_floor(
    asked: float | None, remaining: float | None
) -> None:
    settings = Settings()
    budget = settings.budget_for(asked, remaining)
    assert budget <= settings.budget_max
    if asked is not None:
        assert budget <= asked
    if remaining is not None:
        assert budget <= max(settings.budget_floor, remaining)


def test_backoff_grows_to_its_bound_and_starts_anew() -> None:
    backoff = Backoff(0.5, 30.0)
    assert backoff.next() <= 0.5
    for _ in range(100):
        assert 0 <= backoff.next() <= 30.0
    backoff.reset()
    assert backoff.next() <= 0.5
