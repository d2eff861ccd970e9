"""The client for programs without an event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

from taskd._connection import DEFAULT_ADDRESS, TLS, Addresses
from taskd._time import Seconds
from taskd.client import AsyncClient, Explanation, InsertCounts, Inserted
from taskd.errors import Unavailable
from taskd.source import Answer
from taskd.task import Backoff, Gap, NewTask, Priority, TaskEvent, TaskInfo, TaskStatus

T = TypeVar("T")

# Tasks that a long insert reads ahead.
_READ_AHEAD = 1000


class Client:
    """Calls taskd from any thread. One client serves a whole program, also one that forks before its first call.

    with Client("127.0.0.1:7601") as client:
        client.insert("pages", "https://example.com/", payload={"depth": 2})

    Its methods are those of AsyncClient, which does the work on a thread of its own.
    """

    def __init__(
        self,
        address: Addresses = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: TLS | bool | None = None,
        patience: Seconds = 60.0,
    ) -> None:
        """Connects with the first call; see AsyncClient."""
        self._client = AsyncClient(address, token=token, tls=tls, patience=patience)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections and the thread. Calls of other threads that are under way raise Unavailable."""
        with self._lock:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None or self._process != os.getpid():
                return
            self._loop = self._thread = None
        asyncio.run_coroutine_threadsafe(self._end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def insert(
        self,
        queue: str,
        key: str | bytes = "",
        *,
        payload: object = None,
        replicas: int | None = None,
        priority: Priority | None = None,
        delay: Seconds | None = None,
        not_before: datetime | None = None,
        lease: Seconds | None = None,
        max_attempts: int | None = None,
        headers: Mapping[str, str] | None = None,
        traceparent: str = "",
        backoff: Backoff | None = None,
        idempotency_key: str = "",
        wait: Seconds | None = None,
    ) -> Inserted:
        """Inserts one task. Raises TaskRejected if it is wrong.

        With `wait` it answers when the task is final, at the latest after so many seconds: with its status and results.
        """
        return self._run(
            self._client.insert(
                queue,
                key,
                payload=payload,
                replicas=replicas,
                priority=priority,
                delay=delay,
                not_before=not_before,
                lease=lease,
                max_attempts=max_attempts,
                headers=headers,
                traceparent=traceparent,
                backoff=backoff,
                idempotency_key=idempotency_key,
                wait=wait,
            )
        )

    def insert_batch(self, tasks: Sequence[NewTask], *, wait: Seconds | None = None) -> Sequence[Inserted]:
        """Inserts some tasks, and answers task by task, in order. A rejected one does not hold up the others.

        With `wait` it answers when all tasks are final, at the latest after so many seconds: with their statuses, and
        the results of completed ones. At most 1,000 tasks.
        """
        return self._run(self._client.insert_batch(tasks, wait=wait))

    def insert_many(self, tasks: Iterable[NewTask]) -> InsertCounts:
        """Inserts as many tasks as there are, in batches and in bounded memory, and counts the answers."""
        return self._run(self._client.insert_many(self._read(tasks)))

    def insert_each(self, tasks: Iterable[NewTask]) -> Iterator[Inserted]:
        """The same as `insert_many`, with the answer to each task, in order. It inserts as the caller reads."""
        return self._iterate(self._client.insert_each(self._read(tasks)))

    def get_task(self, task_id: str) -> TaskInfo:
        """Reads a task with its payload and history. Raises NotFound."""
        return self._run(self._client.get_task(task_id))

    def list_tasks(
        self,
        queue: str = "",
        *,
        statuses: Collection[TaskStatus] = (),
        key: str | bytes = "",
        key_prefix: str | bytes = "",
        headers: Mapping[str, str] | None = None,
        worker: str = "",
        since: datetime | None = None,
        until: datetime | None = None,
        page: int = 100,
    ) -> Iterator[TaskInfo]:
        """Lists tasks without payloads, the newest first, page by page."""
        return self._iterate(
            self._client.list_tasks(
                queue,
                statuses=statuses,
                key=key,
                key_prefix=key_prefix,
                headers=headers,
                worker=worker,
                since=since,
                until=until,
                page=page,
            )
        )

    def wait(self, task_id: str, *, timeout: Seconds | None = None) -> TaskInfo:
        """Waits until a task is COMPLETED, DEAD or CANCELLED, and its results are stored. Raises TimeoutError."""
        return self._run(self._client.wait(task_id, timeout=timeout))

    def watch(self, task_id: str, *, last_event_id: str = "") -> Iterator[TaskEvent]:
        """Watches a task: its status now, then each change, until a final one. Raises NotFound."""
        return self._iterate(self._client.watch(task_id, last_event_id=last_event_id), at_once=1)

    def watch_queue(self, queue: str, *, last_event_id: str = "") -> Iterator[TaskEvent | Gap]:
        """Watches all tasks of a queue, from now on or behind an event. It ends with the caller."""
        return self._iterate(self._client.watch_queue(queue, last_event_id=last_event_id), at_once=1)

    def explain(
        self,
        task_id: str = "",
        *,
        queue: str = "",
        key: str | bytes = "",
        worker: str = "",
    ) -> Explanation:
        """Explains where a task is, and with `worker` why that worker does not get it. Raises NotFound."""
        return self._run(self._client.explain(task_id, queue=queue, key=key, worker=worker))

    def cancel(self, ids: str | Iterable[str]) -> Sequence[Answer]:
        """Cancels tasks, and answers id by id, in order. TRY_LATER: taskd has stored the wish, and carries it out."""
        return self._run(self._client.cancel(ids))

    # The thread.

    async def _end(self) -> None:
        # Somebody may wait for a call, or for the next event of a watch.
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()
        await self._client.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._start())
        try:
            return future.result()
        except CancelledError:
            raise Unavailable("the client was closed during the call") from None
        except BaseException:
            # Ctrl-C: the call ends, too.
            future.cancel()
            raise

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A fork copies no threads.
            if self._loop is None or self._process != os.getpid():
                self._process = os.getpid()
                self._client.forget_connection()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="taskd-client", daemon=True)
                self._thread.start()
            return self._loop

    async def _read(self, tasks: Iterable[NewTask]) -> AsyncIterator[NewTask]:
        """The caller's tasks, read on other threads: its generator may block, and the calls go on meanwhile."""
        iterator = iter(tasks)
        while chunk := await asyncio.to_thread(lambda: [*itertools.islice(iterator, _READ_AHEAD)]):
            for task in chunk:
                yield task

    def _iterate(self, items: AsyncIterator[T], at_once: int = _READ_AHEAD) -> Iterator[T]:
        async def next_chunk() -> tuple[Sequence[T], bool]:
            chunk: list[T] = []
            async for item in items:
                chunk.append(item)
                if len(chunk) == at_once:
                    return chunk, True
            return chunk, False

        async def close() -> None:
            aclose = getattr(items, "aclose", None)
            if aclose is not None:
                await aclose()

        loop = self._start()
        try:
            more = True
            while more:
                if self._loop is not loop:
                    raise Unavailable("the client was closed before its answers were read")
                chunk, more = self._run(next_chunk())
                yield from chunk
        finally:
            # A client that was closed has ended them.
            if self._loop is loop:
                self._run(close())
