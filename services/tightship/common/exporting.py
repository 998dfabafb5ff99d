"""Metrics switched on: an endpoint for Prometheus in a thread of its own, and OTLP by the SDK's exporting thread.

Imported only where metrics are on: it needs OpenTelemetry's SDK and, for the endpoint, prometheus_client.
"""

from __future__ import annotations

import http.server
import logging
import os
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricReader, PeriodicExportingMetricReader

from tightship.common.metrics import Address, Metrics, Series, Timed, wanted_by_otlp
from tightship.telemetry import resource

# A scrape that takes longer (s) has lost its scraper.
_SCRAPE_S = 5.0
# Of one export (s), where the environment says nothing.
_EXPORT_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


class On(Metrics):
    def __init__(self, service: str, where: Address | None, told: Sequence[Series | Timed]) -> None:
        readers = [_exporting()] if wanted_by_otlp() else []
        self._server: _Server | None = None
        if where is not None:
            self._server, reader = _prometheus(where)
            readers.append(reader)
        self._provider = MeterProvider(metric_readers=readers, resource=resource(service), shutdown_on_exit=False)
        meter = self._provider.get_meter("tightship")
        for each in told:
            if isinstance(each, Timed):
                histogram = meter.create_histogram(
                    each.name, "s", each.description, explicit_bucket_boundaries_advisory=each.bounds
                )
                each.switch_on(histogram.record)
            elif each.kind == "counter":
                meter.create_observable_counter(each.name, [_callback(each)], each.unit, each.description)
            else:
                meter.create_observable_up_down_counter(each.name, [_callback(each)], each.unit, each.description)
        if self._server is not None:
            self._server.begin()

    def stop(self, timeout_s: float) -> None:
        # A scrape that dawdles and the SDK have longer bounds; a daemon thread still in them does not hold the process.
        thread = threading.Thread(target=self._end, name="metrics-shutdown", daemon=True)
        thread.start()
        thread.join(timeout_s)

    def _end(self) -> None:
        self._provider.shutdown()
        if self._server is not None:
            self._server.end()


def _callback(series: Series) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, dict(labels)) for labels, value in series.read()]

    return observe


def _prometheus(where: Address) -> tuple[_Server, MetricReader]:
    """Raises OSError where the address can't be had."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector

    registry = CollectorRegistry()
    server = _Server(where, MetricsHandler.factory(registry))
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)
    ProcessCollector(registry=registry)
    return server, reader


class _Server(http.server.HTTPServer):
    """One scrape at a time, in one thread; a peer that dawdles is cut off."""

    request_queue_size = 16

    def __init__(self, where: Address, handler: Any) -> None:
        if ":" in where.host:
            self.address_family = socket.AF_INET6
        super().__init__((where.host, where.port), handler)
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the resolver for our name

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        late = threading.Timer(_SCRAPE_S, _cut, (request,))
        late.daemon = True
        late.start()
        try:
            super().process_request(request, client_address)
        finally:
            late.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        _log.debug("a scrape by %s failed", client_address, exc_info=sys.exc_info())


def _cut(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it ended meanwhile


def _exporting() -> MetricReader:
    """Raises ValueError for what is not supported."""
    env = os.environ
    name = env.get("OTEL_METRICS_EXPORTER", "").strip().lower() or "otlp"
    if name == "console":
        return PeriodicExportingMetricReader(ConsoleMetricExporter(out=sys.stderr))
    if name != "otlp":
        raise ValueError(f"OTEL_METRICS_EXPORTER={name}: only otlp, console and none are known (Prometheus: --metrics)")
    protocol = env.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol and protocol.strip().lower() != "http/protobuf":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: only http/protobuf is supported")
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    said = env.get("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT") or env.get("OTEL_EXPORTER_OTLP_TIMEOUT")
    return PeriodicExportingMetricReader(OTLPMetricExporter(timeout=None if said else _EXPORT_TIMEOUT_S))
