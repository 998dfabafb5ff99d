"""Metrics of a service: what it counts and holds, told to Prometheus and by OTLP, and only where somebody asks.

A service says what there is as `Series`: a name, and a function that reads it now. Counting is the service's own, in
plain integers; nothing is read until a scrape or an export, whose threads (never the event loop) call the functions.
Off, nothing else is imported; exporting.py is what they are when on.

Honoured: OTEL_METRICS_EXPORTER (otlp, console, none), OTEL_EXPORTER_OTLP_METRICS_ENDPOINT (which is enough to switch it
on) and the other OTEL_EXPORTER_OTLP_* (protocol http/protobuf), OTEL_METRIC_EXPORT_INTERVAL, OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_SDK_DISABLED. OTEL_EXPORTER_OTLP_ENDPOINT alone means traces: Jaeger takes no metrics.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from tightship.common import refused
from tightship.common.clients import ConfigError
from tightship.common.telemetry import Tracer

Labels = Mapping[str, str]
Values = Iterable[tuple[Labels, int]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Series:
    """Something to be read. `read` is called in a thread of its own, and gives a value for each set of labels.

    `counter` only grows, `level` is a sum over things there are now.
    """

    name: str
    kind: Literal["counter", "level"]
    description: str
    read: Callable[[], Values]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """Durations in seconds, told as a histogram. `switch_on` gets what the service is to call with each."""

    name: str
    description: str
    bounds: Sequence[float]
    switch_on: Callable[[Callable[[float], None]], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Where Prometheus scrapes."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str, offset: int = 0) -> Self:
        """From HOST:PORT, [V6]:PORT or :PORT (of 127.0.0.1). Raises ValueError."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) + offset < 1 << 16:
            raise ValueError(f"{text!r} is not HOST:PORT, for example 127.0.0.1:9464")
        return cls(host.strip("[]") or "127.0.0.1", int(port) + offset)


def address(given: str | None, offset: int) -> Address | None:
    """From the option, else from TIGHTSHIP_METRICS with the service's `offset` added to its port: one variable serves a
    pair. Raises ConfigError.
    """
    source, text = ("--metrics", given) if given else ("TIGHTSHIP_METRICS", os.environ.get("TIGHTSHIP_METRICS"))
    try:
        return Address.of(text, 0 if given else offset) if text else None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def wanted_by_otlp() -> bool:
    """Whether the OTEL_* variables ask for metrics."""
    env = os.environ
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = env.get("OTEL_METRICS_EXPORTER", "").strip().lower()
    return exporter != "none" and bool(exporter or env.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"))


class Metrics:
    """This class is metrics switched off; `start` gives what is asked for."""

    @staticmethod
    def start(service: str, where: Address | None, told: Sequence[Series | Timed]) -> Metrics:
        """Serves and exports what is `told`. What can't be is said in the log, and keeps no service from working."""
        if where is None and not wanted_by_otlp():
            return Metrics()
        try:
            from tightship.common.exporting import On

            return On(service, where, told)
        except Exception as error:  # noqa: BLE001  see above
            _log.error("metrics are off: %s", error)
            return Metrics()

    def stop(self, timeout_s: float) -> None:
        """Exports once more, and ends; `timeout_s` seconds at most. Blocks: not for an event loop."""


def common(tracer: Tracer) -> list[Series]:
    """What every service tells."""
    return [
        Series("tightship.spans.dropped", "counter", "Spans that no collector got.", lambda: [({}, tracer.dropped)]),
        Series("tightship.calls.refused", "counter", "Calls and connections that were refused.", _refused),
    ]


def _refused() -> Values:
    return [({"door": door, "code": code}, count) for (door, code), count in refused.counts.copy().items()]
