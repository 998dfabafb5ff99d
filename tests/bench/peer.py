"""crun as the peer: a process in a mount namespace of its own that runs bundles and times them, one line an order.

A bundle is what `crun spec` writes, with a launch's namespaces, limits, host name and command in the place of its own;
stripped, it has no mounts but those that a launch has. crun refuses hybrid cgroup trees, so /sys/fs/cgroup/unified is
taken out of that namespace. The host's root, read-only, is its root file system, as it is a launch's. `COUNT` on
standard input runs so many at the same time; the answer is the nanoseconds from the start of the first to the end of
the last.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

# The same as the launch's: tests/harness/calls.py FULL_SPEC.
RESOURCES = {
    "cpu": {"shares": 512, "quota": 150_000, "period": 100_000},
    "memory": {"limit": 268_435_456},
    "pids": {"limit": 64},
}
NAMESPACES = ("pid", "mount", "ipc", "uts")
_CRUN = ("crun", "--root", "state", "--cgroup-manager=cgroupfs")
_PARENT = f"/tightship-bench-{os.getpid()}"
_numbers = itertools.count()


class Crun:
    """Use as a context manager. Raises FileNotFoundError where crun is missing."""

    def __init__(self, *, stripped: bool = False) -> None:
        self._stripped = stripped
        self._parent = f"{_PARENT}-{next(_numbers)}"

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="tsbench", dir="/tmp")
        inside = 'umount /sys/fs/cgroup/unified 2>/dev/null; mount --bind / rootfs && exec "$@"'
        bundle = Path(self._directory.name)
        (bundle / "rootfs").mkdir()
        subprocess.run(["crun", "spec"], cwd=bundle, check=True)
        config = json.loads((bundle / "config.json").read_text())
        config["process"] |= {"terminal": False, "args": ["/bin/true"]}
        config["root"] = {"path": "rootfs", "readonly": True}
        config["hostname"] = "inside"
        config["linux"] |= {"namespaces": [{"type": one} for one in NAMESPACES], "resources": RESOURCES}
        if self._stripped:
            config["mounts"] = [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                # The host's, as a launch has it; without one, crun would make devices on the host's disk.
                {"destination": "/dev", "type": "bind", "source": "/dev", "options": ["rbind"]},
            ]
            del config["linux"]["maskedPaths"], config["linux"]["readonlyPaths"]
        (bundle / "config.json").write_text(json.dumps(config))
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside, "sh",
             sys.executable, "-I", "-S", __file__, self._parent],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=bundle,
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)
        self._directory.cleanup()
        for hierarchy in Path("/sys/fs/cgroup").iterdir():
            if (left := hierarchy / self._parent[1:]).is_dir():
                left.rmdir()

    def run(self, together: int = 1) -> float:
        """Seconds that `together` runs took, side by side."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{together}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline()) / 1e9


def _serve() -> None:
    """Runs crun by order until the end of standard input. Each of those together has a bundle and cgroup of its own."""
    parent = sys.argv[1]
    base = json.loads(Path("config.json").read_text())
    bundles: list[str] = []

    def bundle(number: int) -> str:
        while len(bundles) <= number:
            path = Path(f"b{len(bundles)}")
            path.mkdir()
            base["linux"]["cgroupsPath"] = f"{parent}/{path.name}"
            base["root"]["path"] = str(Path("rootfs").absolute())
            (path / "config.json").write_text(json.dumps(base))
            bundles.append(str(path))
        return bundles[number]

    null = os.open("/dev/null", os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
    for line in sys.stdin:
        together = [bundle(number) for number in range(int(line))]
        begun = time.monotonic_ns()
        running = [
            os.posix_spawnp("crun", [*_CRUN, "run", "--bundle", one, one], os.environ, file_actions=actions)
            for one in together
        ]  # fmt: skip
        for pid in running:
            _, status = os.waitpid(pid, 0)
            assert status == 0, f"crun ended with {status}"
        print(time.monotonic_ns() - begun, flush=True)


if __name__ == "__main__":
    _serve()
