"""Where a pair is: its run directory and the sockets in it, or addresses. Standard library only: every command looks
here first.

TIGHTSHIP_CONTAINERIZER and TIGHTSHIP_SWITCHBOARD (HOST:PORT, or the path of a socket) are where the services are of
which nothing else was said: they go instead of the sockets of the default run directory.
"""

from __future__ import annotations

import os
import socket

DEFAULT_RUN_DIR = "/run/tightship"


def run_dir(given: str | None) -> str:
    """`given`, else TIGHTSHIP_RUN_DIR, else the default; absolute."""
    return os.path.abspath(given or os.environ.get("TIGHTSHIP_RUN_DIR") or DEFAULT_RUN_DIR)


def address(directory: str, service: str) -> str:
    """The path of the service's socket, or HOST:PORT."""
    given = os.environ.get(f"TIGHTSHIP_{service.upper()}", "")
    return given if given and directory == run_dir(None) else socket_of(directory, service)


def socket_of(directory: str, service: str) -> str:
    return os.path.join(directory, service + ".sock")


def answers(directory: str, service: str) -> bool:
    """Whether somebody accepts on the service's socket. Raises PermissionError, NotADirectoryError.

    True for TCP: only a call tells.
    """
    path = address(directory, service)
    if not path.startswith("/"):
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its backlog is full: it lives
        except (PermissionError, NotADirectoryError):
            raise
        except OSError:
            return False
    return True
