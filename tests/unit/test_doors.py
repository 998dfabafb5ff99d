"""Doors with a real server behind them: who comes in by which, what is refused and counted, what a reload changes."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.harness.authority import Authority, Identity
from tightship.common import acl, refused, rights
from tightship.common.clients import ConfigError, load
from tightship.common.doors import Address, Doors, DoorSettings
from tightship.common.errors import Code, ServiceError
from tightship.common.rundir import RunDir
from tightship.common.serving import Serving

SERVICE = "tightship.test"


@pytest.fixture
def base() -> Iterator[Path]:
    """Short: a Unix socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[str, str]]]:
    monkeypatch.setattr(refused._Lines, "second", 0)  # the lines of a test before are not this one's
    refused.counts.clear()
    yield refused.counts
    refused.counts.clear()


class Rig:
    """A service whose methods tell the client they see; `Watch` goes on until it is cancelled."""

    def __init__(self, base: Path, settings: DoorSettings) -> None:
        self.run = RunDir.open(base / "r")
        self.serving = Serving(self.run.path / "test.sock")
        self.watching = asyncio.Event()
        self.doors = Doors(self.serving, self.run, "test", settings)
        self.serving.add(self._register, self, frozenset({"Open", "Watch"}))

    def _register(self, _servicer: object, registrar: Any) -> None:
        async def tell(_request: bytes, _context: Any) -> bytes:
            return rights.current().client.encode()

        async def watch(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
            yield rights.current().client.encode()
            self.watching.set()
            await asyncio.sleep(60)

        made: Any = grpc.unary_unary_rpc_method_handler(tell, lambda data: data)
        streaming: Any = grpc.unary_stream_rpc_method_handler(watch, lambda data: data)
        registrar.add_registered_method_handlers(SERVICE, {"Open": made, "Closed": made, "Watch": streaming})

    @property
    def tls(self) -> str:
        return f"127.0.0.1:{self.doors.listeners[0].port}"


@asynccontextmanager
async def serving(base: Path, **settings: Any) -> AsyncIterator[Rig]:
    rig = Rig(base, DoorSettings(**settings))
    await rig.doors.open()
    await rig.serving.ready()
    try:
        yield rig
    finally:
        await rig.doors.close(0.1)


async def call(channel: grpc.aio.Channel, method: str = "Open") -> str:
    """What the method says, or the code."""
    async with channel:
        try:
            method_of: Any = channel.unary_unary(f"/{SERVICE}/{method}")
            answer: bytes = await method_of(b"", timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return answer.decode()


def watching(channel: grpc.aio.Channel) -> Any:
    method: Any = channel.unary_stream(f"/{SERVICE}/Watch")
    return method(b"")


def by_socket(path: Path) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"unix:{path}", options=(("grpc.use_local_subchannel_pool", 1),))


def by_tls(address: str, authority: Authority, identity: Identity | None) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(
        authority.path.read_bytes(),
        identity.key.read_bytes() if identity else None,
        identity.certificate.read_bytes() if identity else None,
    )
    return grpc.aio.secure_channel(address, credentials, options=(("grpc.use_local_subchannel_pool", 1),))


def clients_file(base: Path, text: str) -> Path:
    path = base / "clients.toml"
    path.write_text(text)
    return path


CI = '[[client]]\nname = "ci"\nuid = 4242\nprefixes = ["/ci"]\n'
FAR = '[[client]]\nname = "far"\ncertificate = "spiffe://here/far"\nprefixes = ["/far"]\n'
NEAR = '[[client]]\nname = "near"\ncertificate = "near.example"\nprefixes = ["/"]\n'


@pytest.fixture
def authority(base: Path) -> Authority:
    return Authority(base)


@pytest.fixture
def tls(base: Path, authority: Authority) -> dict[str, Any]:
    server = authority.issue("server", ip="127.0.0.1")
    return {
        "listen": (Address("127.0.0.1", 0),),
        "tls_cert": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": authority.path,
        "clients": clients_file(base, FAR + NEAR),
    }


async def test_the_main_door_has_all_rights_and_no_interceptor(base: Path, counts: Counter[tuple[str, str]]) -> None:
    async with serving(base) as rig:
        assert await call(by_socket(rig.serving.path), "Closed") == ""
        assert rights.current() is rights.ALL
    assert not counts


async def test_a_clients_door_tells_who_it_is_and_refuses_what_is_not_shared(
    base: Path, counts: Counter[tuple[str, str]]
) -> None:
    async with serving(base, clients=clients_file(base, CI)) as rig:
        path = rig.run.door("ci", "test")
        assert await call(by_socket(path)) == "ci"
        assert await call(by_socket(path), "Closed") == "PERMISSION_DENIED"
        async with by_socket(path) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"", timeout=10) == b"\x08\x01"
    assert counts == {("client", "PERMISSION_DENIED"): 1}
    assert not path.exists()


async def test_calls_over_a_clients_limit_are_refused_until_one_ends(
    base: Path, counts: Counter[tuple[str, str]]
) -> None:
    async with serving(base, clients=clients_file(base, CI + "calls_max = 2\n")) as rig:
        path = rig.run.door("ci", "test")
        async with by_socket(path) as channel:
            watches = [watching(channel) for _ in range(2)]
            for watch in watches:
                assert await watch.read() == b"ci"
            assert await call(by_socket(path)) == "RESOURCE_EXHAUSTED"
            watches[0].cancel()
            for _ in range(500):
                if await call(by_socket(path)) == "ci":
                    break
                await asyncio.sleep(0.01)
            else:
                pytest.fail("the place of a cancelled call was not given back")
            watches[1].cancel()
        door = next(iter(rig.doors.by_client.values()))
        for _ in range(500):
            if not door.rights.calls:
                break
            await asyncio.sleep(0.01)
        assert door.rights.calls == 0
    assert counts["client", "RESOURCE_EXHAUSTED"] >= 1


async def test_a_certificate_leads_to_its_client(base: Path, authority: Authority, tls: dict[str, Any]) -> None:
    far = authority.issue("anything", uri="spiffe://here/far")
    near = authority.issue("whatever", dns="near.example")
    async with serving(base, **tls) as rig:
        assert await call(by_tls(rig.tls, authority, far)) == "far"
        assert await call(by_tls(rig.tls, authority, far), "Closed") == "PERMISSION_DENIED"
        assert await call(by_tls(rig.tls, authority, near), "Closed") == "near"


async def test_the_common_name_counts_only_without_another(
    base: Path, authority: Authority, tls: dict[str, Any]
) -> None:
    async with serving(base, **tls) as rig:
        assert await call(by_tls(rig.tls, authority, authority.issue("near.example"))) == "near"
        pretender = authority.issue("near.example", dns="other.example")
        assert await call(by_tls(rig.tls, authority, pretender)) == "UNAUTHENTICATED"


async def test_without_a_known_certificate_nobody_comes_in(
    base: Path,
    authority: Authority,
    tls: dict[str, Any],
    counts: Counter[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = Authority(base, "other")
    async with serving(base, **tls) as rig:
        assert await call(by_tls(rig.tls, authority, None)) == "UNAVAILABLE"
        assert counts["tls", "UNAUTHENTICATED"] >= 1  # gRPC may have tried more than once
        assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in caplog.text

        counts.clear()
        assert await call(by_tls(rig.tls, authority, other.issue("near.example"))) == "UNAVAILABLE"
        assert counts["tls", "UNAUTHENTICATED"] >= 1
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text

        counts.clear()
        assert await call(by_tls(rig.tls, authority, authority.issue("near.example", days=-1))) == "UNAVAILABLE"
        assert counts["tls", "UNAUTHENTICATED"] >= 1

        counts.clear()
        stranger = authority.issue("stranger", dns="stranger.example")
        assert await call(by_tls(rig.tls, authority, stranger)) == "UNAUTHENTICATED"
        assert counts == {("tls", "UNAUTHENTICATED"): 1}
        assert "stranger.example" in caplog.text

        counts.clear()
        plain = grpc.aio.insecure_channel(rig.tls, options=(("grpc.use_local_subchannel_pool", 1),))
        assert await call(plain) == "UNAVAILABLE"
        assert counts["tls", "UNAUTHENTICATED"] >= 1


async def test_a_flood_of_strangers_fills_no_log(
    base: Path, tls: dict[str, Any], counts: Counter[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(base, **tls) as rig:
        host, _, port = rig.tls.rpartition(":")

        async def knock() -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()

        for _ in range(10):
            await asyncio.gather(*(knock() for _ in range(20)), return_exceptions=True)
    assert counts["tls", "UNAUTHENTICATED"] == 200
    assert sum("refused" in line for line in caplog.messages) < 100


async def test_a_silent_connection_is_ended_and_takes_no_place(
    base: Path, tls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightship.common.tls.HANDSHAKE_S", 0.2)
    async with serving(base, **tls) as rig:
        host, _, port = rig.tls.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_loopback_without_tls(
    base: Path, counts: Counter[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    text = '[[client]]\nname = "loopback"\nprefixes = ["/l"]\n'
    address = (Address("127.0.0.1", port),)
    async with serving(base, listen=address, insecure_loopback=True) as rig:
        assert await call(grpc.aio.insecure_channel(f"127.0.0.1:{port}"), "Closed") == ""
        assert rig.serving.path.exists()
        assert "may do everything" in caplog.text
    path = clients_file(base, text)
    caplog.clear()
    async with serving(base, listen=address, insecure_loopback=True, clients=path) as rig:
        assert await call(grpc.aio.insecure_channel(f"127.0.0.1:{port}"), "Closed") == "PERMISSION_DENIED"
        assert "may do everything" not in caplog.text
        path.write_text("")
        await reloaded(rig)
        assert "may do everything" in caplog.text
    assert counts == {("loopback", "PERMISSION_DENIED"): 1}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"listen": (Address("127.0.0.1", 1),)}, "--tls-cert, --tls-key, --tls-client-ca, --clients"),
        ({"listen": (Address("0.0.0.0", 1),), "insecure_loopback": True}, "0.0.0.0:1"),
        ({"listen": (Address("localhost", 1),), "insecure_loopback": True}, "localhost:1"),
        ({"listen": (Address("::", 1),), "insecure_loopback": True}, r"\[::\]:1"),
    ],
)
def test_tcp_is_refused_without_what_makes_it_safe(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DoorSettings(**settings).check()


async def test_bad_tls_files_are_named(base: Path, tls: dict[str, Any]) -> None:
    (base / "junk").write_text("junk")
    for option in ("tls_cert", "tls_key", "tls_client_ca"):
        for path in (base / "missing", base / "junk"):
            with pytest.raises(ConfigError, match=path.name):
                async with serving(base, **{**tls, option: path}):
                    pass


async def test_a_reload_opens_changes_and_ends_doors(base: Path) -> None:
    path = clients_file(base, CI)
    async with serving(base, clients=path) as rig:
        ci, new = rig.run.door("ci", "test"), rig.run.door("new", "test")
        async with by_socket(ci) as channel:
            watch = watching(channel)
            assert await watch.read() == b"ci"

            path.write_text(CI.replace('"/ci"', '"/"') + CI.replace('"ci"', '"new"'))
            await reloaded(rig)
            assert await call(by_socket(ci), "Closed") == "ci"  # the new rights
            assert await call(by_socket(new)) == "new"
            assert not watch.done()  # the door has stayed

            path.write_text(CI.replace('"ci"', '"new"'))
            await reloaded(rig)
            assert not ci.exists()
            with pytest.raises(grpc.aio.AioRpcError):
                while await watch.read() is not grpc.aio.EOF:
                    pass
            assert await call(by_socket(new)) == "new"


async def test_a_bad_reload_changes_nothing(
    base: Path, authority: Authority, tls: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    near = authority.issue("near", dns="near.example")
    async with serving(base, **tls) as rig:
        tls["clients"].write_text(NEAR + "colour = 1\n")
        await reloaded(rig)
        assert "client[0].colour" in caplog.text
        assert await call(by_tls(rig.tls, authority, near)) == "near"
        tls["clients"].write_text(NEAR)
        tls["tls_cert"].write_text("junk")
        await reloaded(rig)
        assert await call(by_tls(rig.tls, authority, near)) == "near"


async def test_a_reload_takes_new_certificates(base: Path, tls: dict[str, Any]) -> None:
    other = Authority(base, "other")
    mine = other.issue("near", dns="near.example")
    async with serving(base, **tls) as rig:
        server = other.issue("server", ip="127.0.0.1")
        assert server.certificate == tls["tls_cert"]
        tls["tls_client_ca"].write_bytes(other.path.read_bytes())
        assert await call(by_tls(rig.tls, other, mine)) == "UNAVAILABLE"
        await reloaded(rig)
        assert await call(by_tls(rig.tls, other, mine)) == "near"


async def test_a_reload_ends_connections_that_lead_elsewhere_by_now(
    base: Path, authority: Authority, tls: dict[str, Any]
) -> None:
    far, near = authority.issue("far", uri="spiffe://here/far"), authority.issue("near", dns="near.example")
    tls["clients"].write_text(FAR + NEAR)
    async with serving(base, **tls) as rig, by_tls(rig.tls, authority, far) as channel:
        async with by_tls(rig.tls, authority, near) as other:
            old, stays = watching(channel), watching(other)
            assert [await old.read(), await stays.read()] == [b"far", b"near"]
            tls["clients"].write_text(FAR.replace("here/far", "here/other") + NEAR)
            await reloaded(rig)
            with pytest.raises(grpc.aio.AioRpcError):
                assert await asyncio.wait_for(old.read(), 10) is grpc.aio.EOF
                raise AssertionError("ended without an error")
            assert not stays.done()
            assert await asked(channel) == "UNAUTHENTICATED"  # by a connection to the door of strangers
            tls["clients"].write_text(FAR + NEAR)
            await reloaded(rig)
            assert await asked(channel) == "far"  # the same channel is let in
            assert not stays.done()


async def asked(channel: grpc.aio.Channel) -> str:
    """As `call`, over a channel that stays, and may not know yet that its connection has ended."""
    method: Any = channel.unary_unary(f"/{SERVICE}/Open")
    async with asyncio.timeout(20):
        while True:
            try:
                answer: bytes = await method(b"", wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    return error.code().name
                await asyncio.sleep(0.05)
            else:
                return answer.decode()


async def reloaded(rig: Rig) -> None:
    rig.doors.reload()
    assert rig.doors.reloading is not None
    await asyncio.wait_for(asyncio.shield(rig.doors.reloading), 10)


async def test_what_a_killed_one_has_left_is_removed(base: Path) -> None:
    run = RunDir.open(base / "r")
    old = run.door("old", "test")
    old.parent.mkdir(parents=True)
    with closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(str(old))
    async with serving(base, clients=clients_file(base, CI)) as rig:
        assert not old.exists()
        assert rig.run.door("ci", "test").exists()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("x = 1", "x"),
        ("client = 1", "client"),
        ("[[client]]", r"client\[0\].name"),
        (CI + "colour = 1", r"client\[0\].colour"),
        (CI.replace("ci", "../ci"), r"client\[0\].name"),
        (CI.replace("4242", "-1"), r"client\[0\].uid"),
        (CI.replace("4242", "true"), r"client\[0\].uid"),
        (CI + 'certificate = "x"', r"client\[0\].uid"),
        (CI.replace("uid = 4242", ""), r"client\[0\].uid"),
        (CI.replace('["/ci"]', "[]"), r"client\[0\].prefixes"),
        (CI.replace('["/ci"]', '"/ci"'), r"client\[0\].prefixes"),
        (CI.replace('"/ci"', '"ci"'), r"client\[0\].prefixes\[0\]"),
        (CI.replace('"/ci"', '"/ci", "/a/../b"'), r"client\[0\].prefixes\[1\]"),
        (CI.replace('"/ci"', '"/ci/"'), r"client\[0\].prefixes\[0\]"),
        (CI + "launches_max = 0", r"client\[0\].launches_max"),
        (CI + "calls_max = 1.5", r"client\[0\].calls_max"),
        (CI + 'run_as = ""', r"client\[0\].run_as"),
        (CI + "run_as = -1", r"client\[0\].run_as"),
        (CI + "run_as = 4294967295", r"client\[0\].run_as"),
        (CI + "run_as = true", r"client\[0\].run_as"),
        (CI + CI, r"client\[1\].name"),
        (FAR + FAR.replace('"far"', '"two"'), r"client\[1\].certificate"),
        (CI.replace('"ci"', '"loopback"'), r"client\[0\].uid"),
        ("[[client", "end of document"),
    ],
)
def test_the_clients_file_names_file_and_key(base: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"clients\.toml: .*{key}"):
        load(clients_file(base, text))


def test_the_clients_file_must_be_readable_and_ours(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"clients\.toml"):
        load(base / "clients.toml")
    path = clients_file(base, CI)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="everybody may write"):
        load(path)


def test_names_at_or_below_a_prefix(base: Path) -> None:
    (entry,) = load(clients_file(base, CI))
    mine = rights.Rights("client", entry)
    assert [name for name in ("/", "/c", "/ci", "/ci/x", "/ci/x/y", "/cix", "/ci2/x", "") if mine.sees(name)] == [
        "/ci",
        "/ci/x",
        "/ci/x/y",
    ]
    assert not mine.whole and mine.home == "/ci"
    assert rights.ALL.sees("/anything") and rights.ALL.whole


def test_a_refusal_is_counted_with_door_and_code(base: Path, counts: Counter[tuple[str, str]]) -> None:
    (entry,) = load(clients_file(base, CI))
    mine = rights.Rights("client", entry)
    with pytest.raises(ServiceError, match="/ci") as caught:
        mine.check("/other")
    assert caught.value.code is Code.PERMISSION_DENIED
    assert mine.hides("/other") and not mine.hides("/ci")
    with pytest.raises(ServiceError, match="limit"):
        mine.check_launches(entry.launches_max)
    mine.check_launches(entry.launches_max - 1)
    assert counts == {
        ("client", "PERMISSION_DENIED"): 1, ("client", "NOT_FOUND"): 1, ("client", "RESOURCE_EXHAUSTED"): 1,
    }  # fmt: skip


def test_an_access_list_keeps_what_is_not_ours(base: Path) -> None:
    directory = base / "d"
    directory.mkdir(0o750)
    acl.set_users(directory, [10, 11], acl.SEARCH)
    acl.set_users(directory, [12], acl.READ_WRITE)
    acl.set_users(directory, [11, 13], acl.SEARCH)
    assert users(directory) == {11: acl.SEARCH, 12: acl.READ_WRITE, 13: acl.SEARCH}
    acl.set_users(directory, [], acl.SEARCH)
    acl.set_users(directory, [], acl.READ_WRITE)
    assert users(directory) == {}
    assert directory.stat().st_mode & 0o777 == 0o750


def users(path: Path) -> dict[int, int]:
    return {uid: permission for tag, permission, uid in acl.read(path) if tag == acl.USER}
