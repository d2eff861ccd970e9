"""One run of a worker: what it holds, and the loops that fetch, work, keep leases and report."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from taskd_client._handler import Around, Handler, Outcome, completed, error_text, failed, reason
from taskd_client._reports import Reports
from taskd_client._stream_source import StreamSource
from taskd_client._surplus import Surplus
from taskd_client._threads import Processes, Threads
from taskd_client._time import Pauses
from taskd_client.errors import (
    EndOfSource,
    InvalidRequest,
    PayloadError,
    PutOff,
    Reject,
    Retry,
    TaskdError,
    Unavailable,
)
from taskd_client.source import Answer, Completion, ItemStatus, Lease, Rejection, Source
from taskd_client.task import Task, set_current_task

if TYPE_CHECKING:
    from taskd_client.worker import Options, Stats

logger = logging.getLogger("taskd.worker")

# The most leases in a call: taskd's setting max_items has this default.
_MAX_ITEMS = 1000
# How long no report asks for tasks after one that was refused for it, that failed, or that took too long.
_ASKS_NOT_FOR = 1.0
# How often a worker says that taskd is still away.
_REMIND_AFTER = 60.0
# The least time from one long poll that brings no task to the next one.
_SHORTEST_ROUND = 0.1
# How long a handler that was cancelled may clean up.
_CLEAN_UP = 2.0
# How long taskd may take to hear that no more tasks are wanted.
_SURRENDER = 3.0
# How long an interrupted call may take to end.
_LAST_ANSWER = 0.5
# How long the last reports may take when the grace is over.
_LAST_REPORTS = 3.0


@dataclass(slots=True, eq=False)
class Held:
    """A lease from the answer that brought it until taskd has answered its report."""

    lease: Lease
    extend_at: float
    task: Task[Any] | None = None
    work: asyncio.Task[None] | None = None
    elsewhere: Future[Any] | None = None
    """The handler's run in a thread or process."""
    has_started: bool = False
    is_over: bool = False
    """The outcome is decided; or nobody waits for it."""
    began: float = 0.0
    """When the handler began."""
    said: int = 0
    """How often a line has said that the handler still runs."""
    is_refused: bool = False
    """taskd has refused a report of it, and gets a plain rejection."""
    pause: Pauses = field(default_factory=Pauses)

    @property
    def name(self) -> str:
        """The task in the text of a log record: few formats show its fields."""
        return f"key {self.lease.key.decode(errors='replace')!r}, task {self.lease.id}"

    def fields(self) -> dict[str, Any]:
        """The fields of a log record about it."""
        return {
            "task_id": self.lease.id,
            "queue": self.lease.queue,
            "key": self.lease.key.decode(errors="replace"),
            "attempt": self.lease.attempt,
        }


class Session:
    """One run of a worker, in one event loop."""

    def __init__(
        self,
        options: Options,
        handlers: dict[str | None, Handler],
        source: Source,
        stats: Stats,
        surplus: Surplus | None = None,
        around: Sequence[Around] = (),
    ) -> None:
        """surplus: inserts what is too much for a completion; none: the source takes all. around: the hooks."""
        self._around = tuple(around)
        self._options = options
        self._handlers = handlers
        self._source = source
        # None: the worker asks for tasks. Else taskd sends them.
        self._stream = source if isinstance(source, StreamSource) else None
        self._stats = stats
        self._surplus = surplus
        self._held: set[Held] = set()
        self._waiting: deque[Held] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._reports = Reports(source, self._finished, options.lease / 12)
        self._reports.wants, self._reports.brought = self._wants, self._brought
        # When a report may ask for tasks again.
        self._reports_ask = 0.0
        # When the worker may take tasks again, after a Throttle.
        self._throttled_until = 0.0
        self._is_polling = False
        # The most tasks that a call asks for.
        self._most = _MAX_ITEMS
        self._threads = Threads(options.concurrency)
        self._processes = Processes(options.processes) if options.processes else None
        self._stopping = asyncio.Event()
        self._aborting = asyncio.Event()
        # Something became free, or the worker stops.
        self._changed = asyncio.Event()
        # Leases are to be extended at once.
        self._hurry = asyncio.Event()
        if self._stream is not None:
            self._stream.connect(self._in_hand, self._ended_by_taskd, self._moved)

    def stop(self) -> None:
        """Takes no more tasks, and finishes those that began. The second call cancels these."""
        if self._stopping.is_set():
            self._aborting.set()
        self._take_no_more()

    def _take_no_more(self) -> None:
        self._stopping.set()
        self._tell_room()
        self._source.interrupt()

    async def run(self) -> None:
        """Until `stop`, the end of the source, or an error with which a worker cannot go on.

        Raises Unavailable if taskd did not take the last reports.
        """
        self._tell_room()
        background = {asyncio.create_task(loop) for loop in (self._reports.run(), self._keep(), self._watch_loop())}
        fetch = asyncio.create_task(self._fetch())
        grace = self._options.grace
        try:
            await asyncio.wait({fetch, *background}, return_when=asyncio.FIRST_COMPLETED)
            refused = any(one.done() for one in background) or (fetch.done() and fetch.exception() is not None)
            # If taskd refuses this worker, it refuses its reports, too.
            grace = 0.0 if refused else grace
        except asyncio.CancelledError:
            grace = 0.0
            raise
        finally:
            self._take_no_more()
            try:
                await self._drain(fetch, background, grace)
            finally:
                for one in (fetch, *background):
                    one.cancel()
                ended = await asyncio.gather(fetch, *background, return_exceptions=True)
                self._threads.close()
                if self._processes:
                    self._processes.close()
        for error in ended:
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0]
            if isinstance(error, Exception):
                raise error
        if self._reports.open:
            raise Unavailable(
                f"stopped with {self._reports.open} reports that taskd did not take; their tasks will be done again"
            )

    # Fetching.

    async def _fetch(self) -> None:
        pause, away, next_line = Pauses(0.1, 5.0), False, 0.0
        while await self._room():
            began, asked, is_pushed = time.monotonic(), max(1, min(self._free(), self._most)), self._is_pushed()
            try:
                self._is_polling = True
                leases = await self._source.get(asked)
            except Unavailable as error:
                # A line now and then, not for each attempt.
                is_due = not away or time.monotonic() >= next_line
                if is_due:
                    next_line = time.monotonic() + _REMIND_AFTER
                logger.log(logging.WARNING if is_due else logging.DEBUG, "taskd is away, trying again: %s", error)
                away = True
                if not is_pushed:
                    await self._sleep(pause.next())
                continue
            except EndOfSource:
                return
            except InvalidRequest:
                # taskd's max_items may be lower. If it is something else, the smallest call fails, too.
                if asked == 1 or is_pushed:
                    raise
                self._most = asked // 2
                continue
            finally:
                self._is_polling = False
            if away and not self._stopping.is_set():
                # At a stop the call ends although taskd is still away.
                logger.info("taskd is back")
                pause.reset()
            away = False
            self._take(leases)
            took = time.monotonic() - began
            if leases or is_pushed or took >= _SHORTEST_ROUND:
                pause.reset()
            elif took < self._options.wait / 2:
                # taskd did not wait for tasks as it was asked.
                await self._sleep(pause.next())
            else:
                await self._sleep(_SHORTEST_ROUND - took)

    def _take(self, leases: Sequence[Lease]) -> None:
        self._stats.got += len(leases)
        for lease in leases:
            self._hold(lease)
        self._tell_room()

    def _wants(self) -> int:
        """How many tasks a report asks for."""
        is_late = time.monotonic() < self._reports_ask
        if self._stopping.is_set() or self._is_polling or is_late or self._has_too_many_reports():
            return 0
        return max(0, min(self._free(), self._most))

    def _brought(self, leases: Sequence[Lease] | None) -> None:
        """A report that asked for tasks has brought these."""
        if leases is None:
            self._reports_ask = time.monotonic() + _ASKS_NOT_FOR
        self._take(leases or ())

    def _is_pushed(self) -> bool:
        """True: taskd sends tasks. False: it is asked for them."""
        return self._stream is not None and self._stream.pushes

    def _tell_room(self) -> None:
        """The room for tasks may be another now."""
        self._changed.set()
        if self._stream is not None:
            is_open = not self._stopping.is_set() and not self._has_too_many_reports()
            self._stream.room(self._free() if is_open else 0)

    def _has_too_many_reports(self) -> bool:
        return self._reports.open >= _MAX_ITEMS + self._options.concurrency or self._reports.is_full

    def _is_throttled(self) -> bool:
        return time.monotonic() < self._throttled_until

    def _throttle(self, pause: float) -> None:
        """Takes no tasks for so long. Those that wait here go to other workers."""
        self._throttled_until = max(self._throttled_until, time.monotonic() + pause)
        for held in self._waiting:
            self._give_back(held)
        self._waiting.clear()
        # A little later, so that the time is over then.
        asyncio.get_running_loop().call_later(pause + 0.001, self._tell_room)
        self._tell_room()

    def _free(self) -> int:
        if self._is_throttled():
            return 0
        options = self._options
        return options.concurrency + options.prefetch - len(self._running) - len(self._waiting)

    async def _room(self) -> bool:
        """Waits until the worker can take tasks. False: it stops."""
        # With a prefetch, a call for every single task would be a waste.
        enough = self._options.enough
        while not self._stopping.is_set():
            reports_ask = self._reports.is_asking or (self._reports.is_about_to_ask and self._wants() > 0)
            if self._is_pushed() or (self._free() >= enough and not self._has_too_many_reports() and not reports_ask):
                return True
            self._changed.clear()
            await self._changed.wait()
        return False

    async def _sleep(self, pause: float) -> None:
        """Sleeps, unless the worker stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause)

    def _hold(self, lease: Lease) -> None:
        held = Held(lease, time.monotonic() + self._options.lease / 3)
        self._held.add(held)
        if self._is_throttled() or (self._stopping.is_set() and not self._is_pushed()):
            self._give_back(held)
        elif self._stopping.is_set():
            # All of them go back together.
            self._waiting.append(held)
        elif len(self._running) < self._options.concurrency:
            self._begin(held)
        else:
            self._waiting.append(held)

    # Working.

    def _begin(self, held: Held) -> None:
        held.work = asyncio.create_task(self._work(held), name=f"taskd-{held.lease.id}")
        self._running.add(held.work)
        self._stats.running = len(self._running)
        held.work.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Task[None]) -> None:
        self._running.discard(work)
        self._stats.running = len(self._running)
        if not work.cancelled() and (error := work.exception()):
            # A task without a report would be extended for ever.
            why = reason(f"the worker failed: {error_text(error)}")
            for held in [one for one in self._held if one.work is work]:
                self._report(held, Rejection(lease=held.lease, reason=why))
            logger.error("the worker has an error of its own: %r", error, exc_info=error)
        while self._waiting and len(self._running) < self._options.concurrency and not self._stopping.is_set():
            self._begin(self._waiting.popleft())
        self._tell_room()

    async def _work(self, held: Held) -> None:
        """Runs the handler, and hands its outcome to the reports."""
        handler = self._handlers.get(held.lease.queue) or self._handlers.get(None)
        if handler is None:
            why = "the worker has no handler for this queue"
            logger.warning("rejected: %s (%s)", why, held.name, extra=held.fields())
            self._report(held, Rejection(lease=held.lease, reason=why))
            return
        timeout = handler.timeout if handler.timeout is not None else self._options.timeout
        limit = asyncio.timeout(timeout)
        outcome: Outcome | None
        held.has_started = True
        held.began = time.monotonic()
        try:
            if self._stream is not None:
                await self._stream.started(held.lease)
            async with limit:
                outcome = await self._run_handler(held, handler)
            if isinstance(outcome, Rejection):
                # Its error stayed in its process.
                level = logging.INFO if outcome.not_started else logging.WARNING
                what = "put off" if outcome.not_started else "rejected"
                logger.log(level, "%s: %s (%s)", what, outcome.reason, held.name, extra=held.fields())
        except GeneratorExit:
            raise
        except asyncio.CancelledError:
            # Nobody waits for the outcome, or `_cut_short` has reported it.
            is_expected = held.is_over or self._aborting.is_set()
            outcome = None if is_expected else Rejection(lease=held.lease, reason="the handler cancelled itself")
            if outcome is not None:
                logger.warning("rejected: %s (%s)", outcome.reason, held.name, extra=held.fields())
        except TimeoutError as error:
            outcome = failed(held.lease, error)
            if limit.expired():
                outcome = Rejection(lease=held.lease, reason=f"timed out after {timeout:g} s")
            self._log_failure(held, outcome, error)
        except BaseException as error:
            # Also SystemExit and groups: a task without a report would be extended for ever.
            outcome = failed(held.lease, error)
            self._log_failure(held, outcome, error)
        outcome = await self._insert_surplus(held, outcome)
        if outcome is not None:
            self._report(held, outcome)
        if held.elsewhere and not held.elsewhere.done() and not self._aborting.is_set():
            # Its thread or process cannot be stopped, and keeps its place until the handler returns.
            logger.warning("the handler goes on in its thread or process (%s)", held.name, extra=held.fields())
            with contextlib.suppress(Exception):
                await asyncio.wrap_future(held.elsewhere)

    async def _insert_surplus(self, held: Held, outcome: Outcome | None) -> Outcome | None:
        """Inserts the discovered tasks that are too many for a completion. None: nobody waits for the task any more."""
        if not isinstance(outcome, Completion):
            return outcome
        not_stored = list(outcome.not_stored)
        if self._surplus is not None:
            try:
                outcome = await self._surplus.insert(outcome, not_stored)
            except asyncio.CancelledError:
                return None
            except TaskdError as error:
                # Another attempt would find as many.
                why = f"it discovered more tasks than a completion has, and taskd takes no insert of them: {error}"
                refused = Rejection(lease=held.lease, reason=reason(why), retry=False)
                logger.warning("rejected: %s (%s)", refused.reason, held.name, extra=held.fields())
                return refused
        if len(not_stored) == 1:
            self._log_not_stored(held, f"1 discovered task is not stored: {not_stored[0]}")
        elif not_stored:
            self._log_not_stored(held, f"{len(not_stored)} discovered tasks are not stored; the first: {not_stored[0]}")
        return outcome

    def _log_not_stored(self, held: Held, why: str) -> None:
        logger.warning("%s (%s)", why, held.name, extra=held.fields())

    async def _run_handler(self, held: Held, handler: Handler) -> Outcome:
        lease, name = held.lease, self._options.name
        if self._processes and not handler.is_async:
            held.elsewhere = self._processes.submit(handler, lease, name)
            return await self._processes.outcome(held.elsewhere, lease)
        held.task = task = handler.open(lease, name)
        if not self._around:
            return completed(lease, task, await self._call_handler(held, handler, task))
        set_current_task(task)
        call: Callable[[], Awaitable[Any]] = partial(self._call_handler, held, handler, task)
        for hook in reversed(self._around):
            call = partial(hook, task, call)
        return completed(lease, task, await call())

    async def _call_handler(self, held: Held, handler: Handler, task: Task[Any]) -> Any:
        if handler.is_async:
            set_current_task(task)
            return await handler.function(task)
        held.elsewhere = self._threads.submit(lambda: handler.call(task))
        result = await asyncio.wrap_future(held.elsewhere)
        if inspect.isawaitable(result):
            result = await result
        return result

    def _log_failure(self, held: Held, outcome: Rejection, error: BaseException) -> None:
        if isinstance(error, Reject | Retry | PayloadError | PutOff):
            # Without a setup, logging shows warnings.
            level = logging.INFO if outcome.not_started else logging.WARNING
            what = "put off" if outcome.not_started else "rejected"
            logger.log(level, "%s: %s (%s)", what, outcome.reason, held.name, extra=held.fields())
        else:
            logger.error("the handler failed: %s (%s)", outcome.reason, held.name, exc_info=error, extra=held.fields())

    # Reporting.

    def _report(self, held: Held, outcome: Outcome) -> None:
        if held.is_over:
            return
        held.is_over = True
        if held.task is not None:
            if held.task.limit is not None:
                outcome = replace(outcome, limit=held.task.limit)
            if isinstance(outcome, Rejection):
                held.task._cancelled.set()
        if isinstance(outcome, Rejection) and outcome.pause > 0:
            self._throttle(outcome.pause)
        if outcome.limit is not None and not held.lease.limit_key:
            # taskd would refuse the whole report.
            outcome = replace(outcome, limit=None)
            why = "the task has no limit key, so hold and pace do nothing: its queue had no limit_by at its insert"
            logger.warning("%s (%s)", why, held.name, extra=held.fields())
        self._reports.add(held, outcome)

    def _give_back(self, held: Held) -> None:
        """Gives back a task that did not begin, so that another worker gets it at once."""
        why = "the worker takes no tasks for a while" if self._is_throttled() else "the worker stopped before it began"
        self._report(held, Rejection(lease=held.lease, reason=why, delay=0.0, not_started=True))

    def _finished(self, held: Held, outcome: Outcome, answer: Answer) -> None:
        """taskd has answered the report."""
        self._held.discard(held)
        self._tell_room()
        if answer.status is not ItemStatus.OK:
            self._stats.lost += 1
            said = answer.error or answer.status.value
            logger.warning("taskd did not count the report: %s (%s)", said, held.name, extra=held.fields())
        elif isinstance(outcome, Completion):
            self._stats.completed += 1
            if answer.error:
                self._log_not_stored(held, answer.error)
            logger.debug("completed", extra=held.fields())
        elif outcome.not_started:
            self._stats.returned += 1
        else:
            self._stats.rejected += 1

    # Leases.

    async def _keep(self) -> None:
        """Extends each lease when a third of it is over, until its report is answered."""
        tick = self._options.lease / 12
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), tick)
            self._hurry.clear()
            self._say_what_runs()
            now = time.monotonic()
            due = [held for held in self._held if held.extend_at <= now + tick]
            for at in range(0, len(due), _MAX_ITEMS):
                await self._extend(due[at : at + _MAX_ITEMS])

    def _say_what_runs(self) -> None:
        """A line for each handler that has run for half of a lease, and again when it has run twice as long."""
        now = time.monotonic()
        for held in self._held:
            if not held.has_started or held.is_over or now - held.began < self._options.lease / 2 * 2**held.said:
                continue
            held.said += 1
            logger.warning(
                "the handler still runs, after %.0f s (%s)", now - held.began, held.name, extra=held.fields()
            )

    async def _extend(self, due: list[Held]) -> None:
        began = time.monotonic()
        try:
            answers = await self._source.extend([held.lease for held in due])
        except Unavailable as error:
            logger.debug("leases could not be extended, trying again: %s", error)
            return
        except InvalidRequest as error:
            # taskd's max_items may be lower.
            if len(due) > 1:
                await self._extend(due[: len(due) // 2])
                await self._extend(due[len(due) // 2 :])
            else:
                said = f"{error} ({due[0].name})"
                logger.warning("the lease could not be extended, trying again: %s", said, extra=due[0].fields())
            return
        for held, answer in zip(due, answers, strict=True):
            match answer.status:
                case ItemStatus.OK:
                    held.extend_at = began + self._options.lease / 3
                case ItemStatus.TRY_LATER:
                    pass
                case ItemStatus.INVALID:
                    # The extension is wrong, and not the lease.
                    held.extend_at = began + self._options.lease / 6
                    said = f"{answer.error} ({held.name})"
                    logger.warning("taskd refused to extend the lease, trying again: %s", said, extra=held.fields())
                case _ if held not in self._held or held.is_over:
                    # Its report has an answer of its own.
                    pass
                case status:
                    self._drop(held, status, answer.error)

    def _drop(self, held: Held, status: ItemStatus, error: str) -> None:
        """Ends work that nobody waits for."""
        level = logging.INFO if status is ItemStatus.CANCELLED else logging.WARNING
        logger.log(level, "the lease ended: %s (%s)", error or status.value, held.name, extra=held.fields())
        self._stats.lost += 1
        held.is_over = True
        self._held.discard(held)
        if held.task is not None:
            held.task._cancelled.set()
        if held.work is not None:
            held.work.cancel()
        elif held in self._waiting:
            self._waiting.remove(held)
            self._tell_room()

    def _in_hand(self) -> Collection[tuple[str, bool]]:
        """The ids of the tasks in hand, and whether they have started."""
        return [(held.lease.id, held.has_started) for held in self._held]

    def _ended_by_taskd(self, task_id: str, answer: Answer) -> None:
        """taskd says that a lease has ended."""
        for held in [one for one in self._held if one.lease.id == task_id and not one.is_over]:
            self._drop(held, answer.status, answer.error)

    def _moved(self) -> None:
        """Another process is to learn what is in hand."""
        for held in self._held:
            held.extend_at = 0.0
        self._hurry.set()

    # The end.

    async def _drain(self, fetch: asyncio.Task[None], background: set[asyncio.Task[None]], grace: float) -> None:
        """Finishes what began, gives back what did not, and reports all, within the grace."""
        end = time.monotonic() + grace
        if self._is_pushed():
            # Behind the answer to the surrender, no task comes.
            await asyncio.wait({fetch}, timeout=_SURRENDER)
        self._return_waiting()
        if self._running:
            logger.info("stopping: %d handlers are at work", len(self._running))
        aborted = asyncio.create_task(self._aborting.wait())
        while not aborted.done() and (left := end - time.monotonic()) > 0:
            # The answer of an interrupted call may still come, with tasks.
            at_work = {*self._running, fetch} if not fetch.done() else self._running
            if not at_work:
                break
            await asyncio.wait({*at_work, aborted}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        is_aborted = self._aborting.is_set()
        aborted.cancel()
        self._aborting.set()
        await self._cut_short()
        if any(one.done() for one in background):
            return
        if not fetch.done() and not self._is_pushed():
            # The worker was cancelled: the answer may still come, with tasks.
            await asyncio.wait({fetch}, timeout=_LAST_ANSWER)
        left = _LAST_REPORTS if is_aborted else max(end - time.monotonic(), _LAST_REPORTS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reports.wait_until_empty(), left)
        if self._reports.open:
            logger.error("stopped with %d reports that taskd did not take", self._reports.open)

    def _return_waiting(self) -> None:
        """Gives back the tasks that no handler has begun."""
        count = len(self._waiting)
        if self._stream is None or not self._is_pushed():
            while self._waiting:
                self._give_back(self._waiting.popleft())
        elif count:
            self._held.difference_update(self._waiting)
            self._waiting.clear()
            self._stats.returned += count
            logger.debug("%d tasks go back", count)
            if self._held:
                self._stream.give_back()
            # Else the end of the session gives them back, at once.

    async def _cut_short(self) -> None:
        """Cancels the handlers that are still at work, and rejects their tasks."""
        late = [held for held in self._held if held.work in self._running and not held.is_over]
        for held in late:
            self._report(held, Rejection(lease=held.lease, reason="the worker stopped", delay=0.0))
            logger.warning("the worker stops before the handler has finished (%s)", held.name, extra=held.fields())
        for work in self._running:
            work.cancel()
        if self._running:
            _, deaf = await asyncio.wait(self._running, timeout=_CLEAN_UP)
            if deaf:
                logger.warning("%d handlers go on although they were cancelled", len(deaf))

    async def _watch_loop(self) -> None:
        """Warns of handlers that block the event loop: no lease is extended meanwhile."""
        longest = max(1.0, self._options.lease / 6)
        while True:
            began = time.monotonic()
            await asyncio.sleep(1.0)
            late = time.monotonic() - began - 1.0
            if late > longest:
                logger.warning(
                    "an async handler kept the event loop busy for %.1f s, and leases may be lost: "
                    "await what takes long, or make the handler a plain function, which runs in a thread",
                    late,
                )
