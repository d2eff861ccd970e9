"""The client for programs without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, TypeVar

from taskd_client._batches import AT_ONCE, LINGER, Batch
from taskd_client._connection import DEFAULT_ADDRESS, TLS, Addresses
from taskd_client._time import Seconds
from taskd_client.client import AsyncClient, Explanation, InsertCounts, Inserted
from taskd_client.errors import Unavailable
from taskd_client.operator import DeadLetter, LetterKind, LettersChanged, QueueCounts
from taskd_client.source import Answer
from taskd_client.task import Backoff, Gap, NewTask, NewTree, Priority, TaskEvent, TaskInfo, TaskStatus
from taskd_client.topics import Published, Record
from taskd_client.v1 import taskd_pb2 as pb

T = TypeVar("T")


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
        deadline: datetime | None = None,
        finish_within: Seconds | None = None,
        idempotency_key: str = "",
        limit_key: str = "",
        sequence: str = "",
        on_dead: Literal["next", "hold"] = "next",
        tree: str | NewTree = "",
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
                deadline=deadline,
                finish_within=finish_within,
                idempotency_key=idempotency_key,
                limit_key=limit_key,
                sequence=sequence,
                on_dead=on_dead,
                tree=tree,
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
        counts = InsertCounts()
        for inserted in self.insert_each(tasks):
            counts.add(inserted)
        return counts

    def insert_each(self, tasks: Iterable[NewTask]) -> Iterator[Inserted]:
        """The same as `insert_many`, with the answer to each task, in order. It inserts as the caller reads."""
        inserts = _Inserts(self)
        try:
            for task in tasks:
                yield from inserts.add(task.to_message())
            yield from inserts.end()
        finally:
            inserts.cancel()

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
            ),
            at_once=page,
        )

    def wait(self, task_id: str, *, timeout: Seconds | None = None) -> TaskInfo:
        """Waits until a task is COMPLETED, DEAD or CANCELLED, and its results are stored. Raises TimeoutError."""
        return self._run(self._client.wait(task_id, timeout=timeout))

    def wait_drained(self, queue: str, *, timeout: Seconds | None = None) -> None:
        """Waits until nothing of a queue is unfinished or on its way. Raises NotFound, TimeoutError."""
        self._run(self._client.wait_drained(queue, timeout=timeout))

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

    def publish(self, topic: str, records: Iterable[Record]) -> list[Published]:
        """Publishes records to a topic, and answers record by record, in order.

        A call whose answer was lost is sent again, so a record may be there twice: give it an `id` by which readers
        can tell.
        """
        return self._run(self._client.publish(topic, records))

    def queues(self, queue: str = "") -> Sequence[QueueCounts]:
        """The counts of a queue, or of all that have unfinished tasks or had some lately."""
        return self._run(self._client.queues(queue))

    def pause_queue(self, queue: str) -> bool:
        """Pauses a queue: no worker gets anything of it. False: it was paused before."""
        return self._run(self._client.pause_queue(queue))

    def resume_queue(self, queue: str) -> bool:
        """Resumes a paused queue. False: it was not paused."""
        return self._run(self._client.resume_queue(queue))

    def dead_letters(
        self,
        queue: str = "",
        *,
        kind: LetterKind | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        reason: str = "",
        page: int = 100,
    ) -> Iterator[DeadLetter]:
        """Lists dead letters, the newest first, page by page. `reason`, the beginning of theirs, needs a queue."""
        letters = self._client.dead_letters(queue, kind=kind, since=since, until=until, reason=reason, page=page)
        return self._iterate(letters, at_once=page)

    def retry_dead_letters(self, ids: str | Iterable[str]) -> LettersChanged:
        """Sends tasks again, and removes their letters. Dead tasks keep their ids."""
        return self._run(self._client.retry_dead_letters(ids))

    def remove_dead_letters(self, ids: str | Iterable[str]) -> LettersChanged:
        """Removes letters for good. Of a dead task only the key stays."""
        return self._run(self._client.remove_dead_letters(ids))

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
        return _result(asyncio.run_coroutine_threadsafe(call, self._start()))

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

    def _iterate(self, items: AsyncIterator[T], at_once: int) -> Iterator[T]:
        reading: asyncio.Task[Any] | None = None

        async def next_chunk() -> tuple[Sequence[T], bool]:
            nonlocal reading
            reading = asyncio.current_task()
            chunk: list[T] = []
            async for item in items:
                chunk.append(item)
                if len(chunk) == at_once:
                    return chunk, True
            return chunk, False

        async def close() -> None:
            if reading is not None and not reading.done():
                # Ctrl-C. What is being read cannot be closed.
                reading.cancel()
                await asyncio.wait({reading})
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


class _Inserts:
    """A long insert. The caller's thread reads the tasks into a batch, because a source may belong to its thread.

    The loop sends a batch that is late: the source may block that thread.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = client._start()
        self._lock = threading.Lock()
        self._batch = Batch()
        self._calls: deque[Future[list[Inserted]]] = deque()
        self._has_timer = False
        self._is_over = False

    def add(self, task: pb.NewTask) -> Iterator[Inserted]:
        """Adds a task, and yields the answers that are there."""
        while not self._put(task):
            yield from self._wait_for_calls(AT_ONCE - 1)
            self._send()
        while self._calls and self._calls[0].done():
            yield from self._oldest()

    def end(self) -> Iterator[Inserted]:
        """Sends the rest, and yields the other answers."""
        yield from self._wait_for_calls(AT_ONCE - 1)
        self._send()
        yield from self._wait_for_calls(0)

    def cancel(self) -> None:
        """Ends the calls under way."""
        with self._lock:
            self._is_over = True
        for call in self._calls:
            call.cancel()

    def _put(self, task: pb.NewTask) -> bool:
        with self._lock:
            if not self._batch.add(task):
                return False
            if not self._has_timer:
                self._check_open()
                self._loop.call_soon_threadsafe(self._send_late)
                self._has_timer = True
        return True

    def _send_late(self) -> None:
        """Runs on the loop while there is a batch."""
        with self._lock:
            self._has_timer = bool(self._batch) and not self._is_over and self._is_open
            if not self._has_timer:
                return
            wait = self._batch.wait
            # The caller's thread has not read the answers if the source blocks it.
            if wait <= 0 and (len(self._calls) < AT_ONCE or self._calls[0].done()):
                self._call()
        self._loop.call_later(wait if wait > 0 else LINGER, self._send_late)

    def _send(self) -> None:
        with self._lock:
            # The loop may have sent it.
            if self._batch:
                self._check_open()
                self._call()

    def _call(self) -> None:
        call = self._client._client._insert(self._batch.take())
        self._calls.append(asyncio.run_coroutine_threadsafe(call, self._loop))

    @property
    def _is_open(self) -> bool:
        return self._client._loop is self._loop

    def _check_open(self) -> None:
        if not self._is_open:
            raise Unavailable("the client was closed before its tasks were inserted")

    def _wait_for_calls(self, left: int) -> Iterator[Inserted]:
        while len(self._calls) > left:
            yield from self._oldest()

    def _oldest(self) -> Sequence[Inserted]:
        answers = _result(self._calls[0])
        self._calls.popleft()
        return answers


def _result(call: Future[T]) -> T:
    try:
        return call.result()
    except CancelledError:
        raise Unavailable("the client was closed during the call") from None
    except BaseException:
        # Ctrl-C: the call ends, too.
        call.cancel()
        raise
