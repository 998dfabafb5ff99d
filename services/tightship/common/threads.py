"""A bounded pool of worker threads that are all there from the start, so that nothing grows later."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def pool(size: int, name: str) -> ThreadPoolExecutor:
    """`size` threads, begun."""
    made = ThreadPoolExecutor(size, name)
    all_there = threading.Barrier(size + 1)
    for _ in range(size):
        made.submit(all_there.wait)
    all_there.wait()
    return made
