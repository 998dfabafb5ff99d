"""grpc.health.v1, which tells with each Check the version of the service, as the metadata `tightship-version`."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2

VERSION = "tightship-version"


class Health(health.aio.HealthServicer):
    def __init__(self) -> None:
        super().__init__()
        self._version: str | None = None

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if self._version is None:
            self._version = await asyncio.to_thread(_installed)
        await context.send_initial_metadata(((VERSION, self._version),))
        return await super().Check(request, context)


def _installed() -> str:
    """Reads files. "unknown" where it runs from a tree that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("tightship")
    except metadata.PackageNotFoundError:
        return "unknown"
