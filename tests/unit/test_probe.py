"""The health probe against a real server, one that does not serve, one that hangs, and what is no server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tightship.common.probe import ProbeError, probe


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as directory:
        yield Path(directory) / "switchboard.sock"


def test_serving_and_not_serving(path: Path) -> None:
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        probe(path)
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(ProbeError, match="not serving"):
            probe(path)
    finally:
        server.stop(0).wait()
    with pytest.raises(ProbeError, match="No such file"):
        probe(path)


def test_a_server_without_health_does_not_serve(path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        with pytest.raises(ProbeError, match="not serving"):
            probe(path)
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    "answer", [b"", b"\xff" * 64, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["end", "junk", "http1"]
)
def test_no_server_of_grpc(path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        probing = subprocess.Popen(
            [sys.executable, "-m", "tightship.common.probe", "switchboard"],
            env={**os.environ, "TIGHTSHIP_RUN_DIR": os.fspath(path.parent)},
            stderr=subprocess.PIPE,
        )
        sock, _ = listener.accept()
        with sock:
            sock.sendall(answer)
            sock.shutdown(socket.SHUT_WR)
            _, error = probing.communicate(timeout=20)
    assert probing.returncode == 1
    assert str(path).encode() in error
    assert b"Traceback" not in error


def test_a_server_that_hangs_is_not_waited_for(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        with pytest.raises(ProbeError, match="timed out"):
            probe(path, timeout_s=0.1)


def test_it_imports_no_grpc() -> None:
    code = "import sys, tightship.common.probe; sys.exit('grpc' in sys.modules or 'google' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
