"""How a channel to a service is set up."""

from __future__ import annotations

import os
import urllib.parse

import grpc

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


def target(directory: str, service: str) -> str:
    """The gRPC target of a service's socket; a path is percent-encoded in it."""
    return "unix:" + urllib.parse.quote(os.path.join(directory, service + ".sock"))


def connect(where: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel of the running event loop, over TLS with `credentials`; it connects by the first call."""
    if credentials is not None:
        return grpc.aio.secure_channel(where, credentials, options=OPTIONS)
    return grpc.aio.insecure_channel(where, options=OPTIONS)
