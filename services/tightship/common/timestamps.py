"""Times in log lines."""

from __future__ import annotations

import time


def rfc3339(moment: float) -> str:
    """Seconds since the epoch as UTC with milliseconds: 2026-01-31T23:59:59.999Z."""
    ms = int(moment * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(ms // 1000))}.{ms % 1000:03d}Z"
