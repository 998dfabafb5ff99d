"""The first process of a container's pid namespace: the command, or an init that starts it."""

from __future__ import annotations

import shutil
import time

import grpc
import pytest

from tests.harness.calls import Calls, code, fresh_name, info
from tests.harness.pair import Pair

PATH = ["PATH=/usr/bin:/bin:/usr/sbin:/sbin"]

# What an init does, in short: starts the command, passes SIGTERM on, at any time, reaps all, ends as the command did.
REAPER = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, setsigmask=[])
signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
while True:
    pid, status = os.wait()
    if pid == child:
        os._exit(os.waitstatus_to_exitcode(status) % 256)
"""
INITS = {"python": ["/usr/bin/python3", "-I", "-c", REAPER], "tini": ["tini", "--"]}
ORPHANS = """
for i in 1 2 3 4 5; do ( sleep 0.01 & ); done
while grep -qs '^State:.Z' /proc/[0-9]*/status || pgrep sleep > /dev/null; do sleep 0.02; done
"""


@pytest.fixture(params=INITS)
def init(request: pytest.FixtureRequest) -> str:
    argv = INITS[request.param]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not here")
    words = " ".join("init_argv: " + repr(word) for word in argv)
    return f"init {{ {words} }}"


def shell(pair: Pair, script: str, spec: str) -> tuple[int | None, bytes]:
    result = pair.calls.run(["/bin/sh", "-c", script], spec=spec, env=PATH)
    return result.code, result.stdout


def test_it_is_first_and_ends_as_the_command(pair: Pair, init: str) -> None:
    script = "[ $$ -ne 1 ] && echo $PPID; exit 7"
    with pair.unchanged():
        assert shell(pair, script, f"virtual_host {{ {init} }}") == (7, b"1\n")
        assert shell(pair, "echo $$; exit 7", "virtual_host { }") == (7, b"1\n"), "without one it is the command"


@pytest.mark.parametrize("security", ["", "security { user: '65534' }"])
def test_it_reaps_orphans(pair: Pair, init: str, security: str) -> None:
    """The command ends when no zombie is left, and fails by its time-out."""
    spec = f"virtual_host {{ {init} }} {security}"
    result = pair.calls.run(["/bin/sh", "-c", ORPHANS + "echo none"], spec=spec, env=PATH, limit_s=60)
    assert (result.code, result.stdout) == (0, b"none\n")


def test_it_passes_the_stop_signal_on(pair: Pair, init: str) -> None:
    # "ready" comes when the trap is set.
    script = "trap 'echo stopped; exit 3' TERM; echo ready; while :; do sleep 0.02; done"
    spec = f"virtual_host {{ {init} }} lifecycle {{ grace {{ seconds: 20 }} cleanup_budget {{ seconds: 60 }} }}"
    name = fresh_name("init")
    launching = pair.calls.launch(["/bin/sh", "-c", script], name, spec, env=PATH)
    lease = launching.started().lease_id
    wait_for_output(pair.calls, lease)
    pair.calls.destroy(name, timeout=60)
    assert launching.exited().exit_code == 3
    launching.gone()


@pytest.mark.parametrize("spec", ["virtual_host { }", "security { }"])
def test_a_first_process_that_gets_no_signal_is_not_waited_for(pair: Pair, spec: str) -> None:
    name = fresh_name("init")
    pair.calls.detach(
        ["/bin/sleep", "600"], name, f"{spec} lifecycle {{ grace {{ seconds: 60 }} cleanup_budget {{ seconds: 200 }} }}"
    )
    pair.calls.destroy(name, timeout=50)


def test_one_that_is_not_there_is_named_and_leaves_nothing(pair: Pair) -> None:
    with pair.unchanged():
        error = pair.calls.launch(["/bin/true"], spec="virtual_host { init { init_argv: '/no/such/init' } }").error()
    metadata = info(error).metadata
    assert code(error) is grpc.StatusCode.NOT_FOUND
    assert (metadata["field"], metadata["errno"]) == ("virtual_host.init.init_argv[0]", "ENOENT")


def wait_for_output(calls: Calls, lease: str) -> None:
    deadline = time.monotonic() + 30
    while not any(each.size for each in calls.lease(lease).streams):
        assert time.monotonic() < deadline
        time.sleep(0.02)
