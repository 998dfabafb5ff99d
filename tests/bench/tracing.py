"""The benchmark of traces: launches with tracing off and on, and with collectors that are live, slow, hanging or dead.

A pair of services for each; a few launches of each alternate, so that all see the same machine, and medians are
compared. There are as many rounds as the machine's noise asks for, judged by the spread of the ratios themselves. Each
launch must end with status 0, with its output whole, and clean. Exit status 1 where a mark is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from tests.bench.launch import Measure, measure, tell, write
from tests.harness.calls import FULL_SPEC, Calls
from tests.harness.pair import Pair

# Ratio of a launch with tracing to one without, and of one with a bad collector to one with a live one.
MARK_ON = 1.15
MARK_BAD = 1.05
BAD = ("slow", "hanging", "dead")
_SLOW_S = 1.0
# Launches of one pair after the other: an export, which 512 spans begin, falls into the block that began it.
_BLOCK = 5
_WARM_UP = 25
_ROUNDS_MIN = 50
# Rounds go on until the ratios' standard errors are below this.
_ERROR = 0.015
_RESAMPLES = 100

Rounds = list[dict[str, list[float]]]
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def _launch(calls: Calls) -> float:
    """Seconds from the call until GONE; with its output, read afterwards."""
    begun = time.monotonic()
    launching = calls.launch(["/bin/echo", "whole"], spec=FULL_SPEC)
    started = launching.started()
    assert launching.exited().exit_code == 0
    gone = launching.event("gone")
    took = time.monotonic() - begun
    assert next(launching.call, None) is None
    assert gone.cleanup.outcome == gone.cleanup.CLEAN
    assert calls.output(started.lease_id) == {1: b"whole\n", 2: b""}
    return took


def _environment(port: int) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}


def run(most: int) -> dict[str, Measure]:
    """Milliseconds of one launch: medians, of `most` rounds at most."""
    rounds: Rounds = []
    with ExitStack() as stack:
        collectors = stack.enter_context(_Collectors())
        environments = {"off": {}, **{name: _environment(port) for name, port in collectors.ports.items()}}
        pairs = {name: stack.enter_context(Pair(each)) for name, each in environments.items()}
        for pair in pairs.values():
            for _ in range(_WARM_UP):
                _launch(pair.calls)
        while len(rounds) < most and (len(rounds) < _ROUNDS_MIN or _error(rounds) > _ERROR):
            in_turn = random.sample([*pairs], len(pairs))
            rounds.append({name: [_launch(pairs[name].calls) for _ in range(_BLOCK)] for name in in_turn})
    print(f"{len(rounds)} rounds; standard error of the ratios {_error(rounds):.3f}")
    live = _median(rounds, "live")
    results = {"launch traced against not, ms": measure(live, _median(rounds, "off"), MARK_ON)}
    for name in BAD:
        results[f"launch with a {name} collector against a live one, ms"] = measure(
            _median(rounds, name), live, MARK_BAD
        )
    return results


def _median(rounds: Rounds, name: str) -> float:
    return statistics.median(took for each in rounds for took in each[name]) * 1000


def _error(rounds: Rounds) -> float:
    """The largest standard error of a ratio to the live one, by resampling whole rounds."""
    ratios: dict[str, list[float]] = {name: [] for name in ("off", *BAD)}
    for _ in range(_RESAMPLES):
        some = random.choices(rounds, k=len(rounds))
        live = _median(some, "live")
        for name, found in ratios.items():
            found.append(_median(some, name) / live)
    return max(statistics.stdev(found) for found in ratios.values())


class _Collectors:
    """OTLP receivers, in a process of their own: one that answers, one late, one never, and a port where none is."""

    def __enter__(self) -> _Collectors:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.tracing", "--collect"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.ports: dict[str, int] = json.loads(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def _collect() -> None:
    """Until the end of standard input."""
    dead = socket.create_server(("127.0.0.1", 0))
    ports = {"dead": int(dead.getsockname()[1])}
    dead.close()
    for name, delay in (("live", 0.0), ("slow", _SLOW_S), ("hanging", None)):
        server = socket.create_server(("127.0.0.1", 0))
        ports[name] = int(server.getsockname()[1])
        threading.Thread(target=_serve, args=(server, delay), daemon=True).start()
    print(json.dumps(ports), flush=True)
    sys.stdin.read()


def _serve(server: socket.socket, delay: float | None) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection, delay), daemon=True).start()


def _answer(connection: socket.socket, delay: float | None) -> None:
    """Reads each request and answers after `delay` seconds; None: never, and reads nothing."""
    with connection, connection.makefile("rb") as requests:
        if delay is None:
            threading.Event().wait()
        while requests.readline():
            length = 0
            while (line := requests.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            requests.read(length)
            time.sleep(delay or 0.0)
            connection.sendall(_ANSWER)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--rounds", type=int, default=300, help="at most")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect:
        _collect()
        return
    results = run(options.rounds)
    write(options.output, results)
    sys.exit(tell(results))


if __name__ == "__main__":
    main()
