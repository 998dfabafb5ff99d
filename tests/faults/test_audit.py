"""Audit finds what is planted, says whose it most likely is, and removes only what is this instance's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from tests.harness import census
from tests.harness.calls import fresh_name
from tests.harness.pair import Pair, Service
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import switchboard_pb2 as spb


def _audit(pair: Pair, fix: bool = False) -> list[cpb.Finding]:
    response = pair.calls.containerizer.Audit(cpb.AuditRequest(fix=fix), timeout=30)
    assert response.examined, "it says how many things it looked at"
    return list(response.findings)


def _one(findings: list[cpb.Finding], kind: cpb.Finding.Kind.ValueType, what: str) -> cpb.Finding:
    found = [one for one in findings if one.kind == kind and what in one.what]
    assert len(found) == 1, f"not one {cpb.Finding.Kind.Name(kind)} {what} in {findings}"
    assert found[0].origin, found
    return found[0]


@pytest.fixture
def base(faulty: Pair) -> Path:
    return next(base for base in census.cgroup_bases(faulty.instance) if "/memory/" in str(base))


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[None]:
    path.mkdir()
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()


def _mark(path: Path, pair: Pair, name: str) -> None:
    path.chmod(0o1755)
    os.setxattr(path, "trusted.tightship", f"{pair.instance} 0123abcd {name}".encode())


def test_a_clean_pair_has_no_findings(faulty: Pair) -> None:
    name = fresh_name()
    faulty.calls.detach(["/bin/sh", "-c", "sleep 600 & sleep 600"], name, "virtual_host { }")
    faulty.calls.create(f"{name}x")
    assert _audit(faulty) == []
    faulty.calls.destroy(name)
    faulty.calls.destroy(f"{name}x")
    assert _audit(faulty) == []


def test_our_directory_is_found_and_removed(faulty: Pair, base: Path) -> None:
    name = fresh_name("planted")
    with _directory(path := Path(f"{base}{name}")):
        _mark(path, faulty, name)
        found = _one(_audit(faulty), cpb.Finding.CGROUP, str(path))
        assert found.ours
        assert "0123abcd" in found.origin or name in found.origin
        assert path.exists(), "only looked at"
        assert _one(_audit(faulty, fix=True), cpb.Finding.CGROUP, str(path)).fixed
        assert not path.exists()
    assert _audit(faulty) == []


def test_a_directory_of_someone_else_is_found_and_left(faulty: Pair, base: Path) -> None:
    with _directory(path := Path(f"{base}{fresh_name('foreign')}")):
        found = _one(_audit(faulty, fix=True), cpb.Finding.CGROUP, str(path))
        assert not found.ours
        assert not found.fixed
        assert path.exists()
    assert _audit(faulty) == []


def test_a_process_in_our_directory_is_found_and_ended(faulty: Pair, base: Path) -> None:
    name = fresh_name("planted")
    with _directory(path := Path(f"{base}{name}")), subprocess.Popen(["/bin/sleep", "600"]) as sleeper:
        _mark(path, faulty, name)
        (path / "cgroup.procs").write_text(str(sleeper.pid))
        found = _one(_audit(faulty), cpb.Finding.PROCESS, f"pid {sleeper.pid}")
        assert found.ours
        assert "sleep" in found.what
        _audit(faulty, fix=True)
        assert sleeper.wait(10) == -9
        assert not path.exists()
    assert _audit(faulty) == []


def test_a_process_in_a_directory_of_someone_else_is_left(faulty: Pair, base: Path) -> None:
    with _directory(path := Path(f"{base}{fresh_name('foreign')}")), subprocess.Popen(["/bin/sleep", "600"]) as sleeper:
        (path / "cgroup.procs").write_text(str(sleeper.pid))
        assert not _one(_audit(faulty, fix=True), cpb.Finding.PROCESS, f"pid {sleeper.pid}").ours
        assert sleeper.poll() is None
        sleeper.kill()
        sleeper.wait()
    assert _audit(faulty) == []


def test_a_copy_of_a_pipe_outside_its_container_is_found(faulty: Pair) -> None:
    """Incident A's cause: a far end that somebody else holds."""
    name = fresh_name()
    started = faulty.calls.detach(["/bin/sleep", "600"], name)
    held = os.open(f"/proc/{started.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        found = _one(_audit(faulty, fix=True), cpb.Finding.OPEN_FILE, f"fd {held} of pid {os.getpid()}")
        assert started.lease_id in found.origin or name in found.origin
        assert not found.ours
        assert not found.fixed
        os.fstat(held)
    finally:
        os.close(held)
        faulty.calls.destroy(name)
    assert _audit(faulty) == []


def test_a_segment_without_a_lease_is_found_and_removed(faulty: Pair) -> None:
    directory = faulty.run_dir / "logs" / "planted-1"
    directory.mkdir()
    (directory / "stdout").write_bytes(b"left")
    found = _one(_audit(faulty), cpb.Finding.SEGMENT, "planted-1")
    assert found.ours
    _audit(faulty, fix=True)
    assert not directory.exists()
    assert _audit(faulty) == []


def test_a_lease_without_a_container_is_found_and_ended(faulty: Pair) -> None:
    """Of the containerizer's own owner name, and of no container."""
    started = faulty.calls.detach(["/bin/sleep", "600"], name := fresh_name())
    owner = faulty.calls.lease(started.lease_id).owner
    faulty.calls.destroy(name)
    ttl = Duration(seconds=60)
    faulty.calls.switchboard.Acquire(spb.AcquireRequest(lease_id="planted-2", owner=owner, claim_ttl=ttl))
    found = _one(_audit(faulty), cpb.Finding.LEASE, "planted-2")
    assert found.ours
    _audit(faulty, fix=True)
    assert faulty.calls.lease("planted-2").state == spb.Lease.CLOSED
    assert _audit(faulty) == []


def test_a_lease_of_another_owner_is_that_owners(faulty: Pair) -> None:
    faulty.calls.switchboard.Acquire(spb.AcquireRequest(lease_id="other-1", owner="someone"))
    found = _one(_audit(faulty, fix=True), cpb.Finding.LEASE, "other-1")
    assert found.origin.startswith("acquired by owner someone at 20")
    assert not found.ours
    assert faulty.calls.lease("other-1").state == spb.Lease.OFFERED
    faulty.calls.switchboard.Release(spb.ReleaseRequest(lease_id="other-1"))


@pytest.mark.parametrize("created", [False, True])
@pytest.mark.parametrize("hierarchy", ["memory", "pids", "unified"])
def test_a_process_in_a_container_by_one_hierarchy_alone_is_found(faulty: Pair, hierarchy: str, created: bool) -> None:
    name = fresh_name()
    faulty.calls.create(name) if created else faulty.calls.detach(["/bin/sleep", "600"], name)
    base = next(base for base in census.cgroup_bases(faulty.instance) if f"/{hierarchy}/" in str(base))
    with subprocess.Popen(["/bin/sleep", "600"]) as sleeper:
        try:
            Path(f"{base}{name}/cgroup.procs").write_text(str(sleeper.pid))
            found = _one(_audit(faulty, fix=True), cpb.Finding.PROCESS, f"pid {sleeper.pid}")
            assert not found.ours
            assert f"by {hierarchy}, not by " in found.origin
            assert name in found.origin
            assert sleeper.poll() is None, "only looked at"
        finally:
            sleeper.kill()
    faulty.calls.destroy(name)
    assert _audit(faulty) == []


def test_what_a_container_does_with_its_own_directories_is_no_finding(faulty: Pair) -> None:
    """It may make cgroups inside and spread its processes over them."""
    started = faulty.calls.detach(["/bin/sleep", "600"], name := fresh_name())
    base = next(base for base in census.cgroup_bases(faulty.instance) if "/pids/" in str(base))
    below = Path(f"{base}{name}/own")
    below.mkdir()
    (below / "cgroup.procs").write_text(str(started.pid))
    assert _audit(faulty) == []
    faulty.calls.destroy(name)
    assert _audit(faulty) == []


@pytest.mark.parametrize("planted", ["Notes", "notes", "notes.txt/"])
def test_what_no_lease_could_have_made_is_found_and_left(faulty: Pair, planted: str) -> None:
    path = faulty.run_dir / "logs" / planted.rstrip("/")
    if planted.endswith("/"):
        path.mkdir()
    else:
        path.write_text("mine")
    found = _one(_audit(faulty, fix=True), cpb.Finding.SEGMENT, str(path))
    assert not found.ours
    assert not found.fixed
    assert path.exists()
    path.rmdir() if planted.endswith("/") else path.unlink()


def test_a_directory_like_a_leases_with_other_files_is_left(faulty: Pair) -> None:
    path = faulty.run_dir / "logs" / "planted-3"
    path.mkdir()
    (path / "letter").write_text("mine")
    assert not _one(_audit(faulty, fix=True), cpb.Finding.SEGMENT, str(path)).ours
    (path / "letter").unlink()
    path.rmdir()


@pytest.mark.parametrize("service", ["spawner", "switchboard"])
def test_mesos_9151_an_inherited_descriptor_is_not_kept(service: Service) -> None:
    with Pair(planted=service) as pair:
        assert census.PLANTED not in census.descriptors(pair.pid(service))
        assert census.PLANTED not in census.descriptors(pair.pid("containerizer"))
        assert _audit(pair) == []


def test_the_commands_exit_status_says_so(faulty: Pair, base: Path) -> None:
    def audit(*arguments: str) -> subprocess.CompletedProcess[str]:
        return faulty.command("audit", *arguments)

    assert audit().returncode == 0
    name = fresh_name("planted")
    with _directory(path := Path(f"{base}{name}")):
        _mark(path, faulty, name)
        found = audit()
        assert found.returncode != 0
        assert str(path) in found.stdout
        assert audit("--fix").returncode == 0
    assert audit().returncode == 0
