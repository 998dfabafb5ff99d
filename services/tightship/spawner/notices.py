"""Lines for the operator on stderr, as text, or as JSON where TIGHTSHIP_LOG_FORMAT says so. A line that can't be
written at once is dropped: nothing here may block or raise, whatever stderr is."""

from __future__ import annotations

import json
import os
import select
import time

from tightship.common.timestamps import rfc3339

_LINE_MAX = 4096
_JSON = os.environ.get("TIGHTSHIP_LOG_FORMAT") == "json"


def notice(text: str) -> None:
    try:
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if any(events == select.POLLOUT for _, events in poll.poll(0)):
            os.write(2, _line(text))
    except OSError:
        pass  # a full disk, or a reader that has gone: nobody to tell


def notice_exception(error: BaseException) -> None:
    """For what is a mistake of ours: the error with its traceback."""
    import traceback  # only for what should never happen: each module loaded makes a fork dearer

    notice("".join(traceback.format_exception(error)))


def _line(text: str) -> bytes:
    if not _JSON:
        return f"tightship-spawner: {text}\n".encode(errors="backslashreplace")[:_LINE_MAX]
    told = {
        "time": rfc3339(time.time()),
        "level": "WARNING",
        "service": "spawner",
        "message": text[: _LINE_MAX // 8],  # in ASCII, six bytes a character at most
    }
    return json.dumps(told).encode() + b"\n"
