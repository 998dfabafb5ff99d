"""The Docker engine of the rig: the one that answers here, else a dockerd of the tests' own, which ends with them.

Its images and layers stay in the cache, so that a second run builds nothing that has not changed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.harness import census

CACHE = Path(os.environ.get("TIGHTSHIP_CACHE", "/var/cache/tightship"))
BASE = "python:3.11-slim-bookworm"

_STATE = Path("/run/tightship-dockerd")
_START_S = 60.0
_STOP_S = 30.0


def docker(*words: str, check: bool = True, timeout: float = 120) -> str:
    """Standard output of the docker command."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0 or not check, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """With an engine that has the base image; DOCKER_HOST names it where it is the tests' own."""
    with contextlib.nullcontext() if _answers() else _own_engine():
        if not docker("images", "--quiet", BASE):
            docker("import", str(CACHE / "bookworm.tar"), BASE)
        yield


def _answers() -> bool:
    return bool(docker("info", "--format", "{{.ID}}", check=False))


@contextlib.contextmanager
def _own_engine() -> Iterator[None]:
    _STATE.mkdir(exist_ok=True)
    before = _parents()
    old = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = host = f"unix://{_STATE}/docker.sock"
    with (_STATE / "log").open("wb") as log:
        # It gets SIGTERM also when this process is killed; its mounts are in a namespace of their own.
        daemon = subprocess.Popen(
            ["unshare", "--mount", "setpriv", "--pdeathsig", "TERM", "dockerd", "--data-root", str(CACHE / "docker"),
             "--exec-root", str(_STATE / "exec"), "--pidfile", str(_STATE / "pid"), "--host", host],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until = time.monotonic() + _START_S
        while not _answers():
            assert daemon.poll() is None and time.monotonic() < until, (_STATE / "log").read_text()[-4000:]
            time.sleep(0.2)
        docker("image", "prune", "--force", "--filter", "until=24h")  # stages of builds long past
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        del os.environ["DOCKER_HOST"]
        if old is not None:
            os.environ["DOCKER_HOST"] = old
        for path in _parents() - before:
            with contextlib.suppress(OSError):
                path.rmdir()
        subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True, check=False)


def _parents() -> set[Path]:
    """The cgroups in which the engine makes those of its containers."""
    return {path for mount in census.cgroup_mounts() if (path := mount / "docker").is_dir()}
