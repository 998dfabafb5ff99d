"""The doors of a service: its main socket, one socket for each client of the clients file, and TCP.

A client's door is a server of its own whose socket only the client's user can open, or, for a certificate, only we:
then the TLS listener is in front of it. At SIGHUP clients file and certificates are read again; what is wrong then
changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import ssl
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tightship.common import acl, clients, refused, tls
from tightship.common.clients import LOOPBACK, ConfigError, Entry
from tightship.common.rights import Rights
from tightship.common.rundir import RunDir, RunDirError, publishing
from tightship.common.serving import Serving

_WALKABLE = 0o711
# No client's name begins so.
_STRANGERS = ".strangers"
_REMOVED_GRACE_S = 0.5
# Of an unknown certificate, in the log.
_SHOWN_NAMES = 4
_SHOWN = 128

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen by TCP."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """A literal one: a name may mean something else tomorrow."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """`check` says whether they fit together. `group` is a gid."""

    listen: tuple[Address, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    insecure_loopback: bool = False
    clients: Path | None = None
    group: int | None = None

    def check(self) -> None:
        """Raises ConfigError."""
        if not self.listen:
            return
        if self.insecure_loopback:
            for address in self.listen:
                if not address.is_loopback:
                    raise ConfigError(
                        f"--insecure-loopback: {address} is no literal loopback address: use 127.0.0.1 or [::1], or TLS"
                    )
            return
        given = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-client-ca": self.tls_client_ca}
        given["--clients"] = self.clients
        missing = [option for option, value in given.items() if value is None]
        if missing:
            raise ConfigError(
                f"--listen {self.listen[0]} is by TLS with client certificates alone and needs"
                f" {', '.join(missing)} too (or --insecure-loopback, on a loopback address)"
            )

    def entries(self) -> tuple[Entry, ...]:
        """Of the clients file. Raises ConfigError."""
        return clients.load(self.clients) if self.clients is not None else ()


@dataclass(slots=True)
class Door:
    rights: Rights
    server: grpc.aio.Server
    path: Path | None


class Doors:
    """Of `service` (containerizer or switchboard)."""

    def __init__(self, serving: Serving, run: RunDir, service: str, settings: DoorSettings) -> None:
        self._serving = serving
        self._run = run
        self._service = service
        self._settings = settings
        self.by_client: dict[str, Door] = {}
        self._strangers: Path | None = None
        self.listeners: list[tls.TlsListener] = []
        self.reloading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises ConfigError, and OSError for an address in use; then nothing is open."""
        try:
            await self._open()
        except BaseException:
            await self.close(0)
            raise

    async def _open(self) -> None:
        settings = self._settings
        settings.check()
        entries = settings.entries()
        if settings.group is None:
            await self._serving.start()
        else:
            with _config(f"--group: gid {settings.group} for {self._run.path} and the socket in it"):
                if os.stat(self._run.path).st_gid != settings.group:
                    os.chown(self._run.path, -1, settings.group)
                await self._serving.start(gid=settings.group)
        if settings.clients is not None:
            self._remove_stale()
            await self._open_clients(entries)
        if settings.listen:
            await (self._open_loopback(entries) if settings.insecure_loopback else self._open_tls())

    def reload(self) -> None:
        """Reads clients file and certificates again, in a task. What is wrong is logged, and all stays as it was."""
        if self.reloading is None or self.reloading.done():
            self.reloading = asyncio.create_task(self._reload(), name="doors")

    async def close(self, grace: float) -> None:
        """Ends all of them, giving live calls `grace` seconds."""
        if self.reloading is not None:
            self.reloading.cancel()
            await asyncio.wait((self.reloading,))
        for listener in self.listeners:
            listener.stop_accepting()
        for door in self.by_client.values():
            _remove(door.path)
        _remove(self._strangers)
        await self._serving.stop(grace)
        await asyncio.gather(*(listener.close() for listener in self.listeners))

    async def _reload(self) -> None:
        try:
            entries = self._settings.entries()
            context = self._context() if self.listeners else None
            await self._open_clients(entries)
        except (ConfigError, OSError) as error:
            _log.error("reload: %s; what was is still in force", error)
            return
        finally:  # doors may have changed before an error too
            for listener in self.listeners:
                listener.reroute(self._door_of)
        for listener in self.listeners:
            assert context is not None
            listener.renew(context)
        _log.info("reload: %d clients", len(entries))

    # Clients

    async def _open_clients(self, entries: Sequence[Entry]) -> None:
        """Makes the doors those of the entries. Doors that stay get their new rights at once."""
        wanted = {entry.name: entry for entry in entries}
        paths = {name: self._path(name) for name in wanted if name != LOOPBACK}
        self._let_through([entry.uid for entry in entries if entry.uid is not None])
        for name, door in list(self.by_client.items()):
            entry = wanted.get(name)
            if name == LOOPBACK:
                door.rights.entry = entry
                _warn_of_loopback(door.rights)
            elif entry is None or door.rights.entry is None or entry.uid != door.rights.entry.uid:
                _remove(door.path)
                del self.by_client[name]
                await self._serving.shut(door.server, _REMOVED_GRACE_S)
            else:
                door.rights.entry = entry
        for name, path in paths.items():
            if name not in self.by_client:
                entry = wanted[name]
                rights = Rights("client" if entry.uid is not None else tls.DOOR, entry)
                self.by_client[name] = await self._open_socket(path, rights, entry.uid)

    def _path(self, client: str) -> Path:
        """Raises ConfigError."""
        try:
            return self._run.door(client, self._service)
        except RunDirError as error:
            raise ConfigError(str(error)) from None

    async def _open_socket(self, path: Path, rights: Rights, uid: int | None, *, stranger: bool = False) -> Door:
        with _config(f"the door {path}"):
            for directory in (self._run.clients, path.parent):
                self._make_directory(directory)
            server = self._serving.door(rights, stranger=stranger)
            try:
                with publishing(path, 0o600, users=() if uid is None else (uid,)) as hidden:
                    server.add_insecure_port(f"unix:{hidden}")
                    await server.start()
            except BaseException:
                await self._serving.shut(server, 0)
                raise
        return Door(rights, server, path)

    def _make_directory(self, path: Path) -> None:
        """To be walked through by whoever got past the run directory, and written by whoever writes that."""
        above = os.stat(self._run.path)
        try:
            path.mkdir(_WALKABLE)
        except FileExistsError:
            return
        if (above.st_uid, above.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(path, above.st_uid if os.geteuid() == 0 else -1, above.st_gid)
        os.chmod(path, _WALKABLE | (above.st_mode & stat.S_IWGRP))

    def _let_through(self, uids: Sequence[int]) -> None:
        """The run directory is closed to others: these users may walk through it, and see nothing of it."""
        try:
            acl.set_users(self._run.path, uids, acl.SEARCH)
        except PermissionError:
            _log.warning("%s is another user's, who has to let uids %s through", self._run.path, list(uids))
        except OSError as error:
            if uids:
                raise ConfigError(f"run directory {self._run.path}: no access list: {error.strerror}") from None

    def _remove_stale(self) -> None:
        """Sockets that one before us has left, who was killed."""
        for path in self._run.clients.glob(f"*/{self._service}.sock*"):
            _remove(path)

    # TCP

    async def _open_loopback(self, entries: Sequence[Entry]) -> None:
        rights = Rights("loopback", next((entry for entry in entries if entry.name == LOOPBACK), None))
        server = self._serving.door(rights)
        for address in self._settings.listen:
            try:
                port = server.add_insecure_port(str(address))
            except RuntimeError:  # gRPC says no more
                raise OSError(errno.EADDRINUSE, f"--listen {address}: can't listen there") from None
            _log.info("listening on %s, without TLS", Address(address.host, port))
        _warn_of_loopback(rights)
        await server.start()
        self.by_client[LOOPBACK] = Door(rights, server, None)

    async def _open_tls(self) -> None:
        context = self._context()
        self._strangers = self._path(_STRANGERS)
        await self._open_socket(self._strangers, Rights(tls.DOOR), None, stranger=True)
        for address in self._settings.listen:
            listener = tls.TlsListener(tls.listen(address.host, address.port), context, self._route)
            self.listeners.append(listener)
            _log.info("listening on %s, with TLS", listener.address)

    def _context(self) -> ssl.SSLContext:
        settings = self._settings
        assert settings.tls_cert and settings.tls_key and settings.tls_client_ca
        return tls.server_context(settings.tls_cert, settings.tls_key, settings.tls_client_ca)

    def _route(self, names: Sequence[str]) -> Path:
        """The door of the client that has one of these names, or the strangers'."""
        door = self._door_of(names)
        if door is not None:
            return door
        refused.say("a certificate of %s is no client's", [name[:_SHOWN] for name in names[:_SHOWN_NAMES]])
        assert self._strangers is not None
        return self._strangers

    def _door_of(self, names: Sequence[str]) -> Path | None:
        for name in names:
            for door in self.by_client.values():
                entry = door.rights.entry
                if entry is not None and entry.certificate == name and door.path is not None:
                    return door.path
        return None


def _warn_of_loopback(rights: Rights) -> None:
    if rights.entry is None:
        _log.warning(
            "--insecure-loopback without an entry named %s in the clients file: whoever is on this host may do"
            " everything, contained processes too",
            LOOPBACK,
        )


@contextlib.contextmanager
def _config(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from error


def _remove(path: Path | None) -> None:
    """The socket; its directory is the other service's too, and stays."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()
