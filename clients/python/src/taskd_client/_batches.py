"""Batches of tasks for long inserts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from contextlib import suppress

from taskd_client.task import NewTask
from taskd_client.v1 import taskd_pb2 as pb

# The bounds of one insert: tasks, and bytes (one larger task goes alone).
MAX_TASKS = 1000
_MAX_BYTES = 4 << 20
# Batches of a long insert that are on their way at once.
AT_ONCE = 4
# How long a task waits for others of its batch.
LINGER = 0.2


class Batch:
    """The tasks of the next insert."""

    def __init__(self) -> None:
        self._tasks: list[pb.NewTask] = []
        self._bytes = 0
        self._began = 0.0

    def __bool__(self) -> bool:
        return bool(self._tasks)

    @property
    def wait(self) -> float:
        """The time that is left for more tasks."""
        return self._began + LINGER - time.monotonic()

    def add(self, task: pb.NewTask) -> bool:
        """Adds the task, if there is room for it."""
        size = task.ByteSize()
        if not self._tasks:
            self._began = time.monotonic()
        elif len(self._tasks) == MAX_TASKS or self._bytes + size > _MAX_BYTES:
            return False
        self._tasks.append(task)
        self._bytes += size
        return True

    def take(self) -> list[pb.NewTask]:
        """The tasks. The batch is empty then."""
        tasks, self._tasks, self._bytes = self._tasks, [], 0
        return tasks


def cut(tasks: Iterable[NewTask]) -> Iterator[list[pb.NewTask]]:
    """Batches that are full, or late when the next task comes."""
    batch = Batch()
    for task in tasks:
        message = task.to_message()
        if batch and batch.wait <= 0:
            yield batch.take()
        if not batch.add(message):
            yield batch.take()
            batch.add(message)
    if batch:
        yield batch.take()


async def cut_async(tasks: AsyncIterable[NewTask]) -> AsyncGenerator[list[pb.NewTask], None]:
    """Batches that are full or late. It reads one batch ahead."""
    batch = Batch()
    has_tasks, is_due, is_taken = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async for task in tasks:
                message = task.to_message()
                while not batch.add(message):
                    is_taken.clear()
                    is_due.set()
                    await is_taken.wait()
                has_tasks.set()
        finally:
            has_tasks.set()
            is_due.set()

    # One task reads the source from its beginning to its end, so the source may use time-outs.
    reading = asyncio.create_task(read())
    try:
        while True:
            await has_tasks.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(batch.wait):
                    await is_due.wait()
            is_over = reading.done()
            if is_over:
                # It raises the error of the source.
                reading.result()
            has_tasks.clear()
            is_due.clear()
            is_taken.set()
            if batch:
                yield batch.take()
            if is_over:
                return
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
