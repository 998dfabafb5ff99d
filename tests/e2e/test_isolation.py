"""Confined containers: what their spec gives them, and each way out tried from inside.

The root file systems are real ones, made of the host's /usr by mounts of the spec: no image is needed.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.harness.calls import Calls, Result, code, fresh_name, info
from tests.harness.pair import CHANNEL_OPTIONS, Pair, Service
from tightship.kernel import seccomp
from tightship.v1 import containerizer_pb2 as cpb

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")

USER, GROUP = 65534, 65534
PATH = ["PATH=/usr/bin:/bin:/usr/sbin:/sbin"]
AS_NOBODY = "security { user: 'nobody' }"
DEVICES = {"null", "zero", "full", "random", "urandom", "tty"}


@pytest.fixture
def pair(own_pair_module: Pair) -> Pair:
    """Not one in another container: the roots are made here."""
    return own_pair_module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root to which /usr has still to be mounted."""
    tmp_path.chmod(0o755)
    made = tmp_path / "root"
    for name in ("proc", "dev", "etc", "tmp", "usr", "data"):
        (made / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        if (Path("/") / name).is_symlink():
            (made / name).symlink_to(f"usr/{name}")
    (made / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\ninsider:x:4711:4712::/:/bin/sh\n")
    (made / "etc/group").write_text("root:x:0:\nsailors:x:4713:\n")
    made.chmod(0o755)
    return made


def with_root(root: Path, security: str = "", mounts: str = "") -> str:
    usr = "mount { source: '/usr' target: '/usr' read_only: true private: true }"
    return f"filesystem {{ rootfs: '{root}' mounts {{ {usr} {mounts} }} }} {security}"


def shell(pair: Pair, script: str, spec: str, **fields: object) -> Result:
    return pair.calls.run(["/bin/sh", "-c", script], spec=spec, env=PATH, **fields)  # type: ignore[arg-type]


def python(pair: Pair, program: str, spec: str) -> Result:
    return pair.calls.run(["/usr/bin/python3", "-I", "-c", program], spec=spec, env=PATH)


def refused(pair: Pair, spec: str, **fields: object) -> tuple[grpc.StatusCode, dict[str, str]]:
    """Code and metadata; and nothing is left of it."""
    with pair.unchanged():
        error = pair.calls.launch(["/bin/true"], spec=spec, **fields).error()  # type: ignore[arg-type]
    return code(error), dict(info(error).metadata)


def status(result: Result) -> dict[str, str]:
    return {
        key: value.strip() for key, _, value in (line.partition(":") for line in result.stdout.decode().splitlines())
    }


SPECS = ["host files", "own root"]


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest, root: Path) -> Iterator[str]:
    """A user's container with default security, on the host's files and on a root of its own."""
    yield with_root(root, "security { user: '65534' }") if request.param == "own root" else AS_NOBODY


# What is given


def test_user_groups_and_no_privileges(pair: Pair) -> None:
    found = status(shell(pair, "cat /proc/self/status", "security { user: 'nobody' groups: '4000' groups: 'daemon' }"))
    assert found["Uid"].split() == [str(USER)] * 4
    assert found["Gid"].split() == [str(GROUP)] * 4
    assert sorted(map(int, found["Groups"].split())) == [1, 4000]
    assert [int(found[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")] == [0] * 5
    assert found["NoNewPrivs"] == "1"


def test_groups_of_the_service_are_not_inherited(pair: Pair) -> None:
    found = status(shell(pair, "cat /proc/self/status", "security { user: '4711' }"))
    assert (found["Gid"].split()[0], found["Groups"]) == ("4711", ""), "of an unknown number never the group root"


def test_root_keeps_a_small_set(pair: Pair) -> None:
    found = status(shell(pair, "cat /proc/self/status", "security { }"))
    own = status(shell(pair, "cat /proc/self/status", ""))
    assert (found["Uid"].split()[0], found["NoNewPrivs"]) == ("0", "1")
    assert int(found["CapEff"], 16) == int(found["CapBnd"], 16)
    assert int(found["CapEff"], 16) & ~0x404FB == 0, "no more than the default set"
    assert int(found["CapEff"], 16) == int(own["CapEff"], 16) & 0x404FB


def test_capabilities_that_are_named_are_kept_over_the_exec(pair: Pair) -> None:
    given = "security { user: 'nobody' capabilities: 'CAP_NET_BIND_SERVICE' }"
    found = status(shell(pair, "cat /proc/self/status", given))
    assert [int(found[f"Cap{kind}"], 16) for kind in ("Prm", "Eff", "Bnd", "Amb")] == [1 << 10] * 4
    none = status(shell(pair, "cat /proc/self/status", "security { capabilities: 'NONE' }"))
    assert (none["Uid"].split()[0], int(none["CapEff"], 16), int(none["CapBnd"], 16)) == ("0", 0, 0)


def test_without_security_everything_is_as_before(pair: Pair) -> None:
    mine = status(shell(pair, "cat /proc/self/status", "filesystem { fd_limit: 100 }"))
    assert mine["NoNewPrivs"] == "0"
    plain = status(shell(pair, "cat /proc/self/status", ""))
    assert [mine[key] for key in ("CapEff", "CapBnd", "Groups")] == [
        plain[key] for key in ("CapEff", "CapBnd", "Groups")
    ]


def test_fd_limit(pair: Pair) -> None:
    result = shell(pair, "ulimit -Sn; ulimit -Hn", "filesystem { fd_limit: 77 }")
    assert result.stdout.split() == [b"77", b"77"]


def test_what_is_in_force_is_read_back(pair: Pair) -> None:
    given = "security { user: 'nobody' groups: '4000' } filesystem { fd_limit: 77 }"
    launching = pair.calls.launch(["/bin/true"], spec=given, report_in_force=True)
    told = {one.field: one.value for one in launching.started().in_force}
    launching.exited()
    launching.gone()
    assert told == {
        "filesystem.fd_limit": "77",
        "security.user": "65534",
        "security.groups": "4000",
        "security.capabilities": "0" * 16,
        "security.no_new_privs": "1",
        "security.seccomp_profile": "2" if seccomp.available() else "0",
    }
    started = pair.calls.detach(["/bin/sleep", "600"], fresh_name(), given)
    try:
        assert {one.field: one.value for one in pair.calls.get(started.name).in_force} == told
        assert pair.calls.get(started.name).spec.security.groups == ["4000"]
    finally:
        pair.calls.destroy(started.name)


def test_output_may_be_opened_by_the_user(pair: Pair) -> None:
    result = shell(
        pair,
        "echo out > /dev/stdout; echo err > /dev/stderr; read -r x < /dev/stdin; echo $x",
        AS_NOBODY,
        input=b"in\n",
    )
    assert (result.stdout, result.stderr) == (b"out\nin\n", b"err\n")
    before = os.stat("/dev/null")
    assert shell(pair, "read -r x; echo $x", AS_NOBODY).stdout == b"\n"
    after = os.stat("/dev/null")
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid), "the host's node is not given away"


def test_own_root(pair: Pair, root: Path) -> None:
    (root / "data/inside").write_text("x")
    found = shell(pair, "ls /; cat /data/inside; pwd; ls /proc/1/exe; echo made > /tmp/file", with_root(root))
    names = found.stdout.decode().split()
    assert set(names[: names.index("x/")]) <= {
        "bin",
        "data",
        "dev",
        "etc",
        "lib",
        "lib64",
        "proc",
        "sbin",
        "tmp",
        "usr",
    }
    assert (root / "tmp/file").read_text() == "made\n"
    assert not os.path.ismount(root), "nothing is mounted on the host"
    assert os.listdir(root / "dev") == os.listdir(root / "proc") == os.listdir(root / "usr") == []


def test_users_are_those_of_the_own_root(pair: Pair, root: Path) -> None:
    given = with_root(root, "security { user: 'insider' groups: 'sailors' }")
    assert shell(pair, "id -u; id -G", given).stdout.split() == [b"4711", b"4712", b"4713"]


def test_mounts_read_only_and_written(pair: Pair, root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    mounts = (
        f"mount {{ source: '{source}' target: '/data' }} mount {{ source: '{source}' target: '/tmp' read_only: true }}"
    )
    result = shell(
        pair, "echo 1 > /data/a; cat /tmp/a; echo 2 > /tmp/b; echo 3 > /usr/c", with_root(root, mounts=mounts)
    )
    assert result.stdout == b"1\n"
    assert result.stderr.count(b"Read-only file system") == 2
    assert os.listdir(source) == ["a"]


@pytest.mark.parametrize("private", [True, False])
def test_what_the_host_mounts_later_appears_unless_the_mount_is_private(
    pair: Pair, root: Path, tmp_path: Path, private: bool
) -> None:
    source, go = tmp_path / "source", tmp_path / "go"
    (source / "below").mkdir(parents=True)
    go.mkdir()
    kind = "private: true" if private else ""
    mounts = f"mount {{ source: '{source}' target: '/data' {kind} }} mount {{ source: '{go}' target: '/tmp' }}"
    script = "mount > /dev/null; while [ ! -e /tmp/go ]; do sleep 0.02; done; ls /data/below"
    subprocess.run(["mount", "-t", "tmpfs", "shared", source], check=True)
    try:
        (source / "below").mkdir()
        subprocess.run(["mount", "--make-shared", source], check=True)
        launching = pair.calls.launch(["/bin/sh", "-c", script], spec=with_root(root, mounts=mounts), env=PATH)
        lease = launching.started().lease_id
        subprocess.run(["mount", "-t", "tmpfs", "later", source / "below"], check=True)
        (source / "below/late").touch()
        (go / "go").touch()
        assert pair.calls.output(lease)[1] == (b"" if private else b"late\n")
        launching.exited()
        launching.gone()
    finally:
        subprocess.run(["umount", "-R", source], check=True)


@pytest.mark.parametrize("kind", SPECS)
def test_a_file_system_in_memory_is_bounded_and_its_own(pair: Pair, root: Path, kind: str) -> None:
    target = "/data" if kind == "own root" else "/mnt"
    (root / "data/hidden").touch()
    before = os.listdir("/mnt")
    mount = f"mount {{ target: '{target}' tmpfs {{ size: 65536 }} }}"
    security = "security { user: '65534' }"
    given = (
        with_root(root, security, mount) if kind == "own root" else f"filesystem {{ mounts {{ {mount} }} }} {security}"
    )
    script = (
        f"cd {target}; ls -A; head -c 65536 /dev/zero > whole; head -c 1 /dev/zero > more; wc -c < whole;"
        "rm whole more;"
        "i=0; while [ $i -lt 1000 ] && ( : > $i ) 2> /dev/null; do i=$((i + 1)); done; echo $((i < 40));"
        'grep -c " $PWD tmpfs .*nosuid,nodev" /proc/self/mounts'
    )
    result = shell(pair, script, given)
    assert result.stdout.split() == [b"65536", b"1", b"1"], result
    assert b"No space left on device" in result.stderr
    assert os.listdir(root / "data") == ["hidden"]
    assert os.listdir("/mnt") == before


def test_a_file_system_in_memory_is_read_only_where_asked_and_in_order(pair: Pair, root: Path) -> None:
    (root / "data/below").mkdir()
    mounts = (
        "mount { source: '/usr' target: '/data' read_only: true } mount { target: '/tmp' read_only: true"
        " tmpfs { size: 4096 } } mount { target: '/data/lib' tmpfs { size: 1048576 } }"
    )
    script = (
        "ls /data/lib; echo x > /data/lib/x; cat /data/lib/x; echo y > /tmp/y; ls /data/bin > /dev/null && echo usr"
    )
    result = shell(pair, script, with_root(root, mounts=mounts))
    assert result.stdout.split() == [b"x", b"usr"]
    assert b"Read-only file system" in result.stderr
    assert not (Path("/usr/lib/x")).exists()


def test_a_file_system_in_memory_counts_for_its_container(pair: Pair) -> None:
    """More than its memory.limit can't be kept in it, whatever its size: the kernel ends the writer."""
    mount = "mounts { mount { target: '/mnt' tmpfs { size: 1073741824 } } }"
    given = f"filesystem {{ {mount} }} memory {{ limit: 33554432 swap_only: 0 }}"
    with pair.unchanged():
        result = shell(pair, "exec head -c 134217728 /dev/zero > /mnt/file", given)
    assert (result.record.signal, result.record.oom_kills) == (signal.SIGKILL, 1), result.record


# Filters of system calls

PROBE = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in map(int, sys.argv[1:]):
    print(errno.errorcode[ctypes.get_errno()] if libc.syscall(number, 0x10000000, 0, 0, 0, 0) == -1 else "done")
"""
# Of x86-64.
UNSHARE, CLONE, CLONE3, KEYCTL, IO_URING_SETUP, GETPID = 272, 56, 435, 250, 425, 39

needs_libseccomp = pytest.mark.skipif(
    os.uname().machine != "x86_64" or not seccomp.available(), reason="needs libseccomp, and numbers of x86-64"
)


def probe(pair: Pair, spec: str, *numbers: int) -> list[str]:
    words = ["/usr/bin/python3", "-I", "-c", PROBE, *map(str, numbers)]
    result = pair.calls.run(words, spec=spec, env=PATH)
    assert result.code == 0, result
    return result.stdout.decode().split()


def with_filter(name: Path | str, more: str = "") -> str:
    return f"security {{ seccomp_profile: '{name}' {more} }}"


@needs_libseccomp
def test_default_filter(pair: Pair, spec: str) -> None:
    assert status(shell(pair, "cat /proc/self/status", spec))["Seccomp"] == "2"
    found = probe(pair, spec, GETPID, UNSHARE, KEYCTL, CLONE, CLONE3, IO_URING_SETUP)
    assert found == ["done", "EPERM", "EPERM", "ENOSYS", "ENOSYS", "ENOSYS"]


@needs_libseccomp
def test_default_filter_keeps_rare_families_of_sockets_away(pair: Pair) -> None:
    program = (
        "import errno, socket\n"
        "for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_NETLINK, 38, 40):\n"
        "    try: socket.socket(family, socket.SOCK_RAW if family == socket.AF_NETLINK else socket.SOCK_STREAM)\n"
        "    except OSError as error: print(family, errno.errorcode[error.errno])\n"
    )
    assert python(pair, program, AS_NOBODY).stdout == b"38 ENOSYS\n40 ENOSYS\n"


@needs_libseccomp
def test_threads_and_processes_work_under_the_default_filter(pair: Pair, spec: str) -> None:
    program = (
        "import subprocess, multiprocessing.pool as pool, asyncio, tempfile, mmap\n"
        "print(sum(pool.ThreadPool(4).map(abs, range(10))), subprocess.run(['true']).returncode)\n"
        "print(asyncio.run(asyncio.sleep(0, 'slept')))\n"
        "mmap.mmap(-1, 4096)\n"
        "open(tempfile.mkstemp(dir='/dev/shm')[1], 'w').write('x')\n"
    )
    result = python(pair, program, spec)
    assert result.stdout == b"45 0\nslept\n", result


@needs_libseccomp
def test_a_capability_opens_its_calls(pair: Pair) -> None:
    assert probe(pair, "security { capabilities: 'CAP_SYS_CHROOT' }", UNSHARE) == ["EPERM"]
    given = "security { capabilities: 'CAP_SYS_ADMIN' capabilities: 'CAP_DAC_OVERRIDE' }"
    assert shell(pair, "mount -t tmpfs x /mnt && echo mounted", given).stdout == b"mounted\n"


@needs_libseccomp
def test_the_second_numbering_of_calls_is_no_way_around_the_filter(pair: Pair) -> None:
    x32 = 0x40000000
    result = pair.calls.run(["/usr/bin/python3", "-I", "-c", PROBE, str(x32 + GETPID)], spec=AS_NOBODY)
    assert result.record.signal == signal.SIGSYS


@needs_libseccomp
def test_no_filter(pair: Pair) -> None:
    assert status(shell(pair, "cat /proc/self/status", with_filter("unconfined")))["Seccomp"] == "0"
    assert status(shell(pair, "cat /proc/self/status", with_filter("default")))["Seccomp"] == "2"


@needs_libseccomp
@pytest.mark.parametrize("more", ["", "user: 'nobody'", "user: 'nobody' no_new_privs: false"])
def test_own_filter(pair: Pair, tmp_path: Path, more: str) -> None:
    profile = tmp_path / "profile.json"
    refuse_usr1 = {"index": 1, "op": "SCMP_CMP_EQ", "value": 10}
    rules = [
        {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EXDEV},
        {"names": ["kill"], "action": "SCMP_ACT_ERRNO", "args": [refuse_usr1]},
    ]
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}))
    result = shell(pair, "mkdir /dev/shm/x; kill -USR1 $$; kill -0 $$ && echo alive", with_filter(profile, more))
    assert result.stdout == b"alive\n"
    assert b"Invalid cross-device link" in result.stderr
    assert b"not permitted" in result.stderr


@needs_libseccomp
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", None),
        ("[]", ""),
        ("{}", "defaultAction"),
        ('{"defaultAction": "SCMP_ACT_ALLOW", "archMap": []}', "archMap"),
        ('{"defaultAction": "SCMP_ACT_NOTIFY"}', "defaultAction"),
        ('{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": []}]}', "syscalls[0].names"),
        (
            '{"defaultAction": "SCMP_ACT_ALLOW", "syscalls":'
            ' [{"names": ["kill"], "action": "SCMP_ACT_TRAP", "includes": {}}]}',
            "syscalls[0].includes",
        ),
    ],
)
def test_a_bad_profile_is_refused_by_its_place(pair: Pair, tmp_path: Path, text: str, place: str | None) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(text)
    metadata = refused(pair, with_filter(profile))[1]
    assert (metadata["field"], metadata["file"]) == ("security.seccomp_profile", str(profile))
    assert metadata.get("key") == place


@needs_libseccomp
def test_a_filter_that_can_not_be_fails_the_launch(pair: Pair, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    rules = [{"names": ["no_such_call"], "action": "SCMP_ACT_ERRNO"}]
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}))
    assert refused(pair, with_filter(profile))[1]["field"] == "security.seccomp_profile"
    assert refused(pair, with_filter("/nonexistent"))[1]["field"] == "security.seccomp_profile"
    # It lets nothing through, not even the child's last calls.
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_KILL_PROCESS"}))
    assert refused(pair, with_filter(profile))[1]["stage"] == "gate"


# Clients that run as a user


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Calls]]:
    """A pair whose client `ci` runs as daemon, and that client."""
    file = tmp_path_factory.mktemp("clients") / "clients.toml"
    file.write_text(f'[[client]]\nname = "ci"\nuid = {USER}\nprefixes = ["/"]\nrun_as = "daemon"\n')
    with Pair({"TIGHTSHIP_CLIENTS": str(file)}) as pair:
        channels = [
            grpc.insecure_channel(f"unix:{pair.run_dir}/clients/ci/{service}.sock", options=CHANNEL_OPTIONS)
            for service in ("containerizer", "switchboard")
        ]
        yield pair, Calls(*channels)
        for channel in channels:
            channel.close()


@pytest.mark.parametrize("given", ["", "security { user: 'daemon' }", "tasks { limit: 9 } security { }"])
def test_a_client_that_runs_as_a_user_gets_that_user(forced: tuple[Pair, Calls], given: str) -> None:
    pair, client = forced
    ids = client.run(["/bin/sh", "-c", "id -u; grep CapBnd /proc/self/status"], spec=given, env=PATH).stdout.split()
    assert (ids[0], int(ids[2], 16)) == (b"1", 0)
    assert pair.calls.run(["/usr/bin/id", "-u"], spec=given and "security { }").stdout == b"0\n", "others as before"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("security { user: 'root' }", "security.user"),
        ("security { user: '1' }", "security.user"),
        ("security { groups: '0' }", "security.groups"),
        ("security { capabilities: 'CAP_SYS_ADMIN' }", "security.capabilities"),
        ("security { no_new_privs: false }", "security.no_new_privs"),
        ("security { seccomp_profile: 'unconfined' }", "security.seccomp_profile"),
        ("security { seccomp_profile: '/etc/shadow' }", "security.seccomp_profile"),
        ("filesystem { rootfs: '/var' }", "filesystem.rootfs"),
        ("filesystem { mounts { } }", "filesystem.mounts"),
    ],
)
def test_a_client_that_runs_as_a_user_gets_nothing_beyond(forced: tuple[Pair, Calls], given: str, field: str) -> None:
    error = forced[1].launch(["/bin/true"], spec=given).error()
    assert (code(error), info(error).metadata["field"]) == (grpc.StatusCode.PERMISSION_DENIED, field)


def test_a_user_of_such_a_client_reaches_no_door(forced: tuple[Pair, Calls]) -> None:
    pair, client = forced
    paths = [str(path) for path in pair.run_dir.rglob("*.sock")]
    assert len(paths) == 6
    assert b"connected" not in client.run(["/usr/bin/python3", "-I", "-c", CONNECT, *paths], env=PATH).stdout


# What is refused


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("security { user: 'nobody-of-that-name' }", "security.user"),
        ("security { user: '4294967295' }", "security.user"),
        ("security { user: '' }", "security.user"),
        ("security { groups: 'no-such-group' }", "security.groups[0]"),
        ("security { capabilities: 'CAP_EVERYTHING' }", "security.capabilities[0]"),
        ("security { capabilities: 'CAP_CHOWN' capabilities: 'NONE' }", "security.capabilities[1]"),
        ("filesystem { fd_limit: 0 }", "filesystem.fd_limit"),
        ("filesystem { fd_limit: 2147483647 }", "filesystem.fd_limit"),
        ("filesystem { rootfs: 'relative' }", "filesystem.rootfs"),
        ("filesystem { rootfs: '/' }", "filesystem.rootfs"),
        ("filesystem { rootfs: '/nonexistent' }", "filesystem.rootfs"),
        ("filesystem { rootfs: '/etc/passwd' }", "filesystem.rootfs"),
        ("filesystem { rootfs: '/var' }", "filesystem.rootfs"),
        (
            "filesystem { mounts { mount { source: '/nonexistent' target: '/mnt' } } }",
            "filesystem.mounts.mount[0].source",
        ),
        ("filesystem { mounts { mount { target: '/mnt' } } }", "filesystem.mounts.mount[0].source"),
        (
            "filesystem { mounts { mount { target: '/mnt' source: '/usr' tmpfs { size: 4096 } } } }",
            "filesystem.mounts.mount[0].source",
        ),
        ("filesystem { mounts { mount { target: '/mnt' tmpfs { } } } }", "filesystem.mounts.mount[0].tmpfs.size"),
        (
            "filesystem { mounts { mount { target: '/mnt' tmpfs { size: 9223372036854775808 } } } }",
            "filesystem.mounts.mount[0].tmpfs.size",
        ),
        (
            "filesystem { mounts { mount { target: '/absent' tmpfs { size: 4096 } } } }",
            "filesystem.mounts.mount[0].target",
        ),
        ("filesystem { mounts { mount { tmpfs { size: 4096 } } } }", "filesystem.mounts.mount[0].target"),
        ("virtual_host { init { } }", "virtual_host.init.init_argv"),
        ("virtual_host { init { init_argv: '' } }", "virtual_host.init.init_argv"),
        (
            "filesystem { mounts { mount { source: '/usr' target: '/proc/../sys' } } }",
            "filesystem.mounts.mount[0].target",
        ),
        ("filesystem { mounts { mount { source: '/usr' target: '/absent' } } }", "filesystem.mounts.mount[0].target"),
        (
            "filesystem { mounts { mount { source: '/etc/passwd' target: '/mnt' } } }",
            "filesystem.mounts.mount[0].target",
        ),
    ],
)
def test_refusals_name_the_field(pair: Pair, given: str, field: str) -> None:
    assert refused(pair, given)[1]["field"] == field


def test_a_user_needs_the_right_to_its_directory(pair: Pair, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    found, metadata = refused(pair, AS_NOBODY, cwd=str(closed))
    assert (found, metadata["field"], metadata["errno"]) == (grpc.StatusCode.PERMISSION_DENIED, "cwd", "EACCES")


def test_create_has_no_process_to_be_confined(pair: Pair) -> None:
    for given in ("security { }", "filesystem { fd_limit: 3 }"):
        with pytest.raises(grpc.RpcError) as raised:
            pair.calls.create(fresh_name(), given)
        assert code(raised.value) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("service", ["containerizer", "spawner"])
def test_a_confined_container_outlives_the_services(faulty: Pair, root: Path, service: Service) -> None:
    given = with_root(root, "security { user: '4711' }")
    with faulty.unchanged():
        started = faulty.calls.detach(["/bin/sh", "-c", "sleep 600"], fresh_name(), given, env=PATH)
        faulty.kill(service)
        faulty.await_ready()
        assert faulty.calls.get(started.name).state == cpb.Container.RUNNING
        assert faulty.calls.get(started.name).spec.security.user == "4711"
        faulty.calls.destroy(started.name)


def test_the_loop_in_python_confines_as_the_machine_code_does(pair: Pair, faulty: Pair, root: Path) -> None:
    script = "id; grep -E 'Seccomp:|CapBnd|NoNewPrivs' /proc/self/status; ls /dev /; ulimit -n"
    for given in (
        AS_NOBODY,
        with_root(root, "security { user: '4711' }"),
        "security { }",
        "filesystem { fd_limit: 9 }",
    ):
        native = shell(pair, script, given)
        assert native.code == 0, native
        assert shell(faulty, script, given).stdout == native.stdout


# Ways out, each tried from inside


def test_can_not_mount(pair: Pair, spec: str) -> None:
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for flags in (0, 0x1000, 0x20, 0x1020): \n"
        "    assert libc.mount(b'/tmp', b'/tmp', b'tmpfs', flags, None) == -1, flags\n"
        "    print(ctypes.get_errno())\n"
        "assert libc.umount2(b'/proc', 2) == -1\n"
        "print(ctypes.get_errno())\n"
        "assert libc.syscall(155, b'/tmp', b'/tmp') == -1\n"
        "print(ctypes.get_errno())\n"
        "assert libc.chroot(b'/tmp') == -1\n"
        "print(ctypes.get_errno())\n"
    )
    result = python(pair, program, spec)
    assert result.stdout.split() == [b"1"] * 7, result.stderr


def test_can_not_reach_other_devices(pair: Pair, spec: str) -> None:
    program = (
        "import os, stat\n"
        "for name in os.listdir('/dev'):\n"
        "    mode = os.lstat('/dev/' + name).st_mode\n"
        "    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode): print(name)\n"
        "for kind, number in ((stat.S_IFCHR, (1, 1)), (stat.S_IFBLK, (254, 0)), (stat.S_IFCHR, (1, 3))):\n"
        "    try: os.mknod('/tmp/device', kind | 0o666, os.makedev(*number))\n"
        "    except PermissionError: continue\n"
        "    print('made', number)\n"
    )
    result = python(pair, program, spec)
    assert result.code == 0, result.stderr
    assert set(result.stdout.decode().split()) == {name for name in DEVICES if os.path.exists(f"/dev/{name}")}


def test_a_device_node_in_its_files_does_not_open(pair: Pair, root: Path) -> None:
    os.mknod(root / "data/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    result = shell(pair, "cat /data/null && echo opened; cat /dev/null && echo null", with_root(root))
    assert (result.stdout, b"Permission denied" in result.stderr) == (b"null\n", True)


def test_can_not_see_processes_or_descriptors_of_the_host(pair: Pair, spec: str) -> None:
    program = (
        "import os\n"
        "pids = [int(each) for each in os.listdir('/proc') if each.isdecimal()]\n"
        "print(len(pids), os.getpid(), os.getppid())\n"
        "print(*sorted(os.listdir('/proc/self/fd')))\n"
        "for pid in range(2, 70000):\n"
        "    try: os.kill(pid, 0)\n"
        "    except ProcessLookupError: continue\n"
        "    print('there is', pid)\n"
    )
    result = python(pair, program, spec)
    # The third descriptor is the listing's own.
    assert result.stdout.decode().splitlines() == ["1 1 0", "0 1 2 3"], result


def test_can_not_write_kernel_paths(pair: Pair, spec: str) -> None:
    paths = (
        "/proc/sys/kernel/hostname /proc/sys/kernel/core_pattern /proc/sysrq-trigger /proc/sys/vm/drop_caches"
        " /proc/irq/default_smp_affinity /sys/kernel/mm/ksm/run /sys/kernel/uevent_helper /sys/fs/cgroup/cgroup.procs"
    )
    reads = "cat /proc/kcore /proc/keys; ls /sys/firmware; id -u"
    script = f"for path in {paths}; do ( : > $path ) 2> /dev/null && echo wrote $path; done; {reads}"
    result = shell(pair, script, spec)
    assert result.stdout == b"65534\n", result


@pytest.mark.parametrize("kind", SPECS)
def test_a_contained_root_changes_no_device_of_the_host(pair: Pair, root: Path, kind: str) -> None:
    given = with_root(root) if kind == "own root" else "security { }"
    before = {name: os.stat(f"/dev/{name}") for name in DEVICES if os.path.exists(f"/dev/{name}")}
    script = (
        "for node in null zero full random urandom tty; do"
        " chmod 640 /dev/$node && echo chmod; chown 1 /dev/$node && echo chown; touch /dev/$node && echo touch;"
        " done; chmod 640 /proc/self/fd/0 && echo stdin;"
        " chown 1 /proc/keys && echo masked; rm -f /dev/null && echo removed;"
        " echo x > /dev/null; head -c 3 /dev/zero | wc -c"
    )
    assert shell(pair, script, given).stdout == b"3\n"
    for name, was in before.items():
        now = os.stat(f"/dev/{name}")
        assert (now.st_mode, now.st_uid, now.st_mtime) == (was.st_mode, was.st_uid, was.st_mtime)


@pytest.mark.parametrize("kind", SPECS)
def test_a_contained_root_can_not_either(pair: Pair, root: Path, kind: str) -> None:
    given = with_root(root) if kind == "own root" else "security { }"
    paths = "/proc/sys/kernel/hostname /proc/sysrq-trigger /sys/kernel/mm/ksm/run /sys/fs/cgroup/unified/cgroup.procs"
    script = (
        f"for path in {paths}; do ( echo x > $path ) 2> /dev/null && echo wrote $path; done;"
        "mount -t tmpfs none /tmp && echo mounted; mount -o remount,rw /proc/sys && echo remounted;"
        "mknod /tmp/node c 1 1 && echo node; umount -l /proc && echo unmounted; unshare -m true && echo unshared;"
        "nsenter -t 1 -m true && echo entered; dmesg && echo dmesg; ls -d /proc/[0-9]* | wc -l; id -u"
    )
    result = shell(pair, script, given)
    processes, uid = result.stdout.split()
    assert int(processes) <= 4, result
    assert uid == b"0"


def test_set_user_id_bits_give_nothing(pair: Pair, root: Path) -> None:
    tool = root / "data/id"
    tool.write_bytes(Path("/usr/bin/id").read_bytes())
    tool.chmod(0o4755)
    result = shell(pair, "/data/id -u", with_root(root, "security { user: '65534' }"))
    assert result.stdout == b"65534\n"


def test_runc_cve_2021_30465_links_in_the_root_lead_nowhere_else(pair: Pair, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "out").symlink_to(outside)
    found, metadata = refused(pair, with_root(root, mounts="mount { source: '/etc' target: '/out' }"))
    assert (found, metadata["field"]) == (grpc.StatusCode.NOT_FOUND, "filesystem.mounts.mount[1].target")
    (root / "etc/passwd").unlink()
    (root / "etc/passwd").symlink_to("/etc/shadow")
    assert refused(pair, with_root(root, "security { user: 'nobody' }"))[1]["field"] == "security.user"
    (root / "etc/passwd").unlink()
    os.mkfifo(root / "etc/passwd")
    assert refused(pair, with_root(root, "security { user: 'nobody' }"))[1]["field"] == "security.user"


@pytest.mark.parametrize("directory", ["/proc/self/fd/7", "/proc/self/fd/3", "/proc/self/cwd", "/proc/1/root/etc"])
def test_cve_2024_21626_the_directory_is_no_magic_link(pair: Pair, root: Path, directory: str) -> None:
    for given in (with_root(root), AS_NOBODY):
        metadata = refused(pair, given, cwd=directory)[1]
        assert metadata["field"] == "cwd"
        assert metadata["errno"] in ("ELOOP", "ENOENT", "EACCES")


def test_cve_2024_21626_the_directory_is_inside(pair: Pair, root: Path) -> None:
    (root / "data/deep").mkdir()
    result = shell(pair, "pwd -P; cd ../../../..; pwd -P; ls -d etc usr; ls data", with_root(root), cwd="/data/deep")
    assert result.stdout == b"/data/deep\n/\netc\nusr\ndeep\n"


def test_mesos_9564_nothing_of_ours_is_in_its_root(pair: Pair, root: Path) -> None:
    before = sorted(os.listdir(root)), sorted(os.listdir(root / "etc"))
    shell(pair, "true", with_root(root, "security { user: '65534' }"))
    assert (sorted(os.listdir(root)), sorted(os.listdir(root / "etc"))) == before


CONNECT = """
import socket, sys
for path in sys.argv[1:]:
    try:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            try:
                socket.socket(socket.AF_UNIX, kind).connect(path)
                print("connected", path)
            except OSError as error:
                if not isinstance(error, PermissionError):
                    continue
                raise
    except PermissionError:
        print("refused")
"""


def test_cve_2020_15257_no_abstract_socket_and_no_path_socket_for_a_user(pair: Pair) -> None:
    paths = [str(path) for path in pair.run_dir.glob("*.sock")]
    assert len(paths) == 4
    result = pair.calls.run(["/usr/bin/python3", "-I", "-c", CONNECT, *paths], spec=AS_NOBODY)
    assert result.stdout.split() == [b"refused"] * len(paths), result
    mine = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in pair.pids().values() for fd in os.listdir(f"/proc/{pid}/fd")}
    abstract = {
        f"socket:[{words[6]}]"
        for words in map(str.split, Path("/proc/net/unix").read_text().splitlines())
        if len(words) > 7 and words[7].startswith("@")
    }
    assert mine, "the sockets of the services were looked at"
    assert not mine & abstract
