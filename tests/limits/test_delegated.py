"""A part of the v2 tree that was given to us: to a user who may write nothing else of it, or as all that there is.

On a machine with v2 alone (`make vm`); elsewhere the v2 tree has no controller to give.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.census import cgroup_mounts
from tests.harness.patience import PATIENCE
from tightship.kernel import cgroup

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make cgroups")

UID = 12345
WANTED = ["cpu", "memory", "pids"]
LOOK = """
import json, os, sys
from tightship.containerizer import machine
found = machine.look(sys.argv[1])
v2 = found.tracker
made = v2.path("/a")
os.makedirs(v2.inside("/a"))
with open(f"{v2.inside('/a')}/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
with open(f"{made}/memory.max", "w") as file:
    file.write("67108864")
with open(f"{os.path.dirname(os.path.dirname(v2.base))}/_tightship/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
told = {"base": v2.base, "controllers": sorted(v2.controllers), "own": open("/proc/self/cgroup").read()}
os.rmdir(v2.inside("/a"))
os.rmdir(made)
machine.leave(found)
print(json.dumps(told))
"""


@pytest.fixture
def given() -> Iterator[Path]:
    mounts = [mount for mount in cgroup_mounts() if (mount / "cgroup.controllers").exists()]
    root = next((each for each in mounts if {*WANTED} <= {*(each / "cgroup.controllers").read_text().split()}), None)
    if root is None:
        pytest.skip("the v2 tree has no controllers here")
    cgroup.enable(str(root), WANTED)
    path = root / f"given-{secrets.token_hex(4)}"
    path.mkdir()
    yield path
    assert not cgroup.remove(str(path), time.monotonic() + 10).left


@pytest.mark.parametrize("how", ["user", "namespace"])
def test_the_service_moves_to_a_leaf_and_uses_what_it_was_given(given: Path, how: str) -> None:
    look = [sys.executable, "-c", LOOK, "0123abcd"]
    if how == "user":
        for path in (given, given / "cgroup.procs", given / "cgroup.subtree_control", given / "cgroup.threads"):
            os.chown(path, UID, UID)
        command = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *look]
    else:
        inside = 'umount -l "$0" && mount -t cgroup2 none "$0" && exec "$@"'
        command = ["unshare", "--cgroup", "--mount", "sh", "-c", inside, str(given.parent), *look]
    started = subprocess.run(
        ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', given, *command],
        capture_output=True, text=True, timeout=30 * PATIENCE, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    told = json.loads(started.stdout)
    top = given if how == "user" else given.parent
    assert told["base"] == f"{top}/tightship/0123abcd"
    assert {*WANTED} <= {*told["controllers"]}
    assert told["own"].strip().endswith("/_tightship")
    assert not (given / "tightship").exists()
