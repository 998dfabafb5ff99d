"""The services' tracer, under the name they use; `tightship.telemetry` says what it does."""

from __future__ import annotations

from tightship.telemetry import Tracer

__all__ = ["Tracer"]
