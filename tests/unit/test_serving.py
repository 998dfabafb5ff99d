"""The server around handlers: what it does when the caller is gone before its error can be sent."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from tightship.common.errors import Code, ServiceError
from tightship.common.serving import Serving


def test_an_error_for_a_caller_that_is_gone_is_dropped_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gone = threading.Event(), threading.Event()
    seen: list[type[BaseException]] = []

    def call_and_go() -> None:
        with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
            call: Any = channel.unary_unary("/test/Call")
            future = call.future(b"")
            begun.wait(10)
            future.cancel()
        gone.set()

    async def scenario() -> None:
        serving = Serving(tmp_path / "s")
        ended = asyncio.Event()

        async def handler(_request: bytes, context: Any) -> bytes:
            try:
                async with serving.guard(context):
                    begun.set()
                    gone.wait(10)
                    time.sleep(0.2)  # the loop hears of it after the error is on its way
                    raise ServiceError(Code.UNAVAILABLE, "LATE", "too late")
            except BaseException as error:
                seen.append(type(error))
                raise
            finally:
                ended.set()

        methods: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
        serving.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
        await serving.start()
        caller = threading.Thread(target=call_and_go)
        caller.start()
        await asyncio.wait_for(ended.wait(), 20)
        await serving.stop(0.1)
        caller.join()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert seen == [asyncio.CancelledError]
    assert not caplog.records
