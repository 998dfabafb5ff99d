"""How a channel to a service is set up: without more over a Unix socket, by mutual TLS over TCP.

TIGHTSHIP_TLS_CA, TIGHTSHIP_TLS_CERT and TIGHTSHIP_TLS_KEY name PEM files: who signed the service's certificate, and our
own with its key. Without TLS only a literal loopback address is connected to.
"""

from __future__ import annotations

import ipaddress
import os
import urllib.parse

import grpc

from tightship.client import where
from tightship.client.errors import TightshipError

OPTIONS = (
    # A new channel to a path that has just failed would fail at once with the old error.
    ("grpc.use_local_subchannel_pool", 1),
    # Bound what an unread stream buffers, at no cost in speed.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 262144),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # A service that is started again is back within a second.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A service that is there and answers nothing, stopped or on a host that went away: its calls end as UNAVAILABLE. It
    # takes pings every 10 s; there are none while no call is open.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)


_FILES = ("TIGHTSHIP_TLS_CA", "TIGHTSHIP_TLS_CERT", "TIGHTSHIP_TLS_KEY")


def target(directory: str, service: str) -> str:
    """The gRPC target of a service; a socket's path is percent-encoded in it."""
    address = where.address(directory, service)
    return "unix:" + urllib.parse.quote(address) if address.startswith("/") else address


def connect(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel of the running event loop; it connects by the first call. Raises TightshipError for a bad setting.

    Over TLS with `credentials`, else with those of the environment where the target is a TCP address.
    """
    if credentials is None and not target.startswith("unix"):
        credentials = _credentials(target)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=OPTIONS)


def _credentials(target: str) -> grpc.ChannelCredentials | None:
    """None for a loopback address where no file is named."""
    paths = [os.environ.get(name, "") for name in _FILES]
    if not any(paths):
        if _is_loopback(target):
            return None
        raise _bad(f"{target} is reached by TLS alone: set {', '.join(_FILES)}")
    files: list[bytes] = []
    for name, path in zip(_FILES, paths, strict=True):
        if not path:
            raise _bad(f"{name} is not set; mutual TLS needs all of {', '.join(_FILES)}")
        try:
            with open(path, "rb") as file:
                files.append(file.read())
        except OSError as error:
            raise _bad(f"{name}: {path}: {error.strerror}") from None
    authority, certificate, key = files
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _is_loopback(target: str) -> bool:
    host = target.rpartition("/")[2].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bad(message: str) -> TightshipError:
    return TightshipError(grpc.StatusCode.FAILED_PRECONDITION, message, "BAD_TLS_SETTING")
