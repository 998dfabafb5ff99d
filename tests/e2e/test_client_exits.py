"""Every way out of a program that launched something with the client library: nothing of it is left.

Each case is a program of its own, whose container a census looks for afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness.pair import ROOT, Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb

HEAD = """\
import asyncio, gc, multiprocessing, os, signal, sys, threading, time
from tightship.client import AsyncClient, Cancelled, Client, TightshipError

COMMAND = ["sh", "-c", "echo hi; sleep 600 & sleep 600"]

def say(launch):
    print(launch.id, flush=True)
    return launch

def ended(client, launch_id, timeout=20):
    until = time.monotonic() + timeout
    while (container := client.get(launch_id)).state != container.ENDED:
        assert time.monotonic() < until, container
        time.sleep(0.02)

"""

# Those that have waited for the end of the container, before they end themselves.
WAITED = {
    "exception": """
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
            raise SystemExit(7)
    """,
    "return": """
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
        raise SystemExit(7)
    """,
    "output left early": """
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
            for chunk in launch.output():
                break
        raise SystemExit(7)
    """,
    "cancel tells the record": """
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
            launch.cancel()
            record = launch.wait(timeout=10)
            assert record.reason == record.CANCELLED, record
            try:
                launch.gone()
            except Cancelled:
                raise SystemExit(7)
    """,
    "wait times out": """
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
            try:
                launch.wait(timeout=0.1)
            except TimeoutError:
                assert client.get(launch.id).state == 3, "a time-out touches nothing"
                raise SystemExit(7)
    """,
    "exception in a thread": """
        def work():
            with client.launch(COMMAND) as launch:
                say(launch)
                raise ZeroDivisionError
        threading.excepthook = lambda _: None
        with Client() as client:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        raise SystemExit(7)
    """,
    "dropped": """
        with Client() as client:
            launch_id = say(client.launch(COMMAND).start()).id
            ended(client, launch_id)
        raise SystemExit(7)
    """,
    "dropped in a cycle": """
        with Client() as client:
            launch = say(client.launch(COMMAND).start())
            launch.me = launch
            launch_id = launch.id
            del launch
            gc.collect()
            ended(client, launch_id)
        raise SystemExit(7)
    """,
    "dropped with its output half read": """
        with Client() as client:
            def begin():
                launch = say(client.launch(COMMAND).start())
                chunks = launch.output()
                next(chunks)
                return launch.id, chunks
            launch_id, chunks = begin()
            assert client.get(launch_id).state == 3, "its output holds it"
            del chunks
            ended(client, launch_id)
        raise SystemExit(7)
    """,
    "a thread's end": """
        def work():
            launch = say(client.launch(COMMAND).start())
            started.append(launch.id)
        started = []
        with Client() as client:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            ended(client, started[0])
        raise SystemExit(7)
    """,
    "dropped client": """
        client = Client()
        launch = client.launch(COMMAND).start()
        launch_id = say(launch).id
        del client, launch
        with Client() as other:
            ended(other, launch_id)
        raise SystemExit(7)
    """,
    "asyncio: exception": """
        async def main():
            async with AsyncClient() as client, client.launch(COMMAND) as launch:
                say(launch)
                raise SystemExit(7)
        asyncio.run(main())
    """,
    "asyncio: cancelled": """
        async def work(client):
            async with client.launch(COMMAND) as launch:
                say(launch)
                begun.set()
                await launch.wait()
        async def main():
            global begun
            begun = asyncio.Event()
            async with AsyncClient() as client:
                task = asyncio.create_task(work(client))
                await begun.wait()
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
        asyncio.run(main())
        raise SystemExit(7)
    """,
    "asyncio: time-out of run": """
        async def main():
            async with AsyncClient() as client:
                try:
                    async with asyncio.timeout(1):
                        await client.run(COMMAND, name="/timed")
                except TimeoutError:
                    print((await client.get("/timed")).id, flush=True)
        asyncio.run(main())
        raise SystemExit(7)
    """,
    "asyncio: a task group fails": """
        async def work(client):
            async with client.launch(COMMAND) as launch:
                say(launch)
                begun.set()
                async for _ in launch.output():
                    pass
        async def fail():
            await begun.wait()
            raise ZeroDivisionError
        async def main():
            global begun
            begun = asyncio.Event()
            async with AsyncClient() as client:
                async with asyncio.TaskGroup() as group:
                    group.create_task(work(client))
                    group.create_task(fail())
        status = 0
        try:
            asyncio.run(main())
        except* ZeroDivisionError:
            status = 7  # Python 3.11.2 makes a group of what is raised here
        sys.exit(status)
    """,
    "asyncio: dropped": """
        async def main():
            async with AsyncClient() as client:
                launch = say(await client.launch(COMMAND).start())
                launch_id = launch.id
                del launch
                while (container := await client.get(launch_id)).state != container.ENDED:
                    await asyncio.sleep(0.02)
        asyncio.run(main())
        raise SystemExit(7)
    """,
}

# Those that go without waiting: the services end the container.
GONE = {
    "interpreter's end": """
        client = Client()
        launch = say(client.launch(COMMAND).start())
        raise SystemExit(7)
    """,
    "interpreter's end with a daemon thread in a call": """
        def work():
            with client.launch(COMMAND) as launch:
                say(launch)
                begun.set()
                launch.wait()
        client = Client()
        begun = threading.Event()
        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        raise SystemExit(7)
    """,
    "os._exit": """
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
            os._exit(7)
    """,
    "client closed": """
        client = Client()
        launch = say(client.launch(COMMAND).start())
        client.close()
        try:
            launch.wait()
        except (RuntimeError, TightshipError):
            os._exit(7)
    """,
    "asyncio: the loop's end": """
        async def main():
            global launch
            launch = say(await AsyncClient().launch(COMMAND).start())
        asyncio.run(main())
        raise SystemExit(7)
    """,
    "asyncio: client closed while read": """
        async def main():
            client = AsyncClient()
            launch = say(await client.launch(COMMAND).start())
            asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(client.close()))
            try:
                async for _ in launch.output():
                    pass
            except Cancelled:
                raise SystemExit(7)
        asyncio.run(main())
    """,
}

# Those that a signal ends: in a call, which KeyboardInterrupt leaves when the container is gone.
SIGNALLED = {
    "wait": """
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
            launch.wait()
    """,
    "output": """
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
            for chunk in launch.output():
                pass
    """,
    "run": """
        with Client() as client:
            threading.Timer(1, lambda: print(client.get("/signalled").id, flush=True)).start()
            client.run(COMMAND, name="/signalled")
    """,
    "asyncio": """
        async def main():
            async with AsyncClient() as client, client.launch(COMMAND) as launch:
                say(launch)
                await launch.wait()
        asyncio.run(main())
    """,
    "asyncio: run": """
        async def main():
            async with AsyncClient() as client:
                async def tell():
                    await asyncio.sleep(1)
                    print((await client.get("/signalled")).id, flush=True)
                telling = asyncio.create_task(tell())
                await client.run(COMMAND, name="/signalled")
        asyncio.run(main())
    """,
}


@contextmanager
def _program(pair: Pair, text: str) -> Iterator[subprocess.Popen[str]]:
    """The program, running; killed at the block's end, its forks too."""
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "ignore::ResourceWarning", "-c", HEAD + textwrap.dedent(text)],
        env=pair.environment | {"TIGHTSHIP_RUN_DIR": str(pair.run_dir), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def _id(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline().strip()
    assert line, process.stderr.read()
    return line


def _status(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def _container(pair: Pair, launch_id: str) -> cpb.Container:
    return pair.calls.containerizer.Get(cpb.GetRequest(name=launch_id), timeout=10).container


def _await_cancelled(pair: Pair, launch_id: str) -> None:
    """Where nobody was told: its record comes a moment after its cgroups went."""
    until(lambda: _container(pair, launch_id).state == cpb.Container.ENDED, "it has ended")
    _check_cancelled(pair, launch_id)


def _check_cancelled(pair: Pair, launch_id: str) -> None:
    container = _container(pair, launch_id)
    assert container.state == cpb.Container.ENDED
    assert container.record.reason == cpb.Record.CANCELLED


@pytest.mark.parametrize("case", WAITED)
def test_it_is_gone_before_the_program_goes_on(pair: Pair, case: str) -> None:
    with pair.unchanged(), _program(pair, WAITED[case]) as process:
        launch_id = _id(process)
        code, said = _status(process)
        assert (code, said) == (7, "")
        _check_cancelled(pair, launch_id)


@pytest.mark.parametrize("case", GONE)
def test_it_goes_when_the_program_is_gone(pair: Pair, case: str) -> None:
    with pair.unchanged(), _program(pair, GONE[case]) as process:
        launch_id = _id(process)
        code, said = _status(process)
        assert code == 7, said
        assert "Traceback" not in said
    _await_cancelled(pair, launch_id)


@pytest.mark.parametrize("case", SIGNALLED)
def test_an_interrupt_is_raised_when_it_is_gone(pair: Pair, case: str) -> None:
    with pair.unchanged(), _program(pair, SIGNALLED[case]) as process:
        launch_id = _id(process)
        process.send_signal(signal.SIGINT)
        code, said = _status(process)
        assert code == -signal.SIGINT, said
        assert "\nKeyboardInterrupt\n" in said
        _check_cancelled(pair, launch_id)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("case", ["wait", "asyncio"])
def test_a_program_that_is_killed(pair: Pair, case: str, number: signal.Signals) -> None:
    with pair.unchanged(), _program(pair, SIGNALLED[case]) as process:
        launch_id = _id(process)
        process.send_signal(number)
        code, _ = _status(process)
        assert code == -number
    _await_cancelled(pair, launch_id)


def test_an_interrupt_while_it_starts(own_pair: Pair) -> None:
    point = "containerizer.launch.spawn.after"
    with own_pair.unchanged(), _program(own_pair, """
        with Client() as client:
            print("starts", flush=True)
            with client.launch(COMMAND):
                print("never")
    """) as process:  # fmt: skip
        own_pair.points.arm(point, "wait")
        assert _id(process) == "starts"
        own_pair.points.await_hit(point)
        process.send_signal(signal.SIGINT)
        code, said = _status(process)
        assert code == -signal.SIGINT, said
        own_pair.points.disarm(point)


def test_two_interrupts_leave_at_once(own_pair: Pair) -> None:
    point = "containerizer.undo.spawn.before"
    with own_pair.unchanged(timeout_s=20), _program(own_pair, SIGNALLED["wait"]) as process:
        own_pair.points.arm(point, "wait")
        _id(process)
        process.send_signal(signal.SIGINT)
        own_pair.points.await_hit(point)
        assert process.poll() is None, "it waits for the cleanup, which is held"
        process.send_signal(signal.SIGINT)
        code, said = _status(process)
        assert code == -signal.SIGINT, said
        own_pair.points.disarm(point)


def test_a_forked_child_holds_nothing_of_a_parent_that_is_killed(pair: Pair) -> None:
    with pair.unchanged(), _program(pair, """
        with Client() as client, client.launch(COMMAND) as launch:
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            print(child, flush=True)
            say(launch)
            launch.wait()
    """) as process:  # fmt: skip
        child = os.pidfd_open(int(_id(process)))
        try:
            launch_id = _id(process)
            process.kill()
            process.wait(20)
            until(lambda: not pair.calls.living(), "the container is gone while the child lives")
            signal.pidfd_send_signal(child, signal.SIGKILL)
        finally:
            os.close(child)
    _check_cancelled(pair, launch_id)


@pytest.mark.parametrize("use", ["client.get(launch.id)", "Client()", "client.close()", "sys.exit(0)", "launch.wait()"])
def test_a_forked_child_leaves_its_parents_launch_alone(pair: Pair, use: str) -> None:
    """What it can't do it is told, and its end is its own."""
    with pair.unchanged(), _program(pair, f"""
        with Client() as client, client.launch(COMMAND) as launch:
            say(launch)
            chunks = launch.output()
            next(chunks)
            child = os.fork()
            if child == 0:
                try:
                    {use}
                except RuntimeError as error:
                    assert "fork" in str(error), error
                del client, launch, chunks
                gc.collect()
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert client.get(launch.id).state == 3
            launch.kill()
            assert launch.wait(timeout=20).signal == 9
        sys.exit(7)
    """) as process:  # fmt: skip
        _id(process)
        code, said = _status(process)
        assert code == 7, said


def test_clients_after_a_fork_that_came_first(pair: Pair) -> None:
    with pair.unchanged(), _program(pair, """
        def work(number):
            with Client() as client:
                return client.run(["echo", str(number)]).stdout
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(work, range(4)) == [b"0\\n", b"1\\n", b"2\\n", b"3\\n"]
        print("done", flush=True)
        sys.exit(7)
    """) as process:  # fmt: skip
        assert _id(process) == "done"
        assert _status(process)[0] == 7
