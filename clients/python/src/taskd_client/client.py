"""The async client: inserts tasks, and reads, lists and cancels them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Literal, TypeVar

from taskd_client._batches import AT_ONCE, MAX_TASKS, cut, cut_async
from taskd_client._codec import decode
from taskd_client._connection import (
    BOOKS,
    CANCEL,
    DEFAULT_ADDRESS,
    EXPLAIN,
    GET_QUEUE,
    GET_TASK,
    INSERT,
    LIST,
    LIST_LETTERS,
    PAUSE,
    PUBLISH,
    PURGE_LETTERS,
    RESUME,
    RETRY_LETTERS,
    TLS,
    WATCH_QUEUE,
    WATCH_TASK,
    Addresses,
    Connection,
    Method,
    Target,
    patiently,
)
from taskd_client._grpc_source import read_answer
from taskd_client._time import Pauses, Seconds, seconds, to_datetime, to_duration
from taskd_client.errors import InvalidRequest, TaskdError, TaskRejected, Unavailable, Unsupported
from taskd_client.operator import (
    DeadLetter,
    LetterKind,
    LettersChanged,
    QueueCounts,
    letter_filter,
    read_letter,
    read_queue,
)
from taskd_client.source import Answer
from taskd_client.task import (
    TO_STATUS,
    Backoff,
    Gap,
    NewTask,
    NewTree,
    Priority,
    TaskEvent,
    TaskInfo,
    TaskResult,
    TaskStatus,
    key_bytes,
    read_event,
    read_result,
    read_status,
    read_task,
)
from taskd_client.topics import MAX_RECORDS, Published, PublishStatus, Record, first_of, read_published
from taskd_client.v1 import taskd_pb2 as pb

logger = logging.getLogger("taskd.client")

WatchT = TypeVar("WatchT", pb.WatchTaskRequest, pb.WatchQueueRequest)

# The results in the answer of an insert that waits: as many as taskd gives.
_MAX_RESULT_BYTES = 32 << 20
# taskd takes so many ids in a call.
_MAX_IDS = 1000
_TIMEOUT = 30.0
_FINAL_LOOK = 2.0
# How long behind the end of a wait taskd's answer may come.
_ANSWER_COMES = 1.0
# A watch that lived for so long was open, though nothing may have happened.
_WAS_OPEN = 5.0
# How long `wait` tries to watch before it asks instead.
_WAIT_PATIENCE = 1.0


class InsertStatus(Enum):
    """The kinds of answers to a new task."""

    CREATED = "CREATED"
    """Stored: taskd keeps the task, whatever is killed."""
    DUPLICATE = "DUPLICATE"
    """The queue has, or had, a task with this key; `id` names it. Also the answer to a call that had to be repeated."""
    REJECTED = "REJECTED"
    """The task is wrong; `error` says why."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """The answer to one new task."""

    status: InsertStatus
    id: str = ""
    error: str = ""
    task_status: TaskStatus | None = None
    """With `wait`: the status of the task at the end of the wait."""
    results: tuple[TaskResult, ...] = ()
    """With `wait`: those of a completed task, one for each worker."""
    tree: str = ""
    """The tree that the task is in, if the insert named one. That of a duplicate is the one that had it first."""

    @property
    def is_new(self) -> bool:
        return self.status is InsertStatus.CREATED

    @property
    def is_open(self) -> bool:
        """True for a task that was not final at the end of the wait."""
        is_final = self.task_status is not None and self.task_status.is_final
        return self.status is not InsertStatus.REJECTED and not is_final

    @property
    def result(self) -> Any:
        """The first worker's result, if the task was completed in time."""
        return self.results[0].value if self.results else None


@dataclass(slots=True)
class InsertCounts:
    """The answers to many new tasks, counted."""

    created: int = 0
    duplicates: int = 0
    rejected: int = 0
    errors: list[str] = field(default_factory=list)
    """The first ten reasons of rejected tasks."""

    def add(self, inserted: Inserted) -> None:
        match inserted.status:
            case InsertStatus.CREATED:
                self.created += 1
            case InsertStatus.DUPLICATE:
                self.duplicates += 1
            case InsertStatus.REJECTED:
                self.rejected += 1
                if len(self.errors) < 10:
                    self.errors.append(inserted.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The place of a task, and the reason why a worker does not get it."""

    place: str
    says: str
    since: datetime | None
    next: str
    next_at: datetime | None
    notes: tuple[str, ...]
    worker_may_get: bool | None
    """None if no worker was named."""
    worker_says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A choice of tasks. All parts must fit. `statuses`, `key_prefix` and `headers` need a queue.

    A `key` without a queue is looked up in every queue, or in the open ones if there are more than
    10,000; it takes no `worker`.
    """

    queue: str = ""
    statuses: Collection[TaskStatus] = ()
    key: str | bytes = ""
    key_prefix: str | bytes = ""
    headers: Mapping[str, str] | None = None
    worker: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def to_message(self) -> pb.TaskFilter:
        message = pb.TaskFilter(
            queue=self.queue,
            statuses=[TO_STATUS[TaskStatus(status)] for status in self.statuses],
            key=key_bytes(self.key),
            key_prefix=key_bytes(self.key_prefix),
            headers=self.headers,
            worker=self.worker,
        )
        if self.since is not None:
            message.since.FromDatetime(self.since.astimezone())
        if self.until is not None:
            message.until.FromDatetime(self.until.astimezone())
        return message


class AsyncClient:
    """Calls taskd from a program with an event loop. `Client` does the same for all others.

    async with AsyncClient("127.0.0.1:7601") as client:
        await client.insert("pages", "https://example.com/", payload={"depth": 2})
    """

    def __init__(
        self,
        address: Addresses = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: TLS | bool | None = None,
        patience: Seconds = 60.0,
    ) -> None:
        """Connects with the first call.

        address: `host:port` of taskd's gRPC, or several: the client takes the next one when one is away.
        token: the access token; without one, the variable TASKD_TOKEN has it.
        patience: for so long it repeats a call that met a taskd that is away or asks to try later. Then it raises
            Unavailable.
        """
        self._target = Target.read(address, token, tls)
        self._patience = seconds(patience)
        self._open: Connection | None = None

    @classmethod
    def of(cls, target: Target) -> AsyncClient:
        """A client of the same taskd as a worker."""
        client = cls(patience=60.0)
        client._target = target
        return client

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        connection, self._open = self._open, None
        if connection:
            await connection.close()

    def forget_connection(self) -> None:
        """Leaves the connection as it is: it belongs to an event loop that is gone."""
        self._open = None

    @property
    def _connection(self) -> Connection:
        if self._open is None:
            self._open = Connection(self._target)
        return self._open

    # Inserts.

    async def insert(
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
        task = NewTask(
            queue=queue,
            key=key,
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
        )
        (inserted,) = await self.insert_batch([task], wait=wait)
        if inserted.status is InsertStatus.REJECTED:
            raise TaskRejected(inserted.error)
        return inserted

    async def insert_batch(self, tasks: Sequence[NewTask], *, wait: Seconds | None = None) -> list[Inserted]:
        """Inserts some tasks, and answers task by task, in order. A rejected one does not hold up the others.

        With `wait` it answers when all tasks are final, at the latest after so many seconds: with their statuses, and
        the results of completed ones. At most 1,000 tasks.
        """
        if wait is not None:
            return await self._insert_and_wait([task.to_message() for task in tasks], seconds(wait))
        batches = [*cut(tasks)]
        if len(batches) == 1:
            return await self._insert(batches[0])
        return [inserted async for inserted in self._insert_batches(_each(batches))]

    async def insert_many(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> InsertCounts:
        """Inserts as many tasks as there are, in batches and in bounded memory, and counts the answers."""
        counts = InsertCounts()
        async for inserted in self.insert_each(tasks):
            counts.add(inserted)
        return counts

    def insert_each(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> AsyncGenerator[Inserted, None]:
        """The same as `insert_many`, with the answer to each task, in order. It inserts as the caller reads."""
        return self._insert_batches(cut_async(tasks) if isinstance(tasks, AsyncIterable) else _each(cut(tasks)))

    async def insert_messages(self, tasks: list[pb.NewTask]) -> list[Inserted]:
        """Inserts the tasks of one call."""
        return await self._insert(tasks)

    async def _insert_batches(self, batches: AsyncGenerator[list[pb.NewTask], None]) -> AsyncGenerator[Inserted, None]:
        calls: deque[asyncio.Task[list[Inserted]]] = deque()
        next_batch: asyncio.Future[list[pb.NewTask] | None] | None = None
        has_more = True
        try:
            while has_more or calls:
                if has_more and next_batch is None and len(calls) < AT_ONCE:
                    next_batch = asyncio.ensure_future(anext(batches, None))
                waits = [one for one in (next_batch, *islice(calls, 1)) if one is not None]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if next_batch is not None and next_batch.done():
                    batch, next_batch = next_batch.result(), None
                    if batch is None:
                        has_more = False
                    else:
                        calls.append(asyncio.create_task(self._insert(batch)))
                while calls and calls[0].done():
                    for inserted in calls.popleft().result():
                        yield inserted
        finally:
            left = [one for one in (next_batch, *calls) if one is not None]
            for one in left:
                one.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await batches.aclose()

    async def _insert_and_wait(self, tasks: list[pb.NewTask], wait: float) -> list[Inserted]:
        if len(tasks) > MAX_TASKS:
            raise InvalidRequest(f"{len(tasks)} tasks in an insert that waits; at most {MAX_TASKS}")
        pause, end = Pauses(), time.monotonic() + wait
        inserted = await self._insert(tasks, end)
        while any(one.is_open for one in inserted) and (left := end - time.monotonic()) > 0:
            # taskd waits for a minute at most (max_wait). The same insert waits on, and stores nothing.
            await asyncio.sleep(min(pause.next(), left))
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic()) + _ANSWER_COMES):
                    again = await self._insert(tasks, end)
            except (Unavailable, TimeoutError) as error:
                logger.debug("the tasks are stored, and taskd does not say how they end: %s", error)
                break
            inserted = [replace(new, status=old.status) for old, new in zip(inserted, again, strict=True)]
        return inserted

    async def _insert(self, tasks: list[pb.NewTask], wait_end: float | None = None) -> list[Inserted]:
        """One batch, until each task has an answer. taskd waits until `wait_end` for the ends of the tasks."""
        results: list[Inserted | None] = [None] * len(tasks)
        places = list(range(len(tasks)))
        pause, end = Pauses(), time.monotonic() + self._patience
        while True:
            request = pb.InsertTasksRequest(tasks=[tasks[place] for place in places])
            more = 0.0 if wait_end is None else max(0.0, wait_end - time.monotonic())
            try:
                answer = await patiently(partial(self._insert_once, request, wait_end), self._patience + more)
            except InvalidRequest as error:
                if len(places) < len(tasks):
                    raise
                return await self._insert_apart(tasks, error, wait_end)
            later = []
            for place, result in zip(places, answer.results, strict=True):
                if result.status == pb.INSERT_STATUS_TRY_LATER:
                    later.append(place)
                    continue
                status = InsertStatus(pb.InsertStatus.Name(result.status).removeprefix("INSERT_STATUS_"))
                task_status, found = read_status(result.task_status), tuple(map(read_result, result.results))
                results[place] = Inserted(status, result.id, result.error, task_status, found, result.tree)
            if not later:
                return [result for result in results if result is not None]
            if len(later) < len(places):
                end = time.monotonic() + self._patience
            rest = pause.next()
            if time.monotonic() + rest >= end:
                raise Unavailable(f"taskd stored a part of {len(tasks)} tasks, and asks to try {len(later)} later")
            places = later
            await asyncio.sleep(rest)

    async def _insert_once(
        self, request: pb.InsertTasksRequest, wait_end: float | None, limit: float
    ) -> pb.InsertTasksResponse:
        """Calls once, with the wait that is left by then."""
        timeout = _TIMEOUT
        if wait_end is not None:
            wait = max(0.0, wait_end - time.monotonic())
            request.wait.CopyFrom(to_duration(wait))
            request.max_bytes = _MAX_RESULT_BYTES
            timeout += wait
        return await self._connection.call(INSERT, request, min(timeout, limit))

    async def _insert_apart(
        self, tasks: list[pb.NewTask], error: InvalidRequest, wait_end: float | None
    ) -> list[Inserted]:
        """A batch that taskd refuses as a whole: one of its tasks is too large to be served, or all together."""
        if len(tasks) == 1:
            return [Inserted(InsertStatus.REJECTED, "", str(error))]
        middle = len(tasks) // 2
        return await self._insert(tasks[:middle], wait_end) + await self._insert(tasks[middle:], wait_end)

    # Reads.

    async def get_task(self, task_id: str) -> TaskInfo:
        """Reads a task with its payload and history. Raises NotFound."""
        task = await self._connection.call_patiently(GET_TASK, pb.GetTaskRequest(id=task_id), _TIMEOUT, self._patience)
        return read_task(task, decode(task.payload, task.payload_encoding))

    async def list_tasks(
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
    ) -> AsyncIterator[TaskInfo]:
        """Lists tasks without payloads, the newest first, page by page."""
        chosen = Filter(
            queue=queue,
            statuses=statuses,
            key=key,
            key_prefix=key_prefix,
            headers=headers,
            worker=worker,
            since=since,
            until=until,
        )
        request = pb.ListTasksRequest(filter=chosen.to_message(), limit=page)
        while True:
            answer = await self._connection.call_patiently(LIST, request, _TIMEOUT, self._patience)
            for task in answer.tasks:
                yield read_task(task, None)
            if not answer.cursor:
                return
            request.cursor = answer.cursor

    async def wait(self, task_id: str, *, timeout: Seconds | None = None) -> TaskInfo:
        """Waits until a task is COMPLETED, DEAD or CANCELLED, and its results are stored. Raises TimeoutError."""
        limit = None if timeout is None else seconds(timeout)
        try:
            async with asyncio.timeout(limit):
                return await self._end_of(task_id)
        except TimeoutError:
            raise TimeoutError(f"task {task_id} was not finished within {limit} s") from None

    async def wait_drained(self, queue: str, *, timeout: Seconds | None = None) -> None:
        """Waits until nothing of a queue is unfinished, delayed, in backoff or on its way.

        Raises NotFound if the queue never had a task, and TimeoutError.
        """
        limit = None if timeout is None else seconds(timeout)
        request = pb.GetQueueRequest(queue=queue, wait_drained=to_duration(_TIMEOUT / 2))
        try:
            async with asyncio.timeout(limit):
                while True:
                    answer = await self._connection.call_patiently(GET_QUEUE, request, _TIMEOUT, self._patience)
                    if answer.drained:
                        return
        except TimeoutError:
            raise TimeoutError(f"queue {queue} was not drained within {limit} s") from None

    async def _end_of(self, task_id: str) -> TaskInfo:
        try:
            async for _ in self._watch(WATCH_TASK, pb.WatchTaskRequest(id=task_id), _WAIT_PATIENCE):
                pass
        except (Unsupported, Unavailable) as error:
            # For example, it has as many watchers as it may have: ask now and then.
            logger.debug("asking for %s, which cannot be watched: %s", task_id, error)
        pause = Pauses(0.02, _FINAL_LOOK)
        while not (task := await self.get_task(task_id)).status.is_final:
            await asyncio.sleep(pause.next())
        return task

    async def watch(self, task_id: str, *, last_event_id: str = "") -> AsyncGenerator[TaskEvent, None]:
        """Watches a task: its status now, then each change, until a final one. Raises NotFound.

        It goes on when the connection breaks. last_event_id: the last one that the caller saw; it does not come again.
        """
        request = pb.WatchTaskRequest(id=task_id, last_event_id=last_event_id)
        async with aclosing(self._watch(WATCH_TASK, request, self._patience)) as events:
            async for event in events:
                if isinstance(event, TaskEvent):
                    yield event
                    if event.status.is_final:
                        return

    async def watch_queue(self, queue: str, *, last_event_id: str = "") -> AsyncGenerator[TaskEvent | Gap, None]:
        """Watches all tasks of a queue, from now on or behind an event. It ends with the caller.

        It goes on when the connection breaks, behind the last event. A Gap says that events may be missing.
        """
        request = pb.WatchQueueRequest(queue=queue, last_event_id=last_event_id)
        while True:
            async with aclosing(self._watch(WATCH_QUEUE, request, self._patience)) as events:
                async for event in events:
                    yield event
            # taskd does not end it.
            await asyncio.sleep(_FINAL_LOOK)

    async def _watch(
        self, method: Method[WatchT, pb.TaskEvent], request: WatchT, patience: float
    ) -> AsyncGenerator[TaskEvent | Gap, None]:
        """The events of one watch until taskd ends it well."""
        pause, end, was_open = Pauses(), None, False
        while True:
            began, call = time.monotonic(), self._connection.watch(method, request)
            try:
                async with aclosing(call) as messages:
                    async for message in messages:
                        if message is None:
                            # Without an event to go on behind, nobody knows what happened between two calls.
                            if was_open and not request.last_event_id:
                                yield Gap()
                            was_open = True
                            continue
                        # A gap has none. What came before it is told, so going on behind that is right.
                        request.last_event_id = message.event_id or request.last_event_id
                        end = None
                        pause.reset()
                        yield read_event(message)
            except Unavailable:
                now = time.monotonic()
                if end is None or now - began > _WAS_OPEN:
                    # It was open, though nothing happened.
                    end = now + patience
                    pause.reset()
                wait = pause.next()
                if now + wait >= end:
                    raise
                await asyncio.sleep(wait)
            else:
                return

    async def explain(
        self,
        task_id: str = "",
        *,
        queue: str = "",
        key: str | bytes = "",
        worker: str = "",
    ) -> Explanation:
        """Explains where a task is, and with `worker` why that worker does not get it. Raises NotFound."""
        request = pb.ExplainTaskRequest(id=task_id, queue=queue, key=key_bytes(key), worker=worker)
        answer = await self._connection.call_patiently(EXPLAIN, request, _TIMEOUT, self._patience)
        return Explanation(
            place=pb.TaskPlace.Name(answer.place).removeprefix("TASK_PLACE_"),
            says=answer.says,
            since=to_datetime(answer.since),
            next=answer.next,
            next_at=to_datetime(answer.next_at),
            notes=tuple(answer.notes),
            worker_may_get=answer.worker.may_get if worker else None,
            worker_says=answer.worker.says,
        )

    # Changes.

    async def cancel(self, ids: str | Iterable[str]) -> Sequence[Answer]:
        """Cancels tasks, and answers id by id, in order. TRY_LATER: taskd has stored the wish, and carries it out."""
        answers: list[Answer] = []
        for chunk in _chunks([ids] if isinstance(ids, str) else ids):
            request = pb.CancelTasksRequest(ids=chunk)
            answer = await self._connection.call_patiently(CANCEL, request, _TIMEOUT, self._patience)
            answers.extend(read_answer(item) for item in answer.results)
        return answers

    # Queues and dead letters: for operators, whose tokens need the role admin for changes.

    async def publish(self, topic: str, records: Iterable[Record]) -> list[Published]:
        """Publishes records to a topic, in calls of up to 1,000 and about 4 MiB, and answers each of them, in order.

        A call whose answer was lost is sent again, so a record may be there twice: give it an `id` by which readers
        can tell.

        After a call with a TRY_LATER no other one is made, and all further records are TRY_LATER: so records of a key
        keep their order if you publish those again. An error after the first call is the `error` of these answers;
        before, it is raised.
        """
        messages = [record.to_message() for record in records]
        published: list[Published] = []
        most, failure = MAX_RECORDS, None
        while len(published) < len(messages) and failure is None:
            some = first_of(messages[len(published) : len(published) + most])
            request = pb.PublishRequest(topic=topic, records=some)
            try:
                answer = await self._connection.call_patiently(PUBLISH, request, _TIMEOUT, self._patience)
            except InvalidRequest as error:
                if len(some) > 1:
                    # taskd takes fewer at once, or one of them is to blame.
                    most = len(some) // 2
                elif published:
                    published.append(Published(status=PublishStatus.REJECTED, error=str(error)))
                    most = MAX_RECORDS
                else:
                    raise
                continue
            except TaskdError as error:
                if not published:
                    raise
                failure = str(error)
                continue
            answers = [read_published(one) for one in answer.results[: len(some)]]
            published.extend(answers)
            if len(answers) < len(some) or any(one.status is PublishStatus.TRY_LATER for one in answers):
                failure = "a record before it was not stored"
        later = Published(status=PublishStatus.TRY_LATER, error=failure or "")
        return published + [later] * (len(messages) - len(published))

    async def queues(self, queue: str = "") -> Sequence[QueueCounts]:
        """The counts of a queue, or of all that have unfinished tasks or had some lately."""
        books = await self._connection.call_patiently(BOOKS, pb.GetBooksRequest(queue=queue), _TIMEOUT, self._patience)
        return [read_queue(one) for one in books.queues]

    async def pause_queue(self, queue: str) -> bool:
        """Pauses a queue: no worker gets anything of it. False: it was paused before."""
        request = pb.PauseQueueRequest(queue=queue)
        return (await self._connection.call_patiently(PAUSE, request, _TIMEOUT, self._patience)).changed

    async def resume_queue(self, queue: str) -> bool:
        """Resumes a paused queue. False: it was not paused."""
        request = pb.ResumeQueueRequest(queue=queue)
        return (await self._connection.call_patiently(RESUME, request, _TIMEOUT, self._patience)).changed

    async def dead_letters(
        self,
        queue: str = "",
        *,
        kind: LetterKind | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        reason: str = "",
        page: int = 100,
    ) -> AsyncIterator[DeadLetter]:
        """Lists dead letters, the newest first, page by page. `reason`, the beginning of theirs, needs a queue."""
        request = pb.ListDeadLettersRequest(filter=letter_filter(queue, kind, since, until, reason), limit=page)
        while True:
            answer = await self._connection.call_patiently(LIST_LETTERS, request, _TIMEOUT, self._patience)
            for letter in answer.letters:
                yield read_letter(letter)
            if not answer.cursor:
                return
            request.cursor = answer.cursor

    async def retry_dead_letters(self, ids: str | Iterable[str]) -> LettersChanged:
        """Sends tasks again, and removes their letters. Dead tasks keep their ids."""
        return await self._change_letters(RETRY_LETTERS, ids)

    async def remove_dead_letters(self, ids: str | Iterable[str]) -> LettersChanged:
        """Removes letters for good. Of a dead task only the key stays."""
        return await self._change_letters(PURGE_LETTERS, ids)

    async def _change_letters(
        self, method: Method[pb.ChangeDeadLettersRequest, pb.ChangeDeadLettersResponse], ids: str | Iterable[str]
    ) -> LettersChanged:
        changed = LettersChanged()
        for chunk in _chunks([ids] if isinstance(ids, str) else ids):
            request = pb.ChangeDeadLettersRequest(ids=chunk)
            changed = changed.plus(await self._connection.call_patiently(method, request, _TIMEOUT, self._patience))
        return changed


def _chunks(ids: Iterable[str]) -> Iterator[Sequence[str]]:
    chunk: deque[str] = deque()
    for one in ids:
        chunk.append(one)
        if len(chunk) == _MAX_IDS:
            yield tuple(chunk)
            chunk.clear()
    if chunk:
        yield tuple(chunk)


async def _each(batches: Iterable[list[pb.NewTask]]) -> AsyncGenerator[list[pb.NewTask], None]:
    for batch in batches:
        yield batch
