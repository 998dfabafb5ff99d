"""The console script: standard streams and signals are put in order before anything more is imported."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Ends the process with the command's status."""
    try:
        _open_closed_streams()
        from tightship.cli import signals

        signals.handle(signals.leave)
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it reports a service's orderly end on stderr
        from tightship.cli import commands

        status = commands.execute(sys.argv[1:])
    except KeyboardInterrupt:  # before the handlers are there
        status = 130
    _flush()
    sys.exit(status)


def _open_closed_streams() -> None:
    """A stream that is closed is /dev/null: else a socket of ours would get its number."""
    for fd, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one. Inherited as any standard stream.
            os.set_inheritable(os.open(os.devnull, flags), True)
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


def _flush() -> None:
    """What can't be written was told; the interpreter must not try again at its end."""
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), fd)
