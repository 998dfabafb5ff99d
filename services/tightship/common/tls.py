"""TCP with mutual TLS in front of clients' doors: a certificate says whose door a connection's bytes go to.

The TLS is Python's and not gRPC's, which tells nobody of a handshake that failed, takes no new certificate without a
new server, and bounds no connections. A connection is relayed to the Unix socket of its client, or to that of the
strangers, where calls are answered with UNAUTHENTICATED.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tightship.common import refused
from tightship.common.clients import ConfigError

DOOR = "tls"

CONNECTIONS_MAX = 512
HANDSHAKES_MAX = 64
HANDSHAKE_S = 5.0

_SHUTDOWN_S = 2.0
_BACKLOG = 128
_CHUNK = 64 << 10
# A peer that has gone without a word is known after half a minute.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
_UNSENT_MS = 30_000
_RETRY_S = 0.1
_SHOWN = 200

_log = logging.getLogger(__name__)


def server_context(cert: Path, key: Path, client_ca: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer, a client certificate required, no resumption: each connection shows its own. ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    for path in (cert, key, client_ca):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-client-ca {client_ca}: no certificates in PEM form: {_reason(error)}") from None
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {cert}, --tls-key {key}: no certificate chain in PEM form with its key: {_reason(error)}"
        ) from None
    return context


def names_of(certificate: dict[str, Any] | None) -> tuple[str, ...]:
    """URIs, then DNS names; where a certificate has neither, its common name."""
    found = (certificate or {}).get("subjectAltName", ())
    names = [value for wanted in ("URI", "DNS") for kind, value in found if kind == wanted]
    if not names:
        subject = (certificate or {}).get("subject", ())
        names = [value for part in subject for key, value in part if key == "commonName"]
    return tuple(names)


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError that names the address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise OSError(error.errno, f"--listen {host} port {port}: {error.strerror}") from None
    return listener


class TlsListener:
    """On a listening socket, which it owns. `route` gives the door for a certificate's names."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, route: Callable[[Sequence[str]], Path]
    ) -> None:
        self._context = context
        self._socket = listener
        self._route = route
        # With the names and the door of what is relayed.
        self._connections: dict[asyncio.Task[None], tuple[Sequence[str], Path] | None] = {}
        self._handshakes = 0
        self._accepting = asyncio.create_task(self._accept(), name="tls")

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def reroute(self, route: Callable[[Sequence[str]], Path | None]) -> None:
        """Ends the connections whose names have another door now, or none: their rights are of the old one."""
        for task, relayed in self._connections.items():
            if relayed is not None and route(relayed[0]) != relayed[1]:
                task.cancel()

    def renew(self, context: ssl.SSLContext) -> None:
        """For the next connections. Where an authority is trusted no more all that there are end: nobody tells which of
        them it has vouched for."""
        before, self._context = self._context, context
        if set(before.get_ca_certs(binary_form=True)) - set(context.get_ca_certs(binary_form=True)):
            for task in self._connections:
                task.cancel()

    def stop_accepting(self) -> None:
        self._accepting.cancel()

    async def close(self) -> None:
        """Ends what there is."""
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    _log.warning("%s: can't accept: %s", self.address, error.strerror)
                    await asyncio.sleep(_RETRY_S)
                continue
            if len(self._connections) >= CONNECTIONS_MAX or self._handshakes >= HANDSHAKES_MAX:
                connection.close()
                refused.note(DOOR, "RESOURCE_EXHAUSTED", f"{peer[0]}: too many connections")
                continue
            task = asyncio.create_task(self._serve(connection, str(peer[0])))
            self._connections[task] = None
            task.add_done_callback(self._connections.pop)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        loop = asyncio.get_running_loop()
        _configure(connection)
        reader = asyncio.StreamReader(_CHUNK, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        self._handshakes += 1
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except (OSError, ssl.SSLError) as error:
            refused.note(DOOR, "UNAUTHENTICATED", f"{peer}: no handshake: {_reason(error)}")
            return
        finally:
            self._handshakes -= 1
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            names = names_of(transport.get_extra_info("peercert"))
            path = self._route(names)
            task = asyncio.current_task()
            assert task is not None
            self._connections[task] = (names, path)
            with contextlib.suppress(OSError):
                upstream = await asyncio.open_unix_connection(os.fspath(path), limit=_CHUNK)
                await _relay((reader, writer), upstream)
        finally:
            transport.close()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _relay(one: Stream, other: Stream) -> None:
    """Copies both ways until either side ends; HTTP/2 knows no half-closed connection."""
    copies = [asyncio.create_task(_copy(one[0], other[1])), asyncio.create_task(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        other[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()


def _configure(connection: socket.socket) -> None:
    connection.setblocking(False)
    with contextlib.suppress(OSError):  # gone already
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    """OpenSSL's own words, without file and line of its source."""
    text = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or type(error).__name__
    why = getattr(error, "verify_message", None)
    return (f"{text}: {why}" if why else str(text))[:_SHOWN]
