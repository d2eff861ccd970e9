"""Tasks: those to insert, those that a worker has, and those that taskd shows."""

from __future__ import annotations

import contextvars
import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from taskd._codec import encode
from taskd._time import Seconds, to_datetime, to_duration
from taskd.v1 import taskd_pb2 as pb

PayloadT = TypeVar("PayloadT")


class Priority(enum.Enum):
    """The urgency of a task. Priorities are strict over all queues of a worker."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


_TO_PRIORITY = {
    Priority.HIGH: pb.PRIORITY_HIGH,
    Priority.MEDIUM: pb.PRIORITY_MEDIUM,
    Priority.LOW: pb.PRIORITY_LOW,
}
_FROM_PRIORITY = {wire: priority for priority, wire in _TO_PRIORITY.items()}


def read_priority(wire: int) -> Priority:
    return _FROM_PRIORITY.get(wire, Priority.MEDIUM)  # type: ignore[call-overload, no-any-return]


class TaskStatus(enum.Enum):
    """The state of a task in its life."""

    PENDING = "PENDING"
    QUEUED = "QUEUED"
    ASSIGNED = "ASSIGNED"
    DELAYED = "DELAYED"
    COMPLETED = "COMPLETED"
    DEAD = "DEAD"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self in FINAL


FINAL = frozenset({TaskStatus.COMPLETED, TaskStatus.DEAD, TaskStatus.CANCELLED})
UNFINISHED = frozenset(TaskStatus) - FINAL

TO_STATUS: dict[TaskStatus, Any] = {status: pb.TaskStatus.Value(f"TASK_STATUS_{status.name}") for status in TaskStatus}
_FROM_STATUS = {wire: status for status, wire in TO_STATUS.items()}


def key_bytes(key: str | bytes) -> bytes:
    # A key that is not UTF-8 came as a str with surrogates, and goes back as it was.
    return key if isinstance(key, bytes) else key.encode(errors="surrogateescape")


def key_text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


@dataclass(slots=True, kw_only=True)
class NewTask:
    """A task to insert. What is absent takes the setting of the queue."""

    queue: str
    key: str | bytes = ""
    """Unique in its queue for ever. Empty: taskd takes the SHA-256 of the payload."""
    payload: object = None
    """Bytes stay bytes, a str is text, and anything else becomes JSON: also dataclasses and pydantic models."""
    replicas: int | None = None
    priority: Priority | None = None
    delay: Seconds | None = None
    not_before: datetime | None = None
    lease: Seconds | None = None
    max_attempts: int | None = None
    headers: Mapping[str, str] | None = None
    traceparent: str = ""

    def to_message(self) -> pb.NewTask:
        """The task for the wire. Raises Unserialisable."""
        payload, encoding = encode(self.payload)
        message = pb.NewTask(
            queue=self.queue,
            key=key_bytes(self.key),
            payload=payload,
            payload_encoding=encoding.value,
            headers=self.headers,
            traceparent=self.traceparent,
        )
        if self.replicas is not None:
            message.replicas = self.replicas
        if self.priority is not None:
            message.priority = _TO_PRIORITY[self.priority]
        if self.delay is not None:
            message.delay.CopyFrom(to_duration(self.delay))
        if self.not_before is not None:
            # A time without a zone is one of this machine.
            message.not_before.FromDatetime(self.not_before.astimezone())
        if self.lease is not None:
            message.lease_duration.CopyFrom(to_duration(self.lease))
        if self.max_attempts is not None:
            message.max_attempts = self.max_attempts
        return message


@dataclass(slots=True, kw_only=True)
class Task(Generic[PayloadT]):
    """A task in the hands of a handler.

    Annotate the handler with `Task[Page]` to get the payload as a `Page`: a dataclass, a TypedDict, a pydantic model,
    or types of JSON.
    """

    id: str
    queue: str
    key: str
    payload: PayloadT
    raw: bytes = b""
    """The payload as it was sent."""
    headers: Mapping[str, str] = field(default_factory=dict)
    traceparent: str = ""
    """W3C trace context, for spans of your own."""
    attempt: int = 1
    replicas: int = 1
    priority: Priority = Priority.MEDIUM
    worker: str = ""
    """The name under which taskd knows this worker."""
    discovered: list[pb.NewTask] = field(default_factory=list, repr=False)
    _cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    def discover(
        self,
        key: str | bytes = "",
        *,
        payload: object = None,
        queue: str | None = None,
        replicas: int | None = None,
        priority: Priority | None = None,
        delay: Seconds | None = None,
        not_before: datetime | None = None,
        lease: Seconds | None = None,
        max_attempts: int | None = None,
        headers: Mapping[str, str] | None = None,
        traceparent: str = "",
    ) -> None:
        """Reports a task that was found on the way, of this queue if no other is named.

        It goes to taskd with the result, and only if the handler succeeds. taskd drops it if it has seen the key.
        """
        task = NewTask(
            queue=queue or self.queue,
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
        )
        self.discovered.append(task.to_message())

    @property
    def cancelled(self) -> bool:
        """True if nobody waits for the result any more: the task was cancelled, timed out, or the lease is lost.

        An async handler is cancelled then. A handler in a thread cannot be, so a long one looks here now and then.
        """
        return self._cancelled.is_set()


_current: contextvars.ContextVar[Task[Any] | None] = contextvars.ContextVar("taskd_task", default=None)


def current_task() -> Task[Any] | None:
    """The task of the handler that runs here; also in the functions and threads (asyncio.to_thread) that it calls."""
    return _current.get()


def set_current_task(task: Task[Any]) -> None:
    _current.set(task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One worker's attempt at a task."""

    worker: str
    state: str
    """LEASED, COMPLETED, REJECTED or EXPIRED."""
    started_at: datetime | None
    ended_at: datetime | None
    lease_expires_at: datetime | None
    """Of an attempt that goes on."""
    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """A task as taskd shows it. A list leaves out payload, headers and history."""

    id: str
    queue: str
    key: str
    status: TaskStatus
    replicas: int
    completed: int
    leased: int
    attempts: int
    """Failures so far."""
    priority: Priority
    created_at: datetime | None
    updated_at: datetime | None
    not_before: datetime | None
    reason: str
    """Why the task is DEAD."""
    payload: Any
    headers: Mapping[str, str]
    traceparent: str
    results: int
    history: tuple[Attempt, ...]


def read_task(task: pb.Task, payload: object) -> TaskInfo:
    history = tuple(
        Attempt(
            worker=one.worker,
            state=pb.AttemptState.Name(one.state).removeprefix("ATTEMPT_STATE_"),
            started_at=to_datetime(getattr(one, "from")),
            ended_at=to_datetime(one.until),
            lease_expires_at=to_datetime(one.lease_expires_at),
            number=one.attempt,
            reason=one.reason,
        )
        for one in task.history
    )
    return TaskInfo(
        id=task.id,
        queue=task.queue,
        key=key_text(task.key),
        status=_FROM_STATUS[task.status],
        replicas=task.replicas,
        completed=task.completed,
        leased=task.leased,
        attempts=task.attempts,
        priority=read_priority(task.priority),
        created_at=to_datetime(task.created_at),
        updated_at=to_datetime(task.updated_at),
        not_before=to_datetime(task.not_before),
        reason=task.reason,
        payload=payload,
        headers=dict(task.headers),
        traceparent=task.traceparent,
        results=task.results,
        history=history,
    )
