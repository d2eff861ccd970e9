"""Outcomes on their way to taskd, in batches."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from taskd_client._handler import Outcome, reason
from taskd_client._time import Pauses
from taskd_client.errors import InvalidRequest, Unavailable
from taskd_client.source import Answer, Completion, ItemStatus, Lease, NextSource, Rejection, Source

if TYPE_CHECKING:
    from taskd_client._session import Held

logger = logging.getLogger("taskd.worker")

# The bounds of one call: items, bytes (one larger item goes alone), and discovered tasks.
_MAX_ITEMS = 1000
_MAX_BYTES = 4 << 20
_MAX_DISCOVERED = 50_000
# The bytes of all outcomes that wait, beyond which a worker takes no more tasks.
_FULL_BYTES = 32 << 20
# How long a report may ask for tasks, in seconds. Then it goes anew without that, so that the worker can poll.
_ASKS_FOR = 1.0

OutcomeT = TypeVar("OutcomeT", bound=Outcome)


class _Line(Generic[OutcomeT]):
    """Outcomes of one kind that wait."""

    def __init__(self, send: Callable[[Sequence[OutcomeT]], Awaitable[Sequence[Answer]]]) -> None:
        self.send = send
        self.waiting: deque[tuple[Held, OutcomeT, int]] = deque()
        self.some = asyncio.Event()
        self.is_busy = False
        """A call is under way, or the line pauses behind one that failed."""

    def put(self, held: Held, outcome: OutcomeT, size: int) -> None:
        self.waiting.append((held, outcome, size))
        self.some.set()

    def take(self) -> Sequence[tuple[Held, OutcomeT, int]]:
        """The next batch: as many as there are, within the bounds."""
        batch: list[tuple[Held, OutcomeT, int]] = []
        size = discovered = 0
        while self.waiting and len(batch) < _MAX_ITEMS:
            held, outcome, bytes_ = self.waiting[0]
            found = len(outcome.discovered) if isinstance(outcome, Completion) else 0
            if batch and (size + bytes_ > _MAX_BYTES or discovered + found > _MAX_DISCOVERED):
                break
            self.waiting.popleft()
            batch.append((held, outcome, bytes_))
            size, discovered = size + bytes_, discovered + found
        if not self.waiting:
            self.some.clear()
        return batch


class Reports:
    """Sends outcomes until taskd has answered each. A call that failed is repeated: taskd counts nothing twice."""

    def __init__(self, source: Source, finished: Callable[[Held, Outcome, Answer], None], pause_limit: float) -> None:
        self._source = source
        self._asks = source if isinstance(source, NextSource) else None
        self.is_asking = False
        """A call that is under way asks for tasks."""
        self.wants: Callable[[], int] = lambda: 0
        """How many tasks a call with completions asks for."""
        self.brought: Callable[[Sequence[Lease] | None], None] = lambda _: None
        """Hears what such a call has brought; None: it was refused, failed, or took too long."""
        self._completions = _Line[Completion](self._complete)
        self._rejections = _Line[Rejection](source.reject)
        self._finished = finished
        self._pause_limit = pause_limit
        self._open = 0
        self._bytes = 0
        self._sizes: dict[int, int] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def open(self) -> int:
        """The outcomes that taskd has not answered."""
        return self._open

    @property
    def is_full(self) -> bool:
        return self._bytes > _FULL_BYTES

    def add(self, held: Held, outcome: Outcome) -> None:
        size = outcome.size()
        self._open += 1
        self._bytes += size
        self._sizes[id(held)] = size
        self._empty.clear()
        self._put(held, outcome, size)

    def _put(self, held: Held, outcome: Outcome, size: int) -> None:
        if isinstance(outcome, Completion):
            self._completions.put(held, outcome, size)
        else:
            self._rejections.put(held, outcome, size)

    @property
    def is_about_to_ask(self) -> bool:
        """Completions go in a moment, and their call may ask for tasks."""
        return self._asks is not None and bool(self._completions.waiting) and not self._completions.is_busy

    async def _complete(self, completions: Sequence[Completion]) -> Sequence[Answer]:
        most = self.wants() if self._asks is not None else 0
        if self._asks is None or most <= 0:
            return await self._source.complete(completions)
        self.is_asking = True
        limit = asyncio.get_running_loop().call_later(_ASKS_FOR, self._asks.ask_no_more)
        leases: Sequence[Lease] | None = None
        try:
            answer = await self._asks.complete_and_get(completions, most)
            if answer is not None:
                answers, leases = answer
                return answers
        except InvalidRequest:
            # Perhaps the request for tasks is at fault.
            pass
        finally:
            limit.cancel()
            self.is_asking = False
            self.brought(leases)
        return await self._source.complete(completions)

    async def run(self) -> None:
        """Until it is cancelled, or taskd refuses this worker."""
        async with asyncio.TaskGroup() as lines:
            lines.create_task(self._run_line(self._completions))
            lines.create_task(self._run_line(self._rejections))

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    async def _run_line(self, line: _Line[Any]) -> None:
        pause = Pauses(longest=self._pause_limit)
        while True:
            await line.some.wait()
            # Handlers that end together are reported together, and have left their places.
            await asyncio.sleep(0)
            line.is_busy = True
            if await self._deliver(line, line.take()):
                pause.reset()
            else:
                await asyncio.sleep(pause.next())
            line.is_busy = False

    async def _deliver(self, line: _Line[Any], batch: Sequence[tuple[Held, Any, int]]) -> bool:
        """Sends a batch. False: taskd did not take all of it, and the rest waits again."""
        parts = deque([batch])
        while parts:
            part = parts.popleft()
            try:
                answers = await line.send([outcome for _, outcome, _ in part])
            except Unavailable as error:
                # Only their shard may be away. So they wait behind what came meanwhile, which taskd may take.
                logger.debug("taskd did not take %d reports: %s", len(part), error)
                for again in (part, *parts):
                    for one in again:
                        line.put(*one)
                return False
            except InvalidRequest as error:
                if len(part) > 1:
                    # One of them is wrong, or they are too large together.
                    middle = len(part) // 2
                    parts.extendleft((part[middle:], part[:middle]))
                    continue
                answers = [Answer(ItemStatus.INVALID, str(error))]
            for (held, outcome, _), answer in zip(part, answers, strict=True):
                self._read(held, outcome, answer)
        return True

    def _read(self, held: Held, outcome: Outcome, answer: Answer) -> None:
        if answer.status is ItemStatus.TRY_LATER:
            size = self._sizes[id(held)]
            asyncio.get_running_loop().call_later(held.pause.next(), self._put, held, outcome, size)
            return
        if answer.status is ItemStatus.INVALID and not held.is_refused:
            # The same report would be refused again. A plain rejection ends the lease, so that the task goes on.
            held.is_refused = True
            what = "result" if isinstance(outcome, Completion) else "rejection"
            why = reason(f"taskd refused the {what}: {answer.error}")
            may_retry = isinstance(outcome, Completion) or outcome.retry
            plain = Rejection(lease=outcome.lease, reason=why, retry=may_retry)
            self._put(held, plain, self._sizes[id(held)])
            logger.error("%s (%s)", why, held.name, extra=held.fields())
            return
        self._open -= 1
        self._bytes -= self._sizes.pop(id(held))
        self._finished(held, outcome, answer)
        if not self._open:
            self._empty.set()
