"""Tests of handlers without a server.

from taskd_client.testing import MockSource

def test_fetch():
    source = MockSource()
    source.insert("pages", "/", payload={"depth": 1})
    source.run(worker)
    assert source.result("/") == {"length": 1}
    assert source.discovered == ["/a"]
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from taskd_client._codec import Encoding, decode
from taskd_client.errors import EndOfSource
from taskd_client.source import Answer, Completion, ItemStatus, Lease, Rejection
from taskd_client.task import Limit, NewTask, Priority, Task, key_text, read_priority
from taskd_client.v1 import taskd_pb2 as pb
from taskd_client.worker import Worker

# Without time, a handler that puts a task off until something changes would do so for ever.
_MOST_PUT_OFF = 100

__all__ = ["MockSource", "MockTask", "make_task"]


def make_task(
    payload: Any = None,
    *,
    key: str = "key",
    queue: str = "queue",
    headers: dict[str, str] | None = None,
    attempt: int = 1,
    limit_key: str = "",
) -> Task[Any]:
    """A task to call a handler with."""
    return Task(
        id=str(uuid4()),
        queue=queue,
        key=key,
        payload=payload,
        headers=headers or {},
        attempt=attempt,
        limit_key=limit_key,
    )


@dataclass(slots=True, kw_only=True)
class MockTask:
    """A task of a MockSource, and what became of it."""

    id: str
    queue: str
    key: str
    status: str = "QUEUED"
    """QUEUED, ASSIGNED, COMPLETED or DEAD; DELAYED after it was put off a hundred times."""
    result: Any = None
    reasons: list[str] = field(default_factory=list)
    """Why its attempts failed, the earliest first."""
    put_off: int = 0
    """How often its handler put it off, or a worker that stopped gave it back."""
    limits: list[Limit] = field(default_factory=list)
    """What its handler has said by `hold` and `pace`, attempt by attempt."""
    discovered: list[str] = field(default_factory=list)
    """The keys that its handler discovered."""
    message: pb.NewTask = field(repr=False)


class MockSource:
    """A queue in memory that behaves as taskd does, without time: it knows seen keys, attempts and dead tasks.

    Delays, backoffs and leases pass at once; each task is for one worker. `run` ends when no task is left.
    """

    def __init__(self, *, max_attempts: int = 5) -> None:
        self.tasks: dict[tuple[str, str], MockTask] = {}
        """All tasks, by queue and key, in the order of their inserts."""
        self.discovered: list[str] = []
        """The keys of discovered tasks that were new, in order."""
        self._max_attempts = max_attempts
        self._waiting: deque[MockTask] = deque()
        self._leased: dict[str, MockTask] = {}
        self._changed = asyncio.Event()
        self._is_interrupted = False
        # Empty: all.
        self._queues: Sequence[str] = ()

    def insert(
        self,
        queue: str,
        key: str,
        *,
        payload: object = None,
        headers: dict[str, str] | None = None,
        limit_key: str = "",
    ) -> bool:
        """Inserts a task. False: the key was seen before."""
        task = NewTask(queue=queue, key=key, payload=payload, headers=headers, limit_key=limit_key)
        return self._add(task.to_message())

    def task(self, key: str, queue: str | None = None) -> MockTask:
        """The task with this key; with `queue`, of that queue."""
        for task in self.tasks.values():
            if task.key == key and queue in (None, task.queue):
                return task
        raise KeyError(f"there is no task {key!r}; there are {[task.key for task in self.tasks.values()]}")

    def result(self, key: str, queue: str | None = None) -> Any:
        """The result of a task as its readers see it: what went through JSON comes from JSON."""
        task = self.task(key, queue)
        if task.status != "COMPLETED":
            raise AssertionError(f"{key!r} is {task.status}: {task.reasons or 'it was not tried'}")
        return task.result

    def run(self, worker: Worker) -> None:
        """Lets the worker do all tasks of its queues, and those that it discovers."""
        self._queues = worker.queues
        self._waiting = deque(task for task in self.tasks.values() if task.status == "QUEUED" and self._is_asked(task))
        asyncio.run(worker.serve(self))

    def _is_asked(self, task: MockTask) -> bool:
        return not self._queues or task.queue in self._queues

    def _add(self, message: pb.NewTask) -> bool:
        key = key_text(message.key)
        if (message.queue, key) in self.tasks:
            return False
        task = MockTask(id=str(uuid4()), queue=message.queue, key=key, message=message)
        self.tasks[message.queue, key] = task
        if self._is_asked(task):
            self._waiting.append(task)
        return True

    # The boundary.

    async def get(self, max_tasks: int) -> Sequence[Lease]:
        while not self._waiting and not self._is_interrupted:
            if not self._leased:
                raise EndOfSource
            self._changed.clear()
            await self._changed.wait()
        if self._is_interrupted:
            return []
        return [self._lease(self._waiting.popleft()) for _ in range(min(max_tasks, len(self._waiting)))]

    def _lease(self, task: MockTask) -> Lease:
        task.status = "ASSIGNED"
        token = str(uuid4())
        self._leased[token] = task
        message = task.message
        return Lease(
            id=task.id,
            queue=task.queue,
            key=message.key,
            payload=message.payload,
            encoding=Encoding(message.payload_encoding),
            token=token,
            headers=dict(message.headers),
            attempt=len(task.reasons) + 1,
            priority=read_priority(message.priority) if message.priority else Priority.MEDIUM,
            limit_key=message.limit_key,
        )

    def interrupt(self) -> None:
        self._is_interrupted = True
        self._changed.set()

    async def complete(self, completions: Sequence[Completion]) -> Sequence[Answer]:
        return [self._complete(one) for one in completions]

    def _complete(self, completion: Completion) -> Answer:
        task = self._leased.pop(completion.lease.token, None)
        if task is None:
            return Answer(ItemStatus.LEASE_LOST)
        if completion.limit is not None:
            task.limits.append(completion.limit)
        task.status = "COMPLETED"
        task.result = decode(completion.result, completion.encoding)
        for found in completion.discovered:
            key = key_text(found.key)
            task.discovered.append(key)
            if self._add(found):
                self.discovered.append(key)
        self._changed.set()
        return Answer(ItemStatus.OK)

    async def reject(self, rejections: Sequence[Rejection]) -> Sequence[Answer]:
        return [self._reject(one) for one in rejections]

    def _reject(self, rejection: Rejection) -> Answer:
        task = self._leased.pop(rejection.lease.token, None)
        if task is None:
            return Answer(ItemStatus.LEASE_LOST)
        if rejection.limit is not None:
            task.limits.append(rejection.limit)
        if rejection.not_started:
            task.put_off += 1
        else:
            task.reasons.append(rejection.reason)
        is_left = task.put_off >= _MOST_PUT_OFF
        if is_left:
            task.status = "DELAYED"
        elif rejection.not_started or (rejection.retry and len(task.reasons) < self._max_attempts):
            task.status = "QUEUED"
            self._waiting.append(task)
        else:
            task.status = "DEAD"
        self._changed.set()
        return Answer(ItemStatus.OK)

    async def extend(self, leases: Sequence[Lease]) -> Sequence[Answer]:
        return [Answer(ItemStatus.OK if lease.token in self._leased else ItemStatus.LEASE_LOST) for lease in leases]

    async def close(self) -> None:
        # The next run may have another event loop.
        self._changed = asyncio.Event()
        self._is_interrupted = False
