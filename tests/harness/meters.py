"""What a service tells as metrics: a scrape of its endpoint, and an OTLP/HTTP receiver on a local port."""

from __future__ import annotations

import http.server
import re
import socket
import threading
import urllib.request
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

Figures = dict[str, float]
"""Values by name and labels, as Prometheus writes them: `tightship_containers{state="running"}`."""

_LINE = re.compile(r"(?P<key>[a-zA-Z_:][^ {]*(?:\{.*\})?) (?P<value>\S+)")


def scrape(port: int, timeout_s: float = 20.0) -> Figures:
    """Raises OSError."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=timeout_s) as answer:
        text = answer.read().decode()
    matches = [_LINE.fullmatch(line) for line in text.splitlines() if line and not line.startswith("#")]
    return {match["key"]: float(match["value"]) for match in matches if match}


def change(before: Figures, after: Figures) -> Figures:
    """What differs, without what the process itself uses."""
    return {
        key: after.get(key, 0) - before.get(key, 0)
        for key in before.keys() | after.keys()
        if after.get(key, 0) != before.get(key, 0) and key.startswith("tightship_") and "_bucket" not in key
    }


def two_ports() -> int:
    """A port that is free, as is the next."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


class MetricsCollector:
    """Use as a context manager."""

    def __enter__(self) -> Self:
        self._requests: list[ExportMetricsServiceRequest] = []
        requests = self._requests

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/metrics"

    def latest(self, service: str) -> dict[tuple[str, str], float]:
        """By metric and the one label's value ("" for none), as the service's last export has it; of a histogram, the
        count."""
        found: dict[tuple[str, str], float] = {}
        for request in list(self._requests):
            for resource in request.resource_metrics:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                if names["service.name"] != service:
                    continue
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    for point in metric.sum.data_points:
                        label = "".join(each.value.string_value for each in point.attributes)
                        found[metric.name, label] = point.as_int
                    for measured in metric.histogram.data_points:
                        found[metric.name, ""] = measured.count
        return found
