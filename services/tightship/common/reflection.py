"""Server reflection: a client without our protos asks which services there are, and for their descriptors.

Nothing of it is imported before the first call that asks. Served as v1alpha and as v1, whose messages are the same on
the wire; tools try v1 first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc

METHODS = frozenset(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
)


class Reflection(grpc.GenericRpcHandler):
    """Handler of the reflection calls, for the services of which `names` has the full names when it is first asked."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._handler: Any = None

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method not in METHODS:
            return None
        if self._handler is None:
            self._handler = _handler(self._names)
        return self._handler


def _handler(names: Collection[str]) -> Any:
    from grpc_reflection.v1alpha import reflection, reflection_pb2

    servicer = reflection.aio.ReflectionServicer(names)
    return grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
