"""The spawner starts its containerizer again, also after launches, without failpoints in its way."""

from __future__ import annotations

from tests.harness.pair import Pair


def test_the_containerizer_comes_back_after_launches(own_pair: Pair) -> None:
    for _ in range(3):
        assert own_pair.calls.run(["/bin/true"]).code == 0
    own_pair.kill("containerizer")
    own_pair.await_ready()
    assert own_pair.calls.run(["/bin/true"]).code == 0
