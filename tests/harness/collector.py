"""An OTLP/HTTP receiver on a local port, as a collector is: what processes export, as flat spans.

As a program (`python -m tests.harness.collector --port N`) it takes them on every interface, and tells them as JSON to
whoever asks for /spans.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.server
import json
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Value = str | int | float | bool


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace: str
    span: str
    parent: str
    """Empty for a root."""
    kind: str
    """client, server, internal."""
    attributes: dict[str, Value]
    error: bool
    message: str
    """Of the error."""
    links: tuple[tuple[str, str], ...]
    """Trace and span, each."""
    start_ns: int
    end_ns: int


class Collector:
    """Use as a context manager."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._address = (host, port)

    def __enter__(self) -> Self:
        self._requests: list[ExportTraceServiceRequest] = []
        requests, spans = self._requests, self.spans

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                body = json.dumps([dataclasses.asdict(span) for span in spans()]).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(self._address, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process export to it, often."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_address[1]}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def resources(self) -> list[dict[str, Value]]:
        """Attributes of each that has sent."""
        return [_plain(one.resource.attributes) for request in list(self._requests) for one in request.resource_spans]

    def spans(self) -> list[ReceivedSpan]:
        """All that have come, in the order of their coming."""
        found = []
        for request in list(self._requests):
            for resource in request.resource_spans:
                service = str(_plain(resource.resource.attributes)["service.name"])
                for scope in resource.scope_spans:
                    found += [
                        ReceivedSpan(
                            service,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                            _plain(span.attributes),
                            span.status.code == span.status.STATUS_CODE_ERROR,
                            span.status.message,
                            tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                        )
                        for span in scope.spans
                    ]
        return found


def _plain(attributes: object) -> dict[str, Value]:
    pairs: list[KeyValue] = list(attributes)  # type: ignore[call-overload]
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    with Collector("0.0.0.0", parser.parse_args().port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
