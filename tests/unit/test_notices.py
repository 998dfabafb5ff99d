"""Notices on every kind of stderr that can't be written: they are dropped, and nothing is raised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_CODE = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'services')!r})"
_CODE += "; from tightship.spawner.notices import notice; {before}; notice('x'); print('fine')"


@pytest.mark.parametrize(
    ("before", "stderr"),
    [
        ("pass", "/dev/full"),
        ("import os; os.close(2)", "/dev/null"),
        ("import os; r, w = os.pipe(); os.dup2(w, 2); os.close(r)", "/dev/null"),
    ],
    ids=["ENOSPC", "EBADF", "EPIPE"],
)
def test_a_notice_never_raises(before: str, stderr: str) -> None:
    with open(stderr, "w") as target:
        ran = subprocess.run(
            [sys.executable, "-c", _CODE.format(before=before)], check=False, stdout=subprocess.PIPE, stderr=target
        )
    assert ran.stdout == b"fine\n"
