#!/usr/bin/env python3
"""The asyncio client: many short checks, a few at a time, each with a limit; the slow ones are cancelled.

python examples/asyncio_many.py [RUN_DIR [NUMBER]]
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from tightship.client import AsyncClient, TightshipError

AT_A_TIME = 8


async def check(client: AsyncClient, number: int) -> str:
    """Every fifth check hangs. The time-out of asyncio cancels the task, and with it goes the container."""
    script = "sleep 600" if number % 5 == 4 else f"test {number % 3} -ne 2"
    try:
        async with asyncio.timeout(1.0 if number % 5 == 4 else 60.0):
            done = await client.run(
                ["sh", "-c", script], spec="memory { limit: 67108864 }", labels={"check": f"{number}"}
            )
    except TimeoutError:
        return "cancelled"
    except TightshipError as error:
        return f"failed: {error}"
    return "passed" if done.record.exit_code == 0 else "not passed"


async def main() -> None:
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    places = asyncio.Semaphore(AT_A_TIME)

    async with AsyncClient(sys.argv[1] if len(sys.argv) > 1 else None) as client:

        async def one(index: int) -> str:
            async with places:
                return await check(client, index)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(number)]
        results = Counter(task.result() for task in tasks)
        print(", ".join(f"{count} {result}" for result, count in sorted(results.items())))

        living = await client.list(recursive=True)
        left = (await client.audit()).findings
        print(f"{len(living)} living, audit: {len(left)} left")
        assert not living and not left
        assert results["cancelled"] == number // 5


if __name__ == "__main__":
    asyncio.run(main())
