"""The sweep: every failpoint of Launch, an exec, Create, Destroy, Update and Pause with every fault, nothing left.

A case holds one operation at one failpoint and then does one thing to it: an errno, the client's cancel or deadline, or
SIGKILL of the client or of a service. After recovery the tests' own census must be as before, the name free, and a
container beside it unharmed. `python -m tests.faults.sweep` runs all and writes a report; a test runs a slice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import grpc

from tests.harness import census, points
from tests.harness.calls import FULL_SPEC, fresh_name
from tests.harness.pair import ROOT, Pair, Service
from tests.harness.waiting import Answer, until
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import spec_pb2

CLIENT_FAULTS = ("cancel", "deadline", "kill client")
FAULTS = ("errno", *CLIENT_FAULTS, "kill containerizer", "kill spawner", "kill switchboard")
# The command of a launch that ends by itself; of one that a cancel or a Destroy ends.
QUICK = ["/bin/true"]
LASTING = ["/bin/sleep", "600"]
# What these are done to is there before, and afterwards.
CHANGES = ("update", "pause")
# Create and an exec refuse virtual_host.
CREATE_SPEC = FULL_SPEC.split(" virtual_host")[0]

_DEADLINE_S = 1.5
_RECOVERY_S = 30.0


@dataclass(frozen=True)
class Case:
    operation: str
    point: str
    fault: str

    def __str__(self) -> str:
        return f"{self.operation} {self.point} {self.fault}"

    @property
    def command(self) -> list[str]:
        return LASTING if self.fault in CLIENT_FAULTS and not self.undoing else QUICK

    @property
    def undoing(self) -> bool:
        """At this point the operation is past what a cancel ends: the hold is released by the sweep."""
        return self.operation in ("destroy", "update") or self.point.startswith(
            ("containerizer.undo", "spawner.reap", "switchboard.exit", "switchboard.close")
        )


def cases(generated: points.Generated) -> list[Case]:
    """All of them, in the order of the generated list."""
    return [
        Case(operation, point, fault)
        for operation, names in generated.operations.items()
        for point in names
        for fault in FAULTS
        if fault != "errno" or point not in generated.cannot_fail
    ]


def sliced(every: Iterable[Case]) -> list[Case]:
    """One case for each operation and failpoint, the faults taking turns; always the same ones."""
    by_point: dict[tuple[str, str], list[Case]] = {}
    for case in every:
        by_point.setdefault((case.operation, case.point), []).append(case)
    return [group[number % len(group)] for number, group in enumerate(by_point.values())]


class Sweeper:
    """Runs cases on one pair, which is restarted where a case killed a part of it. Use as a context manager."""

    def __init__(self) -> None:
        self._pair = Pair(failpoints=True)
        self._directory = tempfile.TemporaryDirectory(prefix="tsby", dir="/tmp")
        self._fifo = f"{self._directory.name}/fifo"
        os.mkfifo(self._fifo)
        self._line = os.open(self._fifo, os.O_RDWR | os.O_CLOEXEC)
        self._lines = 0
        self._held: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._pair.start()
        self._client = self._spare_client()
        self._bystander = self._launch_bystander()
        self._check_bystander(streams=True)
        self._pair.calls.run(QUICK, fresh_name("warm"), FULL_SPEC)
        self._before = self._look()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.kill()
        self._client.wait()
        for stream in (self._client.stdin, self._client.stdout):
            if stream is not None:
                stream.close()
        os.close(self._line)
        self._directory.cleanup()
        self._pair.close()

    def run(self, case: Case) -> None:
        """Raises AssertionError, or a gRPC error, where the promise is not kept."""
        pair = self._pair
        pair.points.clear()
        name = fresh_name("sweep")
        self._prepare(case.operation, name)
        pair.points.arm(case.point, "errno EIO" if case.fault == "errno" else "wait")
        try:
            answered = self._inflict(case, name)
        finally:
            pair.points.disarm(case.point)
        self._await_recovery()
        self._check_create(case, name, answered)
        self._check_changed(case, name, answered)
        self._check_bystander(streams=case.fault != "kill switchboard")
        self._settle()
        assert pair.calls.run(QUICK, name, FULL_SPEC).code == 0, "the name is not free"
        self._settle()

    def plain(self, operation: str) -> set[str]:
        """Points reached by the operation when nothing is wrong."""
        pair = self._pair
        pair.points.clear()
        name = fresh_name("plain")
        self._prepare(operation, name)
        pair.points.arm("_all", "hit")
        self._call(operation, name, QUICK, None).result()
        if operation not in CHANGES:
            self._settle(but=name if operation == "create" else None)
        hits = pair.points.hits()
        pair.points.clear()
        if operation in ("create", *CHANGES):
            pair.calls.destroy(name)
        self._settle()
        return hits - {"_all"}

    def _prepare(self, operation: str, name: str) -> None:
        """What it is done to."""
        if operation in ("destroy", "pause"):
            self._pair.calls.detach(LASTING, name, FULL_SPEC)
        elif operation == "update":
            self._pair.calls.create(name, CREATE_SPEC)
            files = [each.file for each in self._pair.calls.get(name).in_force]
            self._held = {file: Path(file).read_text() for file in files}

    def _frozen(self, name: str) -> bool:
        """By the files of the tracker, whichever that is."""
        for tree, file, asked in (
            ("unified", "cgroup.freeze", "1"),
            ("", "cgroup.freeze", "1"),
            ("freezer", "freezer.state", "FROZEN"),
        ):
            where = Path("/sys/fs/cgroup", tree, "tightship", self._pair.instance, name.lstrip("/"), file)
            if where.exists():
                return where.read_text().strip() == asked
        raise AssertionError("no freezer")

    # A case, step by step

    def _inflict(self, case: Case, name: str) -> bool:
        """Whether the call was answered without an error."""
        pair = self._pair
        answered = False
        if case.fault == "kill client":
            client = self._order_client(case, name)
            self._await_hit(case)
            client.kill()
            client.wait()
        else:
            call = self._call(case.operation, name, case.command, _DEADLINE_S if case.fault == "deadline" else None)
            self._await_hit(case)
            match case.fault:
                case "errno":
                    assert call.arrived(_RECOVERY_S), "no answer"
                    assert call.failed or (case.undoing and case.operation != "update"), (
                        "an errno was taken for success"
                    )
                    return not call.failed
                case "cancel":
                    call.cancel()
                case "deadline":
                    assert call.arrived(_RECOVERY_S), "the deadline ended nothing"
                    assert case.undoing or call.failed, "no word of the deadline"
                case _:
                    pair.kill(_service(case.fault))
                    pair.points.disarm(case.point)
            assert call.arrived(_RECOVERY_S), "the caller is left without an answer"
            answered = not call.failed
        if case.undoing:
            pair.points.disarm(case.point)
        elif case.operation == "pause" and case.fault in CLIENT_FAULTS:
            until(lambda: pair.calls.get(name).state == cpb.Container.RUNNING, "it runs on", _RECOVERY_S)
        elif case.fault in CLIENT_FAULTS:
            # Still armed: what is held must end by itself.
            self._settle(but=name if case.operation == "create" and _committed(case.point) else None)
        return answered

    def _await_hit(self, case: Case) -> None:
        self._pair.points.await_hit(case.point, _RECOVERY_S)

    def _call(self, operation: str, name: str, command: list[str], timeout: float | None) -> _Call:
        calls = self._pair.calls
        match operation:
            case "launch":
                return _Call(calls.launch(command, name, FULL_SPEC, timeout=timeout).call, list)
            case "exec":
                inside = calls.launch(command, self._bystander.name, CREATE_SPEC, timeout=timeout, exec=True)
                return _Call(inside.call, list)
            case "create":
                request = cpb.CreateRequest(name=name, spec=cpb.SpecInput(text=CREATE_SPEC))
                return _Call(calls.containerizer.Create.future(request, timeout=timeout), lambda call: call.result())
            case "destroy":
                destroy = cpb.DestroyRequest(name=name, force=True)
                return _Call(calls.containerizer.Destroy.future(destroy, timeout=timeout), lambda call: call.result())
            case "update":
                update = cpb.UpdateRequest(name=name, mode=cpb.UpdateRequest.REPLACE)
                return _Call(calls.containerizer.Update.future(update, timeout=timeout), lambda call: call.result())
            case "pause":
                pause = cpb.PauseRequest(name=name)
                return _Call(calls.containerizer.Pause.future(pause, timeout=timeout), lambda call: call.result())
        raise ValueError(operation)

    def _await_recovery(self) -> None:
        """All three run, are connected, and nothing is under recovery or has a cleanup before it."""
        pair = self._pair

        def recovered() -> bool:
            try:
                pair.pids()
                pair.calls.touch()
                states = {one.state for one in pair.calls.living().values()}
                return not states & {cpb.Container.RECOVERING, cpb.Container.CLOSING, cpb.Container.CLEANUP_PENDING}
            except (grpc.RpcError, LookupError):
                return False

        until(recovered, "recovery", _RECOVERY_S)
        pair.await_ready(_RECOVERY_S)

    def _check_create(self, case: Case, name: str, answered: bool) -> None:
        """A create that was committed may be there; it is then whole, and can be destroyed."""
        if case.operation != "create":
            return
        found = self._pair.calls.living().get(name)
        if found is None:
            return
        if found.state == cpb.Container.CREATED:
            assert _committed(case.point) or answered, "made though it was not committed"
            in_force = self._pair.calls.get(name).in_force
            assert {one.field for one in in_force} >= {"cpu.limit", "memory.limit", "tasks.limit"}
            self._pair.calls.destroy(name)

    def _check_changed(self, case: Case, name: str, answered: bool) -> None:
        """An update or a pause came whole, or not at all; afterwards the container is destroyed."""
        calls = self._pair.calls
        if case.operation == "update":
            # One that changes nothing comes after the one that may go on still.
            calls.containerizer.Update(cpb.UpdateRequest(name=name, mode=cpb.UpdateRequest.DIFF), timeout=_RECOVERY_S)
            taken = calls.get(name).spec == spec_pb2.ContainerSpec()
            now = {file: Path(file).read_text() for file in self._held}
            lifted = {file for file in now if now[file] != self._held[file]}
            assert not lifted or taken, f"changed though it was not taken: {lifted}"
            # The period is the kernel's default.
            kept = {os.path.basename(file) for file in now.keys() - lifted}
            assert not taken or kept <= {"cpu.cfs_period_us"}, f"taken, but as before: {kept}"
            assert taken or not answered
            assert not (taken and case.fault == "errno")
        if case.operation == "pause":
            state = calls.get(name).state
            frozen = self._frozen(name)
            assert frozen == (state == cpb.Container.PAUSED), f"{state}, but frozen: {frozen}"
            assert frozen or not answered
            assert not (frozen and case.fault == "errno")
        if case.operation in CHANGES:
            calls.destroy(name)

    def _check_bystander(self, streams: bool) -> None:
        living = self._pair.calls.living().get(self._bystander.name)
        assert living is not None, "the bystander is gone"
        assert living.state == cpb.Container.RUNNING
        assert living.pid == self._bystander.pid
        assert Path(f"/proc/{living.pid}").exists()
        if not streams:
            self._pair.calls.destroy(self._bystander.name)
            self._bystander = self._launch_bystander()
        self._lines += 1
        line = f"line {self._lines}\n".encode()
        os.write(self._line, line)

        def passed_on() -> bool:
            streams, gaps, _ = self._pair.calls.attach(self._bystander.lease_id, follow=False)
            assert not gaps
            return streams[1].endswith(line)

        until(passed_on, "the bystander's output arrives")

    # What is beside the case

    def _launch_bystander(self) -> Any:
        """Where commands are executed, too."""
        script = f'while read -r line; do echo "$line"; done < {self._fifo}'
        return self._pair.calls.detach(["/bin/sh", "-c", script], fresh_name("bystander"), "virtual_host { }")

    def _look(self, but: str | None = None) -> census.Census:
        """The census without the bystander's directories and process, nor those of the container `but`."""
        now = self._pair.census()
        spared = [f"/{self._pair.instance}{name}" for name in (self._bystander.name, but) if name]
        return replace(
            now,
            cgroups=tuple(path for path in now.cgroups if not path.endswith(tuple(spared))),
            processes=tuple(one for one in now.processes if one[0] != self._bystander.pid),
        )

    def _settle(self, but: str | None = None) -> None:
        def look() -> census.Census:
            limit = time.monotonic() + _RECOVERY_S
            while True:
                try:
                    self._pair.calls.touch()
                    return self._look(but)
                except (LookupError, FileNotFoundError, grpc.RpcError):
                    assert time.monotonic() < limit, "the pair does not come back"
                    time.sleep(0.02)

        census.settle(look, self._before, _RECOVERY_S)
        if but is None:
            leases = self._pair.calls.leases().keys() - {self._bystander.lease_id}
            assert not leases, f"living leases: {leases}"

    def _spare_client(self) -> subprocess.Popen[str]:
        """Started ahead, since an interpreter takes longer than a case."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.harness.client", str(self._pair.run_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def _order_client(self, case: Case, name: str) -> subprocess.Popen[str]:
        client, self._client = self._client, self._spare_client()
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        spec = FULL_SPEC if case.operation == "launch" else CREATE_SPEC
        where = self._bystander.name if case.operation == "exec" else name
        client.stdin.write(json.dumps([case.operation, where, case.command, spec]) + "\n")
        client.stdin.close()
        client.stdout.close()
        return client


class _Call:
    """A call under way, read in a thread."""

    def __init__(self, call: Any, read: Callable[[Any], object]) -> None:
        self._call = call
        self._answer = Answer(lambda: read(call))

    def cancel(self) -> None:
        self._call.cancel()

    def arrived(self, timeout_s: float) -> bool:
        return self._answer.arrived(timeout_s)

    def result(self) -> object:
        return self._answer.result()

    @property
    def failed(self) -> bool:
        try:
            self._answer.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            return True
        return False


def _committed(point: str) -> bool:
    """Whether a create held here may be committed."""
    return point.startswith("containerizer.create.commit")


def _service(fault: str) -> Service:
    found: Service = fault.removeprefix("kill ")  # type: ignore[assignment]
    return found


def _work(queue: list[Case], lock: threading.Lock, report: Callable[[Case, float, str | None], None]) -> None:
    """Takes cases until there are none; a pair on which one failed is replaced."""
    while True:
        with Sweeper() as sweeper:
            while True:
                with lock:
                    if not queue:
                        return
                    case = queue.pop(0)
                begun = time.monotonic()
                try:
                    sweeper.run(case)
                except Exception:
                    report(case, time.monotonic() - begun, traceback.format_exc())
                    break
                report(case, time.monotonic() - begun, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/sweep.json"))
    parser.add_argument("--workers", type=int, default=2, help="pairs at the same time")
    parser.add_argument("--only", default="", help="cases whose text contains this")
    options = parser.parse_args()
    todo = [case for case in cases(points.generated()) if options.only in str(case)]
    total, done, begun = len(todo), 0, time.monotonic()
    failures: list[dict[str, str]] = []
    lock = threading.Lock()

    def report(case: Case, seconds: float, failure: str | None) -> None:
        nonlocal done
        with lock:
            done += 1
            print(f"{done}/{total} {'FAILED' if failure else 'ok'} {seconds:5.1f} s  {case}", flush=True)
            if failure:
                print(failure, flush=True)
                failures.append({"case": str(case), "failure": failure})

    workers = [threading.Thread(target=_work, args=(todo, lock, report)) for _ in range(options.workers)]
    counts = Counter(case.fault for case in todo)
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    result = {
        "cases": total,
        "residue": len(failures),
        "run": done,
        "by_fault": dict(counts),
        "seconds": round(time.monotonic() - begun, 1),
        "failures": failures,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{total} cases, {len(failures)} failed, {result['seconds']} s; {options.output}")
    sys.exit(bool(failures) or done != total or not total)


if __name__ == "__main__":
    main()
