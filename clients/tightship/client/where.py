"""Where a pair is: its run directory and the sockets in it. Standard library only: every command looks here first."""

from __future__ import annotations

import os
import socket

DEFAULT_RUN_DIR = "/run/tightship"


def run_dir(given: str | None) -> str:
    """`given`, else TIGHTSHIP_RUN_DIR, else the default; absolute."""
    return os.path.abspath(given or os.environ.get("TIGHTSHIP_RUN_DIR") or DEFAULT_RUN_DIR)


def socket_of(directory: str, service: str) -> str:
    return os.path.join(directory, service + ".sock")


def answers(directory: str, service: str) -> bool:
    """Whether somebody accepts on the service's socket. Raises PermissionError, NotADirectoryError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(socket_of(directory, service))
        except BlockingIOError:
            return True  # its backlog is full: it lives
        except (PermissionError, NotADirectoryError):
            raise
        except OSError:
            return False
    return True
