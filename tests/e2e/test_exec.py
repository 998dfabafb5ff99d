"""Commands in containers that run: what they get of these, how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from tests.harness.calls import Calls, Result, code, fresh_name, info
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces")

LASTING = ["/bin/sleep", "600"]
# A first process of a pid namespace that lets go of the orphans it gets.
MAIN = ["/usr/bin/python3", "-I", "-c", "import signal as s; s.signal(s.SIGCHLD, s.SIG_IGN); s.pause()"]
PATH = ["PATH=/usr/bin:/bin:/usr/sbin:/sbin"]
HOST = "virtual_host { virtual_hostname: 'inside' network { } }"
NAMESPACES = ("mnt", "uts", "ipc", "net", "pid")
LOOK = "for each in mnt uts ipc net pid; do readlink /proc/self/ns/$each; done; hostname; cut -c1-10 /proc/1/cmdline"


@pytest.fixture
def pair(own_pair_module: Pair) -> Pair:
    return own_pair_module


@pytest.fixture
def web(pair: Pair) -> Iterator[str]:
    """A container with namespaces of its own that runs."""
    name = fresh_name("web")
    pair.calls.detach(MAIN, name, HOST)
    yield name
    pair.calls.destroy(name)


def shell(pair: Pair, name: str, script: str, **fields: Any) -> Result:
    return pair.calls.run(["/bin/sh", "-c", script], name, env=PATH, **fields)


def namespaces_of(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/ns/{each}") for each in NAMESPACES]


def refused(pair: Pair, name: str, spec: str = "", command: str = "/bin/true", **fields: Any) -> dict[str, str]:
    """Code, reason and what the details name; and nothing is left of it."""
    with pair.unchanged():
        error = pair.calls.launch([command], name, spec, exec=True, **fields).error()
    told = info(error)
    return {"code": code(error).name, "reason": told.reason, **told.metadata}


def test_it_is_in_the_namespaces_of_its_container_and_below_it(pair: Pair, web: str) -> None:
    main = pair.calls.get(web)
    for fields in ({"exec": True}, {"within_existing": True}):
        found = shell(pair, web, LOOK, **fields)
        assert found.code == 0, found.stderr
        assert found.started.name.startswith(f"{web}/run-")
        assert found.stdout.decode().split() == [*namespaces_of(main.pid), "inside", "/usr/bin/p"]
    assert shell(pair, web, "ls -l /proc/self/fd | wc -l", exec=True).stdout == b"5\n"  # with total, and ls's own
    assert pair.calls.get(web).state == cpb.Container.RUNNING
    named = shell(pair, f"{web}/below", LOOK)
    assert named.stdout.decode().split()[:5] == namespaces_of(main.pid)


def test_below_containers_without_a_process_it_is_in_those_of_the_nearest_that_has_one(pair: Pair, web: str) -> None:
    pair.calls.create(f"{web}/group")
    main = pair.calls.get(web)
    found = shell(pair, f"{web}/group/job", LOOK)
    assert found.stdout.decode().split()[:5] == namespaces_of(main.pid)
    inner = pair.calls.detach(LASTING, f"{web}/group/inner")
    assert namespaces_of(inner.pid) == namespaces_of(main.pid)
    again = shell(pair, f"{web}/group/inner", LOOK, exec=True)
    assert again.stdout.decode().split()[:5] == namespaces_of(main.pid)


def test_in_a_container_of_the_hosts_namespaces_it_has_these(pair: Pair) -> None:
    name = fresh_name()
    pair.calls.detach(LASTING, name, "memory { limit: 134217728 }")
    found = shell(pair, name, LOOK, exec=True)
    assert found.stdout.decode().split()[:5] == namespaces_of(os.getpid())
    assert pair.calls.run(["/bin/cat", "/proc/self/cgroup"], name, exec=True).stdout.count(f"{name}/run-".encode()) > 0
    pair.calls.destroy(name)


@pytest.mark.parametrize("security", ["security { }", "security { user: 'nobody' }"])
def test_the_confinement_of_its_container_holds_for_it(pair: Pair, security: str) -> None:
    name = fresh_name("confined")
    kept = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    limits = "filesystem { fd_limit: 77 }"
    main = pair.calls.detach(LASTING, name, f"{security} {limits}")
    theirs = Path(f"/proc/{main.pid}/status").read_text().splitlines()
    try:
        for asked in ({"exec": True}, {}):
            script = "ulimit -n >&2; exec cat /proc/self/status"
            found = shell(pair, name if asked else f"{name}/x", script, **asked)
            assert found.stderr == b"77\n"
            ours = found.stdout.decode().splitlines()
            assert [line for line in ours if line.startswith(kept)] == [x for x in theirs if x.startswith(kept)]
        tried = shell(pair, name, "mount -t tmpfs none /mnt || echo refused; echo x > /proc/sysrq-trigger", exec=True)
        assert tried.stdout == b"refused\n"
        assert tried.code != 0
        tighter = shell(pair, name, "ulimit -n", exec=True, spec="filesystem { fd_limit: 33 }")
        assert tighter.stdout == b"33\n"
        for spec, field in (
            ("security { }", "security"),
            ("security { user: 'root' }", "security"),
            ("filesystem { rootfs: '/usr' }", "filesystem.rootfs"),
            ("filesystem { mounts { mount { source: '/etc' target: '/mnt' } } }", "filesystem.mounts"),
        ):
            told = refused(pair, name, spec)
            assert (told["code"], told["field"]) == ("UNIMPLEMENTED", field)
    finally:
        pair.calls.destroy(name)


def test_it_has_the_root_of_its_container(pair: Pair, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    root = tmp_path / "root"
    for each in ("proc", "dev", "etc", "usr", "data"):
        (root / each).mkdir(parents=True)
    for each in ("bin", "lib", "lib64"):
        if (Path("/") / each).is_symlink():
            (root / each).symlink_to(f"usr/{each}")
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\ninsider:x:4711:4712::/:/bin/sh\n")
    name = fresh_name("rooted")
    usr = "mount { source: '/usr' target: '/usr' read_only: true }"
    spec = f"filesystem {{ rootfs: '{root}' mounts {{ {usr} }} }} security {{ user: 'insider' }}"
    pair.calls.detach(LASTING, name, spec, env=PATH)
    found = shell(pair, name, "ls /; pwd; id -u; id -g", exec=True, cwd="/data")
    assert found.stdout.decode().split() == [
        "bin", "data", "dev", "etc", "lib", "lib64", "proc", "usr", "/data", "4711", "4712",
    ]  # fmt: skip
    assert refused(pair, name, cwd="/work")["field"] == "cwd"
    pair.calls.destroy(name)


def test_what_it_can_not_be_in(pair: Pair, web: str) -> None:
    assert refused(pair, fresh_name("absent"))["code"] == "NOT_FOUND"
    assert refused(pair, "")["field"] == "name"
    group = fresh_name("group")
    pair.calls.create(group)
    told = refused(pair, group)
    assert (told["code"], told["reason"], told["name"]) == ("FAILED_PRECONDITION", "NO_PROCESS", group)
    pair.calls.destroy(group)
    told = refused(pair, web, "virtual_host { }")
    assert (told["code"], told["field"]) == ("INVALID_ARGUMENT", "virtual_host")
    for spec in ("virtual_host { }", "security { }"):
        with pair.unchanged():
            error = pair.calls.launch(["/bin/true"], f"{web}/own", spec).error()
        assert code(error) is StatusCode.UNIMPLEMENTED
        assert info(error).metadata["field"] == spec.split()[0]


def test_it_ends_with_its_container_and_both_waits_return(pair: Pair, web: str) -> None:
    name = fresh_name("ends")
    main = pair.calls.detach(["/bin/sleep", "600"], name, HOST)
    inner = pair.calls.launch(LASTING, name, exec=True)
    started = inner.started()
    waits: list[cpb.Record] = []
    waiting = [
        threading.Thread(target=lambda each=each: waits.append(pair.calls.wait(each))) for each in (main.id, started.id)
    ]
    for thread in waiting:
        thread.start()
    pair.calls.containerizer.Kill(cpb.KillRequest(name=main.id), timeout=10)
    for thread in waiting:
        thread.join(20)
    assert {each.id: each.signal for each in waits} == {main.id: 9, started.id: 9}
    assert inner.exited().signal == 9
    assert inner.gone().outcome == cpb.Cleanup.CLEAN
    until(lambda: name not in pair.calls.living(), "the container goes too")


def test_its_time_out_ends_its_own_tree_alone(pair: Pair, web: str) -> None:
    main = pair.calls.get(web)
    with pair.unchanged():
        begun = time.monotonic()
        ended = shell(pair, web, "sleep 601 & sleep 602 & setsid sleep 603 & wait", exec=True, limit_s=0.5)
        assert ended.record.reason == cpb.Record.TIMEOUT
        assert ended.cleanup.outcome == cpb.Cleanup.CLEAN
        assert time.monotonic() - begun < 15
    after = pair.calls.get(web)
    assert (after.state, after.pid) == (cpb.Container.RUNNING, main.pid)


def _some(calls: Calls, web: str, number: int) -> str:
    """One exec of each kind in turn; how it ended."""
    match number % 8:
        case 0 | 2 | 4 | 6:
            return str(calls.run(["/bin/sh", "-c", f"exit {number % 7}"], web, exec=True).code == number % 7)
        case 1:
            error = calls.launch(["/no/such/file"], web, exec=True).error()
        case 3:
            error = calls.launch(["/etc/passwd"], web, exec=True).error()
        case 5:
            ended = calls.run(["/bin/sleep", "600"], web, exec=True, limit_s=0.05)
            return cpb.Record.Reason.Name(ended.record.reason)
        case _:
            launching = calls.launch(LASTING, web, exec=True)
            if number % 16 == 7:
                launching.started()
            launching.cancel()
            return "cancelled"
    return f"{code(error).name} {info(error).metadata['errno']} {info(error).metadata['stage']}"


@pytest.mark.timeout(300)
def test_two_hundred_half_of_them_failing_leave_nothing(pair: Pair, web: str) -> None:
    _some(pair.calls, web, 0)
    with pair.unchanged(timeout_s=30):
        found = {kind: set[str]() for kind in range(8)}
        for number in range(200):
            found[number % 8].add(_some(pair.calls, web, number))
        assert found == {
            **{kind: {"True"} for kind in (0, 2, 4, 6)},
            1: {"NOT_FOUND ENOENT exec"},
            3: {"PERMISSION_DENIED EACCES exec"},
            5: {"TIMEOUT"},
            7: {"cancelled"},
        }
        until(lambda: list(pair.calls.living()) == [web], "the cancelled ones are gone")
    assert pair.calls.get(web).state == cpb.Container.RUNNING


def test_one_of_many_at_once_does_not_hold_up_another(pair: Pair, web: str) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                assert shell(pair, web, "hostname", exec=True).stdout == b"inside\n"
                # In between, our own namespaces: the spawner is back in them.
                assert shell(pair, "", "readlink /proc/self/ns/pid").stdout.decode().strip() == own
        except BaseException as error:
            errors.append(error)

    own = os.readlink("/proc/self/ns/pid")
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors[0]


def test_adopted_containers_can_be_entered(own_pair: Pair) -> None:
    name = fresh_name("adopted")
    main = own_pair.calls.detach(LASTING, name, HOST)
    inner = own_pair.calls.detach(LASTING, f"{name}/inner")
    for service in ("containerizer", "spawner"):
        own_pair.kill(service)
        own_pair.await_ready()
        found = shell(own_pair, name, LOOK, exec=True)
        assert found.stdout.decode().split()[:5] == namespaces_of(main.pid)
        assert own_pair.calls.get(f"{name}/inner").pid == inner.pid
    own_pair.calls.destroy(name)
    assert not Path(f"/proc/{inner.pid}").exists()


def test_the_command(pair: Pair, web: str) -> None:
    ran = pair.command("exec", web, "hostname")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "inside\n", "")
    assert pair.command("exec", "--timeout", "100ms", web, "--", "sleep", "60").returncode == 143
    for words, status in (
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["/no/such"], 127),
        (["/etc/passwd"], 126),
    ):
        assert pair.command("exec", web, *words).returncode == status, words
    piped = pair.command("exec", web, "--", "cat", input="passed on\n")
    assert piped.stdout == "passed on\n"
    absent = pair.command("exec", "/absent", "true")
    assert absent.returncode == 125
    assert "/absent" in absent.stderr
    for words, told in ((["exec"], "NAME is missing"), (["exec", web], "a command is missing")):
        wrong = pair.command(*words)
        assert wrong.returncode == 125
        assert told in wrong.stderr
