#!/usr/bin/env python3
"""The blocking client: a command to its end, one that is cancelled, and what a failure says.

python examples/blocking.py [RUN_DIR]
"""

from __future__ import annotations

import sys

from tightship.client import Client, TightshipError

SPEC = "memory { limit: 67108864 } tasks { limit: 20 }"


def main() -> None:
    with Client(sys.argv[1] if len(sys.argv) > 1 else None) as client:
        # All at once: output in memory, the record, what the cleanup did.
        done = client.run(["sh", "-c", "echo hello from Python; exit 3"], spec=SPEC, timeout=30.0)
        print(f"exit status {done.record.exit_code}, output: {done.stdout.decode().strip()}")
        assert (done.stdout, done.record.exit_code) == (b"hello from Python\n", 3)

        # As it comes. Leaving the block, however that happens, ends the container and waits until nothing is left.
        with client.launch(["sh", "-c", "echo working; sleep 600"], spec=SPEC) as launch:
            for chunk in launch.output("stdout"):
                print(f"{launch.name} says: {chunk.data.decode().strip()}")
                break
        record = launch.wait()
        print(f"{record.name}: {record.Reason.Name(record.reason)} ({record.cancel_reason})")
        assert record.reason == record.CANCELLED

        left = client.audit().findings
        print(f"audit: {len(left)} left")
        assert not left

        try:
            client.run(["true"], spec="memory { limit: lots }")
        except TightshipError as error:
            print(f"{error.code.name} {error.reason}: {error.message} (field {error.field})")
            assert error.field == "memory.limit"
        else:
            raise AssertionError("a wrong spec was taken")


if __name__ == "__main__":
    main()
