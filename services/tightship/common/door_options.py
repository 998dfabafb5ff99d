"""The options of the command line about doors, the same for both services but for the variable of `--listen`."""

from __future__ import annotations

import functools
import grp
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tightship.common.clients import ConfigError
from tightship.common.doors import Address, DoorSettings

F = TypeVar("F", bound=Callable[..., Any])

_PORT_MAX = 65535


def door_options(service: str) -> Callable[[F], F]:
    """Gives a command the options, as `doors`: a function that makes DoorSettings of them, or raises ConfigError."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def wrapped(
            *args: Any,
            listen: tuple[str, ...],
            tls_cert: Path | None,
            tls_key: Path | None,
            tls_client_ca: Path | None,
            insecure_loopback: bool,
            clients: Path | None,
            group: str | None,
            **keywords: Any,
        ) -> Any:
            def doors() -> DoorSettings:
                settings = DoorSettings(
                    listen=tuple(map(_address, listen)),
                    tls_cert=tls_cert,
                    tls_key=tls_key,
                    tls_client_ca=tls_client_ca,
                    insecure_loopback=insecure_loopback,
                    clients=clients.absolute() if clients is not None else None,
                    group=_gid(group) if group is not None else None,
                )
                settings.check()
                settings.entries()
                return settings

            return command(*args, doors=doors, **keywords)

        for option in reversed(_options(service)):
            wrapped = option(wrapped)
        return wrapped  # type: ignore[return-value]

    return decorate


def _options(service: str) -> list[Callable[[Any], Any]]:
    path = click.Path(path_type=Path)
    return [
        click.option(
            "--listen", multiple=True, metavar="HOST:PORT", envvar=f"TIGHTSHIP_{service.upper()}_LISTEN",
            help="Serve by TCP too, with mutual TLS; repeatable.",
        ),
        click.option("--tls-cert", type=path, envvar="TIGHTSHIP_SERVICE_TLS_CERT", help="PEM file: our certificates."),
        click.option("--tls-key", type=path, envvar="TIGHTSHIP_SERVICE_TLS_KEY", help="PEM file: our private key."),
        click.option(
            "--tls-client-ca", type=path, envvar="TIGHTSHIP_SERVICE_TLS_CLIENT_CA",
            help="PEM file: who signs clients' certificates.",
        ),
        click.option(
            "--insecure-loopback", is_flag=True, envvar="TIGHTSHIP_INSECURE_LOOPBACK",
            help="--listen without TLS, for whoever is on this host; loopback addresses alone.",
        ),
        click.option("--clients", type=path, envvar="TIGHTSHIP_CLIENTS", help="TOML file: clients and their rights."),
        click.option(
            "--group", envvar="TIGHTSHIP_GROUP", help="Group, by name or number, that may use the socket, all rights."
        ),
    ]  # fmt: skip


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without its brackets
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) <= _PORT_MAX):
        raise ConfigError(f"--listen {text}: is not HOST:PORT, or [IPV6]:PORT")
    return Address(host, int(port))


def _gid(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        raise ConfigError(f"--group {text}: no such group") from None
