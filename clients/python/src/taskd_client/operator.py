"""What operators see and change: queues and dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from taskd_client._time import to_datetime
from taskd_client.task import key_text
from taskd_client.v1 import taskd_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """How many tasks a queue has, by what became of them."""

    queue: str
    stored: int
    """All tasks that were ever stored."""
    completed: int
    dead: int
    cancelled: int
    unfinished: int
    """All others. Those that are not in one of the three places below are on their way, or wait in SQL."""
    waiting: int
    """A worker may get them."""
    assigned: int
    delayed: int
    duplicates: int
    rejected: int


def read_queue(books: pb.QueueBooks) -> QueueCounts:
    return QueueCounts(
        queue=books.queue,
        stored=books.stored,
        completed=books.completed,
        dead=books.dead,
        cancelled=books.cancelled,
        unfinished=books.held,
        waiting=books.waiting,
        assigned=books.assigned,
        delayed=books.delayed,
        duplicates=books.duplicates,
        rejected=books.rejected,
    )


class LetterKind(Enum):
    """The kinds of dead letters."""

    TASK = "TASK"
    """A task that failed for good. The letter has the id of the task."""
    DISCOVERED = "DISCOVERED"
    """A discovered task that found no room, or was not valid."""
    RECORD = "RECORD"
    """A record of a topic that cannot be decoded or handled. It cannot be sent again."""
    REFUSED = "REFUSED"
    """A task that an insert did not accept, of a queue with `keep_refused`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """What taskd gave up, and why."""

    id: str
    kind: LetterKind
    queue: str
    """Empty for a record."""
    key: str
    reason: str
    at: datetime | None
    attempts: int
    """Failures of a dead task."""


def read_letter(letter: pb.Letter) -> DeadLetter:
    return DeadLetter(
        id=letter.id,
        kind=LetterKind(pb.LetterKind.Name(letter.kind).removeprefix("LETTER_KIND_")),
        queue=letter.queue,
        key=key_text(letter.task.key),
        reason=letter.reason,
        at=to_datetime(letter.at),
        attempts=letter.attempts,
    )


def letter_filter(
    queue: str, kind: LetterKind | None, since: datetime | None, until: datetime | None, reason: str
) -> pb.LetterFilter:
    message = pb.LetterFilter(queue=queue, reason=reason, kind=None if kind is None else f"LETTER_KIND_{kind.value}")
    if since is not None:
        message.since.FromDatetime(since.astimezone())
    if until is not None:
        message.until.FromDatetime(until.astimezone())
    return message


@dataclass(frozen=True, slots=True)
class LettersChanged:
    """The answer to a change of dead letters."""

    changed: int = 0
    failed: Sequence[tuple[str, str]] = ()
    """The ids of those that stay, each with the reason."""

    def plus(self, answer: pb.ChangeDeadLettersResponse) -> LettersChanged:
        failed = [(one.id, one.error) for one in answer.failed]
        return LettersChanged(self.changed + answer.changed, (*self.failed, *failed))
