"""The discovered tasks that do not fit into a completion: the worker inserts them before it reports the task."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from taskd_client._batches import Batch
from taskd_client._connection import Target
from taskd_client._time import Pauses
from taskd_client.client import AsyncClient, InsertStatus
from taskd_client.errors import Unavailable
from taskd_client.source import Completion
from taskd_client.v1 import taskd_pb2 as pb

logger = logging.getLogger("taskd.worker")

# The most tasks that a completion may discover.
_MOST_DISCOVERED = 10_000
# The bytes of discovered tasks in a completion. taskd takes 8 MiB, with the result.
_MOST_BYTES = 2 << 20


class Surplus:
    """Inserts what is too much for a completion."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client: AsyncClient | None = None

    async def insert(self, completion: Completion, not_stored: list[str]) -> Completion:
        """Inserts the discovered tasks that do not fit, and returns the completion without them.

        What is wrong with tasks that taskd rejects is added to `not_stored`. A task that is inserted twice is a
        duplicate, so an attempt that fails after this loses nothing. It goes on for as long as taskd is away: the
        worker cancels it when the lease ends. Raises an error of taskd that does not pass.
        """
        own: list[pb.NewTask] = []
        surplus: list[pb.NewTask] = []
        size = 0
        for task in completion.discovered:
            size += task.ByteSize() + 8
            is_too_much = size > _MOST_BYTES or len(own) >= _MOST_DISCOVERED
            # Only taskd knows the queue of an output, and refuses a completion with too many of them.
            (surplus if is_too_much and not task.port else own).append(task)
        if not surplus:
            return completion
        batch = Batch()
        for task in surplus:
            if not task.traceparent:
                task.traceparent = completion.lease.traceparent
            if not batch.add(task):
                await self._insert(batch.take(), not_stored)
                batch.add(task)
        await self._insert(batch.take(), not_stored)
        return replace(completion, discovered=own)

    async def _insert(self, tasks: list[pb.NewTask], not_stored: list[str]) -> None:
        if self._client is None:
            self._client = AsyncClient.of(self._target)
        pause = Pauses()
        while True:
            try:
                answers = await self._client.insert_messages(tasks)
            except Unavailable as error:
                logger.warning("taskd takes no discovered tasks, trying again: %s", error)
                await asyncio.sleep(pause.next())
            else:
                not_stored.extend(one.error for one in answers if one.status is InsertStatus.REJECTED)
                return

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
