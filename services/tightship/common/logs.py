"""Log lines of a service on stderr: text for people, or JSON, an object a line.

A line that belongs to a container carries it in its `extra`: `log.warning("...", extra=logs.about(id, name, trace))`.
JSON has `time` (RFC 3339, UTC), `level`, `service`, `message`, and where they apply `container` (its name), `id`,
`trace_id` and `span_id` (as OpenTelemetry calls them), and `exception`.
"""

from __future__ import annotations

import json
import logging
import sys

from tightship.common.timestamps import rfc3339

FORMATS = ("text", "json")

_ABOUT = "about"


def about(identity: str, name: str, traceparent: str = "") -> dict[str, dict[str, str]]:
    """For a line's `extra`: container id (that of its lease as well), name, and W3C traceparent where there is one."""
    told = {"container": name, "id": identity}
    if traceparent:
        told["trace_id"], told["span_id"] = traceparent[3:35], traceparent[36:52]
    return {_ABOUT: told}


def set_up(service: str, level: str, form: str) -> None:
    """All logging of this process from now on. `form` is one of FORMATS. Raises ValueError for an unknown level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(service) if form == "json" else _Text(service))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Of a collector that is away tightship.telemetry tells when, and for how long; this two lines for each try.
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").setLevel(logging.CRITICAL)


class _Text(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        told = getattr(record, _ABOUT, None)
        return line + " [" + " ".join(f"{key}={value}" for key, value in told.items()) + "]" if told else line


class _Json(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": rfc3339(record.created),
            "level": record.levelname,
            "service": self._service,
            "message": record.getMessage(),
            **getattr(record, _ABOUT, {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)
