"""The benchmark: a launch of `true` against `crun run` with the same namespaces and limits, in one run.

Pairs alternate, so that both see the same machine, and medians are compared. A launch is timed from the call on an open
channel until GONE; crun from its start to its exit, with the bundle that `crun spec` writes; and, for information, with
one stripped of all that a launch has not (tests/bench/peer.py). Exit status 1 where a mark is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from tests.bench.peer import Crun
from tests.harness.calls import FULL_SPEC, Calls
from tests.harness.pair import Pair

# Ratio to crun that a launch must not be above.
MARK = 0.7
TOGETHER = 16
_WARM_UP = 20


class Measure(TypedDict):
    """One line of build/bench.json. `mark` and `met` are null where a figure is information."""

    value: float
    peer: float
    ratio: float
    mark: float | None
    met: bool | None


def _launch(calls: Calls) -> float:
    """Seconds from the call until GONE; the end of the stream comes after it."""
    begun = time.monotonic()
    launching = calls.launch(["/bin/true"], spec=FULL_SPEC)
    launching.started()
    assert launching.exited().exit_code == 0
    launching.event("gone")
    took = time.monotonic() - begun
    assert next(launching.call, None) is None
    return took


def _timed(what: Callable[[], object]) -> float:
    begun = time.monotonic()
    what()
    return time.monotonic() - begun


def _together(calls: Calls) -> None:
    threads = [threading.Thread(target=_launch, args=(calls,)) for _ in range(TOGETHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_turn(calls: Calls, crun: Crun, pairs: int, apart_s: float, mark: float | None = MARK) -> Measure:
    """Milliseconds of one launch, medians, each `apart_s` after the end of the one before."""
    ours, theirs = [], []
    for _ in range(pairs):
        time.sleep(apart_s)
        ours.append(_launch(calls))
        time.sleep(apart_s)
        theirs.append(crun.run())
    value, peer = statistics.median(ours) * 1000, statistics.median(theirs) * 1000
    return measure(value, peer, mark)


def in_flight(calls: Calls, crun: Crun, pairs: int) -> Measure:
    """Launches a second, TOGETHER started at the same time; for information."""
    ours = [TOGETHER / _timed(lambda: _together(calls)) for _ in range(pairs)]
    theirs = [TOGETHER / crun.run(TOGETHER) for _ in range(pairs)]
    value, peer = statistics.median(ours), statistics.median(theirs)
    return measure(value, peer, None)


def measure(value: float, peer: float, mark: float | None) -> Measure:
    ratio = value / peer
    return Measure(
        value=round(value, 3),
        peer=round(peer, 3),
        ratio=round(ratio, 3),
        mark=mark,
        met=None if mark is None else ratio <= mark,
    )


def write(output: Path, results: dict[str, Measure]) -> None:
    """Into the file, beside what other benchmarks have there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        results = json.loads(output.read_text()) | results
    output.write_text(json.dumps(results, indent=2) + "\n")


def tell(results: dict[str, Measure]) -> bool:
    """Prints them; whether a mark is missed."""
    for name, one in results.items():
        mark = "for information" if one["mark"] is None else f"mark {one['mark']}, {'met' if one['met'] else 'MISSED'}"
        print(f"{name}: {one['value']} against {one['peer']}, ratio {one['ratio']} ({mark})")
    return any(one["met"] is False for one in results.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--pairs", type=int, default=100)
    options = parser.parse_args()
    if shutil.which("crun") is None:
        sys.exit("the benchmark compares with crun, which is missing: apt-get install crun")
    with Pair() as pair, Crun() as crun, Crun(stripped=True) as stripped:
        for _ in range(_WARM_UP):
            _launch(pair.calls)
            crun.run()
            stripped.run()
        results = {
            "launch back to back, ms": in_turn(pair.calls, crun, options.pairs, 0),
            "launch 100 ms apart, ms": in_turn(pair.calls, crun, options.pairs // 2, 0.1),
            "launch back to back against crun stripped, ms": in_turn(pair.calls, stripped, options.pairs, 0, None),
            f"launches {TOGETHER} in flight, per s": in_flight(pair.calls, crun, 10),
        }
    write(options.output, results)
    sys.exit(tell(results))


if __name__ == "__main__":
    main()
