"""Who may do what: other users at every socket, clients of some names, certificates, limits, modes, and no token told.

Real users (a child that gave root up), real certificates, real services.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.harness.authority import Authority, Identity, channel
from tests.harness.calls import Calls, code, fresh_name, info
from tests.harness.meters import scrape, two_ports
from tests.harness.pair import SERVICES, Pair, Service
from tests.harness.stranger import NOBODY, Stranger
from tests.harness.waiting import until
from tightship.common import acl
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import switchboard_pb2 as spb

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")

LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+), with TLS")

CLIENTS = f"""
[[client]]
name = "ci"
uid = {NOBODY}
prefixes = ["/ci"]
launches_max = 3
calls_max = 8

[[client]]
name = "far"
certificate = "spiffe://tests/far"
prefixes = ["/far"]
"""


class Guarded:
    """A pair with a clients file and TLS, and who has certificates for it."""

    def __init__(self, pair: Pair, directory: Path) -> None:
        self.pair = pair
        self.directory = directory
        self.authority = Authority(directory)
        self.server = self.authority.issue("server", ip="127.0.0.1")
        self.far = self.authority.issue("far", uri="spiffe://tests/far")
        self.clients = directory / "clients.toml"
        self.clients.write_text(CLIENTS)
        pair.environment |= {
            "TIGHTSHIP_CLIENTS": str(self.clients),
            "TIGHTSHIP_CONTAINERIZER_LISTEN": "127.0.0.1:0",
            "TIGHTSHIP_SWITCHBOARD_LISTEN": "127.0.0.1:0",
            "TIGHTSHIP_SERVICE_TLS_CERT": str(self.server.certificate),
            "TIGHTSHIP_SERVICE_TLS_KEY": str(self.server.key),
            "TIGHTSHIP_SERVICE_TLS_CLIENT_CA": str(self.authority.path),
            "TIGHTSHIP_LOG_LEVEL": "DEBUG",
            "TIGHTSHIP_NODE": "node-7",
        }
        self.metrics = two_ports()
        pair.environment["TIGHTSHIP_METRICS"] = f"127.0.0.1:{self.metrics}"

    @property
    def door(self) -> str:
        """The run directory of the client `ci`, so to speak."""
        return str(self.pair.run_dir / "clients/ci")

    def address(self, service: str) -> str:
        """The latest one: each start has another port."""
        log = self.pair.run_dir / {"containerizer": "spawner.log"}.get(service, f"{service}.log")
        return f"127.0.0.1:{LISTENING.findall(log.read_text())[-1]}"

    def calls(self, identity: Identity | None, authority: Authority | None = None) -> Iterator[Calls]:
        channels = [
            channel(self.address(service), authority or self.authority, identity)
            for service in ("containerizer", "switchboard")
        ]
        try:
            yield Calls(*channels)
        finally:
            for each in channels:
                each.close()

    def refusals(self, door: str, refused: str) -> list[float]:
        """As each service counts them for Prometheus: the containerizer, the switchboard."""
        series = f'tightship_calls_refused_total{{code="{refused}",door="{door}"}}'
        return [scrape(self.metrics + offset).get(series, 0) for offset in (0, 1)]

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.pair.run_dir.glob("*.log"))


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as directory:
        pair = Pair()
        pair.run_dir.chmod(0o750)  # as a service makes it
        made = Guarded(pair, Path(directory))
        with pair:
            pair.calls.create("/ci")
            pair.calls.create("/far")
            yield made


@pytest.fixture
def far(guarded: Guarded) -> Iterator[Calls]:
    yield from guarded.calls(guarded.far)


@pytest.fixture(scope="module")
def nobody() -> Iterator[Stranger]:
    with Stranger() as stranger:
        yield stranger


# Sockets, directories and files


def test_every_socket_directory_and_file_has_its_mode(guarded: Guarded) -> None:
    guarded.pair.calls.run(["/bin/echo", "kept"])
    expected = [
        (r"", stat.S_IFDIR, 0o750),
        (r"(containerizer|switchboard)\.sock", stat.S_IFSOCK, 0o660),
        (r"(fd|spawner)\.sock", stat.S_IFSOCK, 0o600),
        (r"lock\.\w+", stat.S_IFREG, 0o600),
        (r"journal-[0-9a-f-]+\.db(-wal|-shm)?", stat.S_IFREG, 0o600),
        (r"instance", stat.S_IFREG, 0o644),
        (r"logs(/[0-9a-f]+)?", stat.S_IFDIR, 0o700),
        (r"logs/leases\.db(-wal|-shm)?", stat.S_IFREG, 0o600),
        (r"logs/[0-9a-f]+/(stdout|stderr)", stat.S_IFREG, 0o600),
        (r"clients(/(ci|far|guest|\.strangers))?", stat.S_IFDIR, 0o711),
        (r"clients/ci/(containerizer|switchboard)\.sock", stat.S_IFSOCK, 0o660),  # the mask of its access list
        (r"clients/(far|\.strangers)/(containerizer|switchboard)\.sock", stat.S_IFSOCK, 0o600),
        (r"fp", stat.S_IFDIR, 0o755),  # of these tests
        (r"(spawner|switchboard)\.log", stat.S_IFREG, 0o644),
    ]
    run_dir = guarded.pair.run_dir
    seen = set()
    for path in [run_dir, *run_dir.rglob("*")]:
        name = "" if path == run_dir else str(path.relative_to(run_dir))
        found = path.lstat()
        matching = [index for index, (pattern, _, _) in enumerate(expected) if re.fullmatch(pattern, name)]
        assert matching, f"{name} is not expected here"
        _, kind, mode = expected[matching[0]]
        assert (stat.S_IFMT(found.st_mode), oct(stat.S_IMODE(found.st_mode))) == (kind, oct(mode)), name
        assert (found.st_uid, found.st_gid) == (0, 0), name
        seen.add(matching[0])
    assert seen == set(range(len(expected)))


def test_access_lists_name_the_client_alone(guarded: Guarded) -> None:
    run_dir = guarded.pair.run_dir
    assert named(run_dir) == {NOBODY: acl.SEARCH}
    for service in ("containerizer", "switchboard"):
        path = run_dir / f"clients/ci/{service}.sock"
        assert named(path) == {NOBODY: acl.READ_WRITE}
        assert [granted for tag, granted, _ in acl.read(path) if tag == acl.GROUP_OBJ] == [0]


def named(path: Path) -> dict[int, int]:
    return {uid: granted for tag, granted, uid in acl.read(path) if tag == acl.USER}


def test_a_group_may_use_the_sockets_and_nothing_else() -> None:
    pair = Pair({"TIGHTSHIP_GROUP": "4242"})
    pair.run_dir.chmod(0o750)
    with pair:
        assert pair.run_dir.stat().st_gid == 4242
        for service in ("containerizer", "switchboard"):
            found = (pair.run_dir / f"{service}.sock").stat()
            assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (4242, 0o660)
        for path in (pair.run_dir / "fd.sock", pair.run_dir / "spawner.sock", pair.run_dir / "logs"):
            assert path.stat().st_gid == 0


def test_another_user_can_connect_to_no_socket_of_ours(own_pair: Pair) -> None:
    with Stranger() as nobody:
        for service in ("containerizer", "switchboard", "fd", "spawner"):
            assert nobody.connect(own_pair.run_dir / f"{service}.sock") == "PermissionError"


def test_a_client_can_open_its_own_sockets_and_nothing_else(guarded: Guarded, nobody: Stranger) -> None:
    guarded.pair.calls.run(["/bin/echo", "kept"])
    openable = []
    for path in [guarded.pair.run_dir, *guarded.pair.run_dir.rglob("*")]:
        answer = nobody.connect(path) if path.is_socket() else nobody.ask("read", str(path))
        if answer == "ok":
            openable.append(str(path.relative_to(guarded.pair.run_dir)))
        else:
            assert answer == "PermissionError", path
    # What the tests put there, and the instance's id, which every cgroup path tells.
    own = ["clients/ci/containerizer.sock", "clients/ci/switchboard.sock"]
    assert sorted(openable) == sorted([*own, "instance", "fp", "spawner.log", "switchboard.log"])


def test_the_peer_is_asked_for_even_where_the_modes_let_it_through(own_pair: Pair) -> None:
    own_pair.run_dir.chmod(0o755)
    with Stranger() as nobody:
        for service in ("fd", "spawner"):
            path = own_pair.run_dir / f"{service}.sock"
            path.chmod(0o666)
            assert nobody.connect(path) == "closed"
    assert f"fd.sock, PERMISSION_DENIED, client -, method -: uid {NOBODY}" in own_pair.log_tail()
    assert f"spawner.sock: uid {NOBODY} is not allowed" in own_pair.log_tail()
    assert own_pair.calls.run(["/bin/true"]).code == 0


def test_a_named_peer_may_take_descriptors() -> None:
    with Pair({"TIGHTSHIP_PEER_UID": str(NOBODY)}) as pair, Stranger() as nobody:
        pair.run_dir.chmod(0o755)
        assert named(pair.run_dir / "fd.sock") == {NOBODY: acl.READ_WRITE}
        # The connection is ended only because it says no HELLO, a second later; who isn't let in never connects.
        assert nobody.connect(pair.run_dir / "fd.sock") == "closed"
        assert "is not allowed" not in pair.log_tail()
        with Stranger(NOBODY - 1) as other:
            assert other.connect(pair.run_dir / "fd.sock") == "PermissionError"


# The user need not be able to read what is imported.
AS_USER = """
import os, sys
from tightship.switchboard.__main__ import main
uid = int(sys.argv[1])
del sys.argv[1:4]
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
main()
"""


def test_a_switchboard_of_its_own_user_has_doors_too() -> None:
    uid = 4242
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as directory, Stranger() as nobody:
        Path(directory).chmod(0o755)
        clients = Path(directory, "clients.toml")
        clients.write_text(CLIENTS)
        pair = Pair({"TIGHTSHIP_CLIENTS": str(clients), "TIGHTSHIP_PEER_UID": "0"})
        os.chown(pair.run_dir, uid, uid)
        pair.commands["switchboard"][1:1] = ["-c", AS_USER, str(uid)]
        with pair:
            pair.calls.create("/ci")
            assert Path(f"/proc/{pair.pid('switchboard')}").stat().st_uid == uid
            ci, new = str(pair.run_dir / "clients/ci"), str(pair.run_dir / "clients/new")
            assert nobody.ask("run", ci, ["/bin/echo", "hi"], "/ci/x")["stdout"] == "hi\n"
            clients.write_text(CLIENTS + f'[[client]]\nname = "new"\nuid = {NOBODY}\nprefixes = ["/ci"]\n')
            for service in ("containerizer", "switchboard"):
                hang_up(pair, service)
                until(Path(new, f"{service}.sock").exists, f"the {service} has the new door")
            assert nobody.ask("run", new, ["/bin/echo", "hi"], "")["stdout"] == "hi\n"


def log_takes_lines() -> None:
    """The services log ten refusals a second: a test that looks for one begins in a second of its own."""
    time.sleep(1.0)


# A client of some names


def test_an_allowed_client_runs_its_own(guarded: Guarded, nobody: Stranger) -> None:
    named_so = nobody.ask("run", guarded.door, ["/bin/echo", "hi"], "/ci/x")
    assert named_so == {"stdout": "hi\n", "name": "/ci/x", "node": "node-7"}
    generated = nobody.ask("run", guarded.door, ["/bin/echo", "hi"], "")
    assert generated["name"].startswith("/ci/run-")
    assert nobody.ask("create", guarded.door, "/ci/made") == {"name": "/ci/made"}
    assert guarded.pair.calls.destroy("/ci/made").outcome == cpb.Cleanup.CLEAN


def test_names_elsewhere_are_refused_logged_and_hidden(guarded: Guarded, nobody: Stranger) -> None:
    log_takes_lines()
    own = guarded.pair.calls
    started = own.detach(["/bin/sleep", "100"], "/secret")
    try:
        denied = {"code": "PERMISSION_DENIED", "reason": "NAME_NOT_ALLOWED"}
        before = guarded.refusals("client", "PERMISSION_DENIED"), guarded.refusals("client", "NOT_FOUND")
        for name in ("/other", "/secret", "/secret/below", "/cix", "/ci/../secret", "/"):
            assert nobody.ask("run", guarded.door, ["/bin/true"], name) == denied, name
        assert nobody.ask("create", guarded.door, "/other") == denied
        assert nobody.ask("unary", guarded.door, "Cleanup", {"name": "/secret"}) == denied
        for verb in ("Get", "Destroy", "Kill", "Wait", "Remove", "Trace"):
            for name in ("/secret", started.id):
                hidden = nobody.ask("unary", guarded.door, verb, {"name": name})
                assert hidden == {"code": "NOT_FOUND", "reason": "NOT_FOUND"}, (verb, name)
        for verb in ("GetLease", "AttachOutput"):
            answer = nobody.ask("unary", guarded.door, verb, {"lease_id": started.lease_id})
            assert answer == {"code": "NOT_FOUND", "reason": "NO_LEASE"}
        listed = nobody.ask("list", guarded.door)
        assert "/ci" in listed and all(name == "/ci" or name.startswith("/ci/") for name in listed)
        assert own.get("/secret").state == cpb.Container.RUNNING
        after = guarded.refusals("client", "PERMISSION_DENIED"), guarded.refusals("client", "NOT_FOUND")
        assert [after[0][0] - before[0][0], after[1][0] - before[1][0]] == [8, 12]
        assert [after[0][1] - before[0][1], after[1][1] - before[1][1]] == [0, 2]
    finally:
        own.destroy("/secret")
    log = guarded.logs()
    assert "refused: door client, PERMISSION_DENIED, client ci, method /tightship.v1.ContainerizerService/Launch" in log
    # An ended one is as hidden.
    for name in ("/secret", started.id):
        assert nobody.ask("unary", guarded.door, "Get", {"name": name})["code"] == "NOT_FOUND"
        assert nobody.ask("unary", guarded.door, "Wait", {"name": name})["code"] == "NOT_FOUND"
        assert nobody.ask("unary", guarded.door, "Remove", {"name": name})["code"] == "NOT_FOUND"
        assert nobody.ask("unary", guarded.door, "Trace", {"name": name})["code"] == "NOT_FOUND"
    assert own.get(started.id).state == cpb.Container.ENDED


def test_the_verbs_of_owners_are_not_for_clients(guarded: Guarded, nobody: Stranger) -> None:
    denied = {"code": "PERMISSION_DENIED", "reason": "METHOD_NOT_ALLOWED"}
    for verb in ("Audit", "Acquire", "Renew", "Release", "Revoke", "Forget", "AuditStreams"):
        assert nobody.ask("unary", guarded.door, verb, {}) == denied, verb
    assert nobody.ask("unary", guarded.door, "Cleanup", {"all": True}) == {
        "code": "PERMISSION_DENIED", "reason": "ALL_NOT_ALLOWED",
    }  # fmt: skip


def test_a_request_id_of_another_client_is_joined_by_nobody(guarded: Guarded, nobody: Stranger) -> None:
    launching = guarded.pair.calls.launch(["/bin/sleep", "100"], request_id="shared-id")
    launching.started()
    try:
        answer = nobody.ask("run", guarded.door, ["/bin/sleep", "100"], "", "shared-id")
        assert answer == {"code": "ALREADY_EXISTS", "reason": "REQUEST_ID_REUSED"}
    finally:
        launching.cancel()


def test_living_containers_of_a_client_are_bounded_over_a_restart(guarded: Guarded, nobody: Stranger) -> None:
    pair = guarded.pair
    for index in range(3):
        assert nobody.ask("create", guarded.door, f"/ci/c{index}") == {"name": f"/ci/c{index}"}
    over = {"code": "RESOURCE_EXHAUSTED", "reason": "LAUNCHES_MAX"}
    assert nobody.ask("create", guarded.door, "/ci/c3") == over
    assert nobody.ask("run", guarded.door, ["/bin/true"], "") == over
    pair.kill("containerizer")
    pair.await_ready()
    assert nobody.ask("create", guarded.door, "/ci/c3") == over
    assert pair.calls.run(["/bin/true"], "/ci/others").code == 0  # not its own
    pair.calls.destroy("/ci/c0")
    assert nobody.ask("create", guarded.door, "/ci/c3") == {"name": "/ci/c3"}
    for index in (1, 2, 3):
        pair.calls.destroy(f"/ci/c{index}")


def test_open_calls_of_a_client_are_bounded(guarded: Guarded, nobody: Stranger) -> None:
    assert nobody.ask("watches", guarded.door, 12) == {"open": 8, "RESOURCE_EXHAUSTED": 4}
    until(lambda: "stdout" in nobody.ask("run", guarded.door, ["/bin/true"], ""), "the places are given back")


# By TCP


def test_a_certificate_is_a_client(guarded: Guarded, far: Calls) -> None:
    log_takes_lines()
    result = far.run(["/bin/sh", "-c", "cat; echo err >&2; exit 3"], "/far/x", input=b"x" * 1_000_000)
    assert (result.code, len(result.stdout), result.stderr) == (3, 1_000_000, b"err\n")
    assert result.started.node == "node-7"
    assert far.get("/far/x").node == "node-7"
    with pytest.raises(grpc.RpcError) as caught:
        far.run(["/bin/true"], "/ci/x")
    assert code(caught.value) is grpc.StatusCode.PERMISSION_DENIED
    assert "refused: door tls, PERMISSION_DENIED, client far" in guarded.logs()


def test_a_cut_connection_cancels_and_cleans_up(guarded: Guarded) -> None:
    name = fresh_name("/far/cut")[1:].replace("//", "/")
    for calls in guarded.calls(guarded.far):
        calls.launch(["/bin/sleep", "100"], name).started()
    until(lambda: name not in guarded.pair.calls.living(), "the container is gone")
    assert guarded.pair.calls.get(name).record.cancel_reason == "client_cancelled"


@pytest.mark.parametrize("kind", ["none", "wrong authority", "expired"])
def test_without_a_good_certificate_no_call_comes_in(guarded: Guarded, tmp_path: Path, kind: str) -> None:
    identities = {
        "none": None,
        "wrong authority": Authority(tmp_path).issue("far", uri="spiffe://tests/far"),
        "expired": guarded.authority.issue("old", uri="spiffe://tests/far", days=-1),
    }
    log_takes_lines()
    before = guarded.refusals("tls", "UNAUTHENTICATED")
    for calls in guarded.calls(identities[kind]):
        for call in (lambda: calls.containerizer.List(cpb.ListRequest(), timeout=10), calls.leases):  # noqa: B023
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert code(caught.value) is grpc.StatusCode.UNAVAILABLE
    after = guarded.refusals("tls", "UNAUTHENTICATED")
    assert all(now > then for now, then in zip(after, before, strict=True)), (before, after)
    assert guarded.logs().count("refused: door tls, UNAUTHENTICATED") >= 2


def test_a_certificate_of_nobody_is_told_so(guarded: Guarded) -> None:
    log_takes_lines()
    for calls in guarded.calls(guarded.authority.issue("who", uri="spiffe://tests/who")):
        with pytest.raises(grpc.RpcError) as caught:
            calls.run(["/bin/true"], "/far/x")
        assert code(caught.value) is grpc.StatusCode.UNAUTHENTICATED
        assert info(caught.value).reason == "UNKNOWN_CERTIFICATE"
    assert "spiffe://tests/who" in guarded.logs()


def test_a_client_is_added_and_taken_out_by_sighup(guarded: Guarded) -> None:
    pair = guarded.pair
    who = guarded.authority.issue("guest", uri="spiffe://tests/guest")
    guarded.clients.write_text(
        CLIENTS + '[[client]]\nname = "guest"\ncertificate = "spiffe://tests/guest"\nprefixes = ["/far"]\n'
    )
    hang_up(pair)
    for calls in guarded.calls(who):
        until(lambda: listed(calls) is None, "the guest is let in")  # noqa: B023
    guarded.clients.write_text("[[client]]\nname = 1\n")
    hang_up(pair)
    until(lambda: guarded.logs().count("what was is still in force") >= 2, "both have logged it")
    for calls in guarded.calls(who):
        assert listed(calls) is None
    guarded.clients.write_text(CLIENTS)
    hang_up(pair)
    for calls in guarded.calls(who):
        until(lambda: listed(calls) is grpc.StatusCode.UNAUTHENTICATED, "the guest is out")  # noqa: B023


def test_another_certificate_for_a_client_ends_the_connections_of_the_one_before(guarded: Guarded) -> None:
    pair = guarded.pair
    entry = '[[client]]\nname = "guest"\ncertificate = "spiffe://tests/{}"\nprefixes = ["/far"]\n'
    old = guarded.authority.issue("guest", uri="spiffe://tests/guest")
    new = guarded.authority.issue("guest2", uri="spiffe://tests/guest2")
    guarded.clients.write_text(CLIENTS + entry.format("guest"))
    hang_up(pair)
    try:
        for before in guarded.calls(old):
            until(lambda: listed(before) is None, "the old certificate is let in")  # noqa: B023
            for after in guarded.calls(new):
                assert listed(after) is grpc.StatusCode.UNAUTHENTICATED
                guarded.clients.write_text(CLIENTS + entry.format("guest2"))
                hang_up(pair)
                refused = grpc.StatusCode.UNAUTHENTICATED
                until(lambda: listed(before) is refused, "the old one is out, on the connection that it had")  # noqa: B023
                until(lambda: listed(after) is None, "the new one is in, on the connection that it had")  # noqa: B023
    finally:
        guarded.clients.write_text(CLIENTS)
        hang_up(pair)


def test_an_authority_that_is_trusted_no_more_takes_its_connections_along(guarded: Guarded, tmp_path: Path) -> None:
    log_takes_lines()
    pair = guarded.pair
    trusted = guarded.authority.path.read_bytes()
    other = Authority(tmp_path, "other")
    try:
        for before in guarded.calls(guarded.far):
            assert listed(before) is None
            guarded.authority.path.write_bytes(trusted + other.path.read_bytes())
            hang_up(pair)
            until(lambda: guarded.logs().count("reload: 2 clients") >= 2, "both have read it again")
            assert listed(before) is None
            guarded.authority.path.write_bytes(other.path.read_bytes())
            hang_up(pair)
            until(lambda: listed(before) is grpc.StatusCode.UNAVAILABLE, "its connection has ended")  # noqa: B023
            until(lambda: listed(before) and "unable to get local issuer" in guarded.logs(), "the log says why")  # noqa: B023
    finally:
        guarded.authority.path.write_bytes(trusted)
        hang_up(pair)
    for after in guarded.calls(guarded.far):
        until(lambda: listed(after) is None, "it is trusted again")  # noqa: B023


def test_records_of_others_on_its_names_a_client_can_not_forget(guarded: Guarded, nobody: Stranger) -> None:
    denied = {"code": "PERMISSION_DENIED", "reason": "MADE_BY_ANOTHER"}
    theirs = guarded.pair.calls.run(["/bin/true"], "/ci/both")
    for name in ("/ci/both", theirs.started.id):
        assert nobody.ask("unary", guarded.door, "Remove", {"name": name}) == denied
    own = nobody.ask("run", guarded.door, ["/bin/true"], "/ci/both")
    assert "code" not in own
    # Of a name with records of both, its own go.
    assert "code" not in nobody.ask("unary", guarded.door, "Remove", {"name": "/ci/both"})
    assert nobody.ask("unary", guarded.door, "Remove", {"name": "/ci/both"}) == denied
    assert guarded.pair.calls.get(theirs.started.id).state == cpb.Container.ENDED
    assert guarded.pair.calls.containerizer.Remove(cpb.RemoveRequest(name="/ci/both"), timeout=10).records == 1


def test_what_others_made_on_its_names_a_client_can_not_end(guarded: Guarded, nobody: Stranger) -> None:
    denied = {"code": "PERMISSION_DENIED", "reason": "MADE_BY_ANOTHER"}
    for verb, more in (("Destroy", {"force": True}), ("Cleanup", {})):
        assert nobody.ask("unary", guarded.door, verb, {"name": "/ci", **more}) == denied
    assert guarded.pair.calls.get("/ci").state == cpb.Container.CREATED
    assert nobody.ask("create", guarded.door, "/ci/own") == {"name": "/ci/own"}
    theirs = guarded.pair.calls.detach(["/bin/sleep", "100"], "/ci/own/theirs")
    for verb, request in (
        ("Kill", {"name": "/ci/own/theirs"}),
        ("Kill", {"name": theirs.id}),
        ("Destroy", {"name": "/ci/own/theirs", "force": True}),
        ("Destroy", {"name": "/ci/own", "force": True}),  # and so what is below
        ("Cleanup", {"name": "/ci/own"}),
    ):
        assert nobody.ask("unary", guarded.door, verb, request) == denied, (verb, request)
    assert guarded.pair.calls.get("/ci/own/theirs").state == cpb.Container.RUNNING
    guarded.pair.calls.destroy("/ci/own/theirs")
    assert "code" not in nobody.ask("unary", guarded.door, "Destroy", {"name": "/ci/own"})


def test_in_what_others_made_a_client_runs_nothing(guarded: Guarded, nobody: Stranger) -> None:
    denied = {"code": "PERMISSION_DENIED", "reason": "MADE_BY_ANOTHER"}
    guarded.pair.calls.detach(["/bin/sleep", "100"], "/ci/theirs", "virtual_host { }")
    try:
        assert nobody.ask("run", guarded.door, ["/bin/true"], "/ci/theirs/below") == denied
        for verb, more in (("Pause", {}), ("Resume", {}), ("KillAll", {}), ("Update", {"mode": 2})):
            assert nobody.ask("unary", guarded.door, verb, {"name": "/ci/theirs", **more}) == denied, verb
        for verb in ("Pause", "Resume", "KillAll", "Stats", "ListProcesses"):
            hidden = nobody.ask("unary", guarded.door, verb, {"name": "/far"})
            assert hidden == {"code": "NOT_FOUND", "reason": "NOT_FOUND"}, verb
        assert "code" not in nobody.ask("unary", guarded.door, "Stats", {"name": "/ci/theirs"})
        found = nobody.ask("unary", guarded.door, "Detect", {"pid": os.getpid()})
        assert found["code"] == "NOT_FOUND"
    finally:
        guarded.pair.calls.destroy("/ci/theirs")


def test_everything_for_everybody_on_the_host_is_warned_of() -> None:
    pair = Pair()
    loopback = {"TIGHTSHIP_CONTAINERIZER_LISTEN": "127.0.0.1:0", "TIGHTSHIP_INSECURE_LOOPBACK": "1"}
    pair.environment |= loopback
    with pair:
        log = (pair.run_dir / "spawner.log").read_text()
    assert "WARNING" in log
    assert "whoever is on this host may do everything" in log


def hang_up(pair: Pair, *services: Service) -> None:
    for service in services or SERVICES[1:]:
        os.kill(pair.pid(service), signal.SIGHUP)  # the test's own pair


def listed(calls: Calls) -> grpc.StatusCode | None:
    try:
        calls.containerizer.List(cpb.ListRequest(), timeout=10)
    except grpc.RpcError as error:
        return code(error)
    return None


def test_the_command_line_goes_through_either_door(guarded: Guarded) -> None:
    by_socket = guarded.pair.command("run", "--run-dir", guarded.door, "/ci/cli", "--", "/bin/echo", "by socket")
    assert (by_socket.returncode, by_socket.stdout) == (0, "by socket\n"), by_socket.stderr
    environment = {
        "TIGHTSHIP_CONTAINERIZER": guarded.address("containerizer"),
        "TIGHTSHIP_SWITCHBOARD": guarded.address("switchboard"),
        "TIGHTSHIP_TLS_CA": str(guarded.authority.path),
        "TIGHTSHIP_TLS_CERT": str(guarded.far.certificate),
        "TIGHTSHIP_TLS_KEY": str(guarded.far.key),
    }
    by_tls = tightship(environment, "run", "/far/cli", "--", "/bin/echo", "by TLS")
    assert (by_tls.returncode, by_tls.stdout) == (0, "by TLS\n"), by_tls.stderr
    refused = tightship(environment, "run", "/ci/cli", "--", "/bin/true")
    assert refused.returncode == 125 and "PERMISSION_DENIED" in refused.stderr
    bare = tightship({**environment, "TIGHTSHIP_TLS_KEY": ""}, "list")
    assert bare.returncode == 9 and "TIGHTSHIP_TLS_KEY" in bare.stderr


def tightship(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TIGHTSHIP_")}
    return subprocess.run(
        [Path(sys.executable).with_name("tightship"), *arguments],
        capture_output=True, text=True, timeout=60, check=False, env=clean | environment,
    )  # fmt: skip


# Settings


@pytest.mark.parametrize("service", ["containerizer", "switchboard"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--listen", "127.0.0.1:0"], ["--listen 127.0.0.1:0", "--tls-cert"]),
        (["--listen", "0.0.0.0:0", "--insecure-loopback"], ["0.0.0.0:0", "loopback"]),
        (["--listen", "nothing"], ["--listen nothing"]),
        (["--clients", "{dir}/missing.toml"], ["missing.toml", "No such file"]),
        (["--clients", "{dir}/bad.toml"], ["bad.toml", "client[0].colour"]),
        (["--group", "no-such-group"], ["--group no-such-group"]),
        (["--metrics", "everywhere"], ["--metrics", "'everywhere'"]),
        (["--log-level", "loud"], ["--log-level", "'loud'"]),
        (["--retention-age", "long"], ["--retention-age", "'long'"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_a_bad_setting_is_named_and_not_tried_again(
    tmp_path: Path, service: str, options: list[str], told: list[str]
) -> None:
    (tmp_path / "bad.toml").write_text('[[client]]\nname = "x"\ncolour = 1\n')
    done = subprocess.run(
        [
            sys.executable, "-m", f"tightship.{service}", "--run-dir", str(tmp_path / "run"),
            *(option.format(dir=tmp_path) for option in options),
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 78, done.stderr
    for part in told:
        assert part in done.stderr
    assert "Traceback" not in done.stderr


# Limits and secrets


def test_a_message_over_the_limit_is_refused_and_the_service_goes_on(own_pair: Pair) -> None:
    for service, method in (
        ("containerizer", "/tightship.v1.ContainerizerService/List"),
        ("switchboard", "/tightship.v1.SwitchboardService/ListLeases"),
    ):
        call: Any = own_pair.channel(service).unary_unary(method)  # type: ignore[arg-type]
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\x0a" + bytes((16 << 20) + 1), timeout=20)
        assert code(caught.value) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert own_pair.calls.run(["/bin/true"]).code == 0


def test_no_token_is_in_any_log(guarded: Guarded) -> None:
    pair = guarded.pair
    token = secrets.token_bytes(32)
    request = spb.AcquireRequest(lease_id="told", owner="test", token=token)
    acquired = pair.calls.switchboard.Acquire(request, timeout=10)
    assert acquired.token == token
    for again in (
        request,
        spb.AcquireRequest(lease_id="told", owner="test", token=token[::-1]),
        spb.AcquireRequest(lease_id="other", owner="test", token=token),
        spb.AcquireRequest(lease_id="short", owner="test", token=token[:16]),
    ):
        try:
            pair.calls.switchboard.Acquire(again, timeout=10)
        except grpc.RpcError as error:
            assert not leaks(token, str(error))
    claim_badly(pair.run_dir / "fd.sock", token)
    pair.calls.switchboard.Revoke(spb.RevokeRequest(lease_id="told"), timeout=10)
    for _ in range(3):
        pair.calls.run(["/bin/echo", "hi"])
    with pytest.raises(grpc.RpcError):
        pair.calls.run(["/no/such/program"])
    launching = pair.calls.launch(["/bin/sleep", "100"])
    launching.started()
    pair.kill("switchboard")
    launching.cancel()
    pair.await_ready()
    time.sleep(0.1)
    log = guarded.logs()
    assert not leaks(token, log)
    # Those of launches nobody but the pair knows; as 32 bytes they would be one of these.
    assert not re.search(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", log)
    assert not re.search(r"(\\x[0-9a-f]{2}.{0,3}){8}", log)
    for path in pair.run_dir.glob("journal-*"):
        assert token not in path.read_bytes()
    for path in (pair.run_dir / "logs").glob("leases.db*"):
        assert token not in path.read_bytes()


def claim_badly(path: Path, token: bytes) -> None:
    """A CLAIM that is refused, and a frame that ends the connection."""
    import socket

    from tightship.kernel import fdframes

    for frame in (fdframes.claim(2, token[::-1], ""), fdframes.letgo(3, token)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(10)
            sock.connect(os.fspath(path))
            sock.send(fdframes.hello(1).encode())
            sock.recv(2048)
            sock.send(frame.encode())
            sock.recv(2048)
            sock.send(b"junk" + token)


def leaks(token: bytes, text: str) -> bool:
    forms = (token.hex(), base64.b64encode(token).decode().rstrip("="), repr(token)[2:-1], str(list(token))[1:-1])
    return any(form[:32] in text for form in forms)


# The rest of the pair beside doors


def test_the_audit_knows_the_doors_descriptors(guarded: Guarded, far: Calls, nobody: Stranger) -> None:
    launching = far.launch(["/bin/sleep", "100"], "/far/audited")
    started = launching.started()
    nobody.ask("list", guarded.door)
    found = guarded.pair.calls.containerizer.Audit(cpb.AuditRequest(), timeout=30)
    assert not found.findings
    assert far.get(started.id).state == cpb.Container.RUNNING
    launching.cancel()


def test_an_embedded_pair_takes_no_doors_of_another() -> None:
    done = tightship(
        {"TIGHTSHIP_RUN_DIR": "/tmp/no-such-run-dir", "TIGHTSHIP_CONTAINERIZER_LISTEN": "0.0.0.0:1",
         "TIGHTSHIP_CLIENTS": "/no/such/file", "TIGHTSHIP_GROUP": "no-such-group"},
        "run", "--", "/bin/echo", "alone",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alone\n"), done.stderr


def test_up_passes_the_settings_on_and_tells_what_is_wrong(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as directory:
        run_dir = f"{directory}/r"
        (tmp_path / "clients.toml").write_text("[[client]]\nname = 1\n")
        environment = {"TIGHTSHIP_RUN_DIR": run_dir, "TIGHTSHIP_CLIENTS": str(tmp_path / "clients.toml")}
        wrong = tightship(environment, "up", "-d")
        assert wrong.returncode == 14 and "client[0].name" in wrong.stderr, wrong.stderr
        (tmp_path / "clients.toml").write_text(CLIENTS)
        up = tightship(environment, "up", "-d")
        try:
            assert up.returncode == 0, up.stderr
            assert Path(run_dir, "clients/ci/switchboard.sock").is_socket()
        finally:
            tightship(environment, "down")
