"""Tasks: those to insert, those that a worker has, and those that taskd shows."""

from __future__ import annotations

import contextvars
import enum
import threading
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from taskd_client._codec import decode, encode
from taskd_client._time import Seconds, seconds, to_datetime, to_duration
from taskd_client.errors import Unserialisable
from taskd_client.v1 import taskd_pb2 as pb

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
_TO_ON_DEAD = {"next": pb.ON_DEAD_UNSPECIFIED, "hold": pb.ON_DEAD_HOLD}
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


BackoffKind = Literal["constant", "linear", "exponential"]

_TO_KIND: dict[BackoffKind, Any] = {
    "constant": pb.BACKOFF_KIND_CONSTANT,
    "linear": pb.BACKOFF_KIND_LINEAR,
    "exponential": pb.BACKOFF_KIND_EXPONENTIAL,
}
_FROM_KIND = {wire: kind for kind, wire in _TO_KIND.items()}


@dataclass(frozen=True, slots=True)
class Backoff:
    """The waits of a task between its attempts: `Backoff("exponential", initial=2, maximum=600)`.

    Without a kind they are those of the queue, and `give_up_after` is the only setting.
    """

    kind: BackoffKind | None = None
    """`constant`: always `initial`. `linear`: `initial` more after each failure. `exponential`: twice as long."""
    _: KW_ONLY
    initial: Seconds | None = None
    """The wait after the first failure."""
    maximum: Seconds | None = None
    """The longest wait: at most, and if absent, a day."""
    jitter: float | None = None
    """The share, 0 to 1, by which a wait may be longer or shorter. Absent: 0.2."""
    give_up_after: Seconds | None = None
    """The task is dead when its next attempt would begin later than this after its insert, or after its time."""

    def to_message(self) -> pb.Backoff:
        if self.kind is not None and self.kind not in _TO_KIND:
            raise ValueError(f"{self.kind!r} is no backoff; there are {', '.join(_TO_KIND)}")
        message = pb.Backoff(kind=None if self.kind is None else _TO_KIND[self.kind], jitter=self.jitter)
        for name in ("initial", "maximum", "give_up_after"):
            if (value := getattr(self, name)) is not None:
                getattr(message, name).CopyFrom(to_duration(value))
        return message


def _read_backoff(message: pb.Backoff) -> Backoff:
    def read(name: str) -> float | None:
        return getattr(message, name).ToTimedelta().total_seconds() if message.HasField(name) else None

    return Backoff(
        _FROM_KIND.get(message.kind),
        initial=read("initial"),
        maximum=read("maximum"),
        jitter=message.jitter if message.HasField("jitter") else None,
        give_up_after=read("give_up_after"),
    )


TreeOnDead = Literal["count", "ignore", "hold"]

_TO_TREE_ON_DEAD: dict[TreeOnDead, Any] = {
    "count": pb.TREE_ON_DEAD_UNSPECIFIED,
    "ignore": pb.TREE_ON_DEAD_IGNORE,
    "hold": pb.TREE_ON_DEAD_HOLD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTree:
    """A new tree, for its root: `NewTree(then="reports", timeout=3600)`."""

    then: str = ""
    """The queue that gets one task when the tree has ended, with its counts as JSON. Empty: none."""
    timeout: Seconds | None = None
    """All tasks of the tree must be completed within this time; otherwise they are dead then."""
    on_dead: TreeOnDead = "count"
    """Dead tasks make the tree fail, mean nothing, or keep it open until they are sent again or purged."""


def _tree_message(tree: str | NewTree) -> pb.TaskTree | None:
    if isinstance(tree, NewTree):
        message = pb.TaskTree(then=tree.then, on_dead=_TO_TREE_ON_DEAD[tree.on_dead])
        if tree.timeout is not None:
            message.timeout.CopyFrom(to_duration(tree.timeout))
        return message
    if not tree:
        return None
    return pb.TaskTree(id="" if tree == "new" else tree)


def key_bytes(key: str | bytes) -> bytes:
    if not isinstance(key, str | bytes):
        raise TypeError(f"the key {key!r} is {type(key).__name__}; give str or bytes")
    # A key that is not UTF-8 came as a str with surrogates, and goes back as it was.
    return key if isinstance(key, bytes) else key.encode(errors="surrogateescape")


def key_text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


@dataclass(slots=True, kw_only=True)
class NewTask:
    """A task to insert. What is absent takes the setting of the queue."""

    queue: str
    """Empty in an output of a stage, which has a port."""
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
    backoff: Backoff | None = None
    deadline: datetime | None = None
    """The task is dead if it is not completed by then."""
    finish_within: Seconds | None = None
    """The task is dead if it is not completed within this time from its insert."""
    idempotency_key: str = ""
    """An insert that is sent again with the same one is answered as the first time. Not for discovered tasks."""
    limit_key: str = ""
    """What the task shares its limits with: a host, a tenant, an account. Only in queues with a `limit_by`; empty: what
    that says."""
    sequence: str = ""
    """The tasks of a queue with one sequence go one after the other, in the order of their inserts. Empty: none."""
    on_dead: Literal["next", "hold"] = "next"
    """When the task dies, the next ones of its sequence go on, or wait until it is sent again or purged."""
    tree: str | NewTree = ""
    """`"new"` or a NewTree: the task is the root of a tree. The id of a tree: it joins this one, which must be open.
    Discovered tasks are in the trees of their parents anyway."""
    port: str = ""
    """Only of discovered tasks in a topology: the port of the stage to which it is sent, in place of a queue."""

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
            backoff=None if self.backoff is None else self.backoff.to_message(),
            idempotency_key=self.idempotency_key,
            limit_key=self.limit_key,
            sequence=self.sequence,
            on_dead=_TO_ON_DEAD[self.on_dead],
            tree=_tree_message(self.tree),
            port=self.port,
        )
        if self.replicas is not None:
            message.replicas = self.replicas
        if self.priority is not None:
            message.priority = _TO_PRIORITY[Priority(self.priority)]
        if self.delay is not None:
            message.delay.CopyFrom(to_duration(self.delay))
        if self.not_before is not None:
            # A time without a zone is one of this machine.
            message.not_before.FromDatetime(self.not_before.astimezone())
        if self.deadline is not None:
            message.deadline.FromDatetime(self.deadline.astimezone())
        if self.finish_within is not None:
            message.finish_within.CopyFrom(to_duration(self.finish_within))
        if self.lease is not None:
            message.lease_duration.CopyFrom(to_duration(self.lease))
        if self.max_attempts is not None:
            message.max_attempts = self.max_attempts
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a handler has learnt of the limit key of its task, in seconds."""

    hold: float = 0.0
    """Nothing of the limit key starts for this long."""
    pace: float = 0.0
    """Starts of the limit key are at least so far apart."""


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
    limit_key: str = ""
    """What the task shares its limits with, such as a host; empty if it has no limits."""
    worker: str = ""
    """The name under which taskd knows this worker."""
    limit: Limit | None = field(default=None, repr=False)
    """What `hold` and `pace` have said."""
    discovered: list[pb.NewTask] = field(default_factory=list, repr=False)
    not_stored: list[str] = field(default_factory=list, repr=False)
    """What is wrong with discovered tasks that cannot be sent."""
    _cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    def discover(
        self,
        key: str | bytes = "",
        *,
        payload: object = None,
        queue: str | None = None,
        port: str = "",
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
        limit_key: str = "",
        sequence: str = "",
        on_dead: Literal["next", "hold"] = "next",
    ) -> None:
        """Reports a task that was found on the way, of this queue if no other is named, or for a port of this stage.

        It goes to taskd with the result, and only if the handler succeeds. taskd drops it if it has seen the key. A
        handler may discover any number of tasks. One that is wrong costs only itself: the worker logs it, or taskd
        keeps it as a dead letter.
        """
        task = NewTask(
            queue=queue or ("" if port else self.queue),
            port=port,
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
            limit_key=limit_key,
            sequence=sequence,
            on_dead=on_dead,
        )
        try:
            message = task.to_message()
        except (Unserialisable, ValueError) as error:
            # A text that is no Unicode, for example, or a time that no clock has.
            self.not_stored.append(f"discovered key {key!r:.200}: {error}")
        else:
            self.discovered.append(message)

    def hold(self, hold: Seconds) -> None:
        """Nothing of the task's limit key starts for this long, at whichever worker, such as a Retry-After.

        taskd learns it when the handler ends, however it ends, and takes at most an hour. Without a `limit_key` it does
        nothing. Together with `PutOff` the attempt costs nothing.
        """
        self.limit = replace(self.limit or Limit(), hold=seconds(hold))

    def pace(self, pace: Seconds) -> None:
        """Starts of the task's limit key are at least so far apart, such as a Crawl-delay, as for `hold`.

        taskd keeps it for an hour.
        """
        self.limit = replace(self.limit or Limit(), pace=seconds(pace))

    @property
    def cancelled(self) -> bool:
        """True if nobody waits for the result any more: the task was cancelled, timed out, or the lease is lost.

        An async handler is cancelled then. A handler in a thread cannot be, so a long one looks here now and then.
        """
        return self._cancelled.is_set()

    def wait_cancelled(self, timeout: Seconds | None = None) -> bool:
        """Waits until `cancelled` is true, at most for `timeout`. For handlers in threads, instead of `time.sleep`."""
        return self._cancelled.wait(None if timeout is None else seconds(timeout))


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
    backoff: Backoff | None
    """Its own, if it has one."""


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
        backoff=_read_backoff(task.backoff) if task.HasField("backoff") else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """A worker's result of a task."""

    worker: str
    value: Any
    attempt: int
    completed_at: datetime | None
    surplus: bool
    """The task had all its replicas before."""


def read_result(result: pb.TaskResult) -> TaskResult:
    return TaskResult(
        worker=result.worker,
        value=decode(result.result, result.result_encoding),
        attempt=result.attempt,
        completed_at=to_datetime(result.completed_at),
        surplus=result.surplus,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent:
    """A task took on a status."""

    event_id: str
    """Names the event to a later watch."""
    task_id: str
    queue: str
    status: TaskStatus
    at: datetime | None


@dataclass(frozen=True, slots=True)
class Gap:
    """Events before this point of a queue may be missing: taskd does not know them any more."""


def read_event(event: pb.TaskEvent) -> TaskEvent | Gap:
    if event.gap:
        return Gap()
    return TaskEvent(
        event_id=event.event_id,
        task_id=event.id,
        queue=event.queue,
        status=_FROM_STATUS[event.status],
        at=to_datetime(event.at),
    )


def read_status(wire: int) -> TaskStatus | None:
    return _FROM_STATUS.get(wire)
