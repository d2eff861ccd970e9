"""The boundary between a worker and the place that its tasks come from.

`taskd_client._grpc_source` asks taskd; `taskd_client.testing` needs no server.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from taskd_client._codec import Encoding
from taskd_client.task import Limit, Priority
from taskd_client.v1 import taskd_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to one task until a deadline, and all that the handler gets."""

    id: str
    queue: str
    key: bytes
    payload: bytes
    encoding: Encoding
    token: str
    headers: Mapping[str, str] = field(default_factory=dict)
    traceparent: str = ""
    attempt: int = 1
    replicas: int = 1
    priority: Priority = Priority.MEDIUM
    limit_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The task is done."""

    lease: Lease
    result: bytes = b""
    encoding: Encoding = Encoding.UNSPECIFIED
    discovered: Sequence[pb.NewTask] = ()
    not_stored: Sequence[str] = ()
    """What is wrong with other discovered tasks."""
    limit: Limit | None = None

    def size(self) -> int:
        """About the bytes that it takes on the wire."""
        return len(self.result) + sum(task.ByteSize() for task in self.discovered) + 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The lease ends without a result."""

    lease: Lease
    reason: str
    retry: bool = True
    """False: no further attempt."""
    delay: float | None = None
    """Seconds; none: the backoff of the queue."""
    not_started: bool = False
    """No failure counts: the handler did not begin, or it puts the task off. The task is offered again after `delay`,
    or at once."""
    limit: Limit | None = None
    pause: float = 0.0
    """Seconds for which the worker takes no tasks. taskd does not hear of it."""

    def size(self) -> int:
        return len(self.reason) + 256


class ItemStatus(enum.Enum):
    """The answer to one report."""

    OK = "OK"
    LEASE_LOST = "LEASE_LOST"
    ALREADY_COMPLETED = "ALREADY_COMPLETED"
    UNKNOWN_TASK = "UNKNOWN_TASK"
    CANCELLED = "CANCELLED"
    INVALID = "INVALID"
    TRY_LATER = "TRY_LATER"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one report, with the error of an INVALID one."""

    status: ItemStatus
    error: str = ""


class Source(Protocol):
    """Hands out leases and takes reports.

    Each call raises `Unavailable` if it may be repeated unchanged, `InvalidRequest` if it is wrong, and another
    `TaskdError` if the worker cannot go on.
    """

    async def get(self, max_tasks: int) -> Sequence[Lease]:
        """Waits for tasks, for a while. Raises EndOfSource if none will ever come."""
        ...

    def interrupt(self) -> None:
        """Ends a `get` that waits, as soon as no answer can be on its way: it returns the leases that it has."""
        ...

    async def complete(self, completions: Sequence[Completion]) -> Sequence[Answer]:
        """Answers item by item."""
        ...

    async def reject(self, rejections: Sequence[Rejection]) -> Sequence[Answer]:
        """Answers item by item."""
        ...

    async def extend(self, leases: Sequence[Lease]) -> Sequence[Answer]:
        """Moves the deadlines to a whole lease from now, and answers item by item."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class NextSource(Source, Protocol):
    """A source whose completions bring tasks. The worker makes no call of `get` meanwhile."""

    async def complete_and_get(
        self, completions: Sequence[Completion], max_tasks: int
    ) -> tuple[Sequence[Answer], Sequence[Lease]] | None:
        """Answers item by item, with tasks that are there; it does not wait for any.

        None: `ask_no_more` has ended it, and the worker reports anew. So it does after InvalidRequest.
        """
        ...

    def ask_no_more(self) -> None:
        """Ends a `complete_and_get` that has no answer yet."""
        ...
