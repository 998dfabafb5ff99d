"""Lines for the operator on stderr. A line that can't be written at once is dropped: nothing here may block
or raise, whatever stderr is."""

from __future__ import annotations

import os
import select


def notice(text: str) -> None:
    try:
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if any(events == select.POLLOUT for _, events in poll.poll(0)):
            os.write(2, f"tightship-spawner: {text}\n".encode(errors="backslashreplace")[:4096])
    except OSError:
        pass  # a full disk, or a reader that has gone: nobody to tell


def notice_exception(error: BaseException) -> None:
    """For what is a mistake of ours: the error with its traceback."""
    import traceback  # only for what should never happen: each module loaded makes a fork dearer

    notice("".join(traceback.format_exception(error)))
