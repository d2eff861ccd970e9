"""Tasks from taskd by a stream, on which taskd sends them as they come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from taskd_client._connection import Connection
from taskd_client._grpc_source import (
    REPORT_TIMEOUT,
    GrpcSource,
    completion,
    extension,
    extension_timeout,
    read_answer,
    read_lease,
    rejection,
)
from taskd_client._stream import REFUSALS, Kind, Silent, Stream, StreamRefused
from taskd_client._time import Pauses, to_duration
from taskd_client.errors import TaskdError, Unavailable
from taskd_client.source import Answer, Completion, Lease, Rejection
from taskd_client.v1 import taskd_pb2 as pb

logger = logging.getLogger("taskd.worker")

# The share of a lease after which a silent worker loses its session. It is less than a lease that was just extended
# has left, so that the tasks which had not started go back at no cost.
_TIMEOUT_SHARE = 1 / 2
# A handler may block the event loop for a while; taskd allows ten minutes.
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 5.0, 600.0
# A larger report might be more than taskd takes in a frame, and would end the stream.
_MAX_FRAME_BYTES = 4 << 20
# taskd's setting max_items has this default.
_MAX_ITEMS = 1000
# How long taskd is left alone with a demand that it did not take.
_ASK_AGAIN = 1.0
# A stream that lived for so long was a good one.
_GOOD = 5.0
# How long an end waits for taskd.
_LAST_WORDS = 2.0


class StreamSource:
    """Holds a stream to one process of taskd, and goes on at the next one when it breaks.

    While there is no stream, reports and extensions go by unary calls: taskd takes them in any process. A taskd without
    streams is asked by long polls.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        worker: str,
        queues: Sequence[str],
        weights: Mapping[str, int],
        lease: float,
        wait: float,
        max_bytes: int,
        enough: int,
        takeover: bool,
    ) -> None:
        """enough: fewer tasks than that are not worth a frame of their own."""
        self._connection = connection
        self._polls = GrpcSource(
            connection, worker=worker, queues=queues, weights=weights, lease=lease, wait=wait, max_bytes=max_bytes
        )
        self._lease = lease
        self._enough = enough
        self._takeover = takeover
        self._ask = pb.OpenSession(
            worker=worker,
            queues=queues,
            weights=weights,
            tells_started=True,
            timeout=to_duration(min(max(lease * _TIMEOUT_SHARE, _SHORTEST_TIMEOUT), _LONGEST_TIMEOUT)),
            lease_duration=to_duration(lease),
            max_bytes=max_bytes,
        )
        self.pushes = True
        """False: taskd has no streams, and `get` asks by long polls."""
        self._runner: asyncio.Task[None] | None = None
        self._stream: Stream | None = None
        self._session = ""
        self._most_items = _MAX_ITEMS
        self._ready: deque[Lease] = deque()
        # What the worker has room for, and what taskd may still send of it.
        self._free = 0
        self._asked = 0
        self._first_want = 0
        # The started tasks that the first frame names.
        self._first_started: set[str] = set()
        self._ask_at = 0.0
        self._news = asyncio.Event()
        self._away: Unavailable | None = None
        self._is_back = False
        self._error: Exception | None = None
        self._is_interrupted = False
        self._surrender: asyncio.Task[None] | None = None
        # The worker has no room for what taskd was asked for.
        self._withdrawal: asyncio.Task[None] | None = None
        # No more tasks can come.
        self._is_drained = asyncio.Event()
        # No other stream is on its way that gives tasks back.
        self._gave_back = asyncio.Event()
        self._gave_back.set()
        self._holding: Callable[[], Collection[tuple[str, bool]]] = tuple
        self._on_ended: Callable[[str, Answer], None] = lambda _id, _answer: None
        self._on_moved: Callable[[], None] = lambda: None

    def connect(
        self,
        holding: Callable[[], Collection[tuple[str, bool]]],
        ended: Callable[[str, Answer], None],
        moved: Callable[[], None],
    ) -> None:
        """Tells the source about its worker.

        holding: the ids of the tasks in hand, and whether they have started. ended: a lease that ended although it was
        not reported. moved: taskd does not know what is in hand, and learns it from extensions.
        """
        self._holding, self._on_ended, self._on_moved = holding, ended, moved

    # Tasks.

    def room(self, free: int) -> None:
        """The worker has room for so many tasks now. taskd sends no more."""
        self._free = free
        is_asking = self._asked > 0 and self._withdrawal is None and not self._is_interrupted
        if free == 0 and is_asking and self._stream is not None:
            self._withdrawal = asyncio.create_task(self._withdraw(self._stream))
        elif self._missing():
            self._wake()

    async def _withdraw(self, stream: Stream) -> None:
        """Takes back the demand of a worker that takes no tasks for a while, so that taskd sends them to others."""
        await stream.surrender()
        # Another stream begins with a demand of its own.
        if self._stream is stream:
            self._asked = 0
        self._withdrawal = None
        if self._missing():
            self._wake()

    def _missing(self) -> int:
        """The tasks that taskd shall send besides those that it was asked for."""
        missing = self._free - len(self._ready) - self._asked
        is_time = not self._is_interrupted and self._withdrawal is None and time.monotonic() >= self._ask_at
        return missing if is_time and missing >= self._enough else 0

    async def get(self, max_tasks: int) -> Sequence[Lease]:
        """Waits for what taskd sends. It returns nothing when a stream is there again."""
        if not self.pushes:
            return await self._polls.get(max_tasks)
        while self.pushes:
            if self._runner is None:
                self._runner = asyncio.create_task(self._run())
            if self._ready:
                leases = tuple(self._ready)
                self._ready.clear()
                return leases
            if self._error is not None:
                raise self._error
            if self._is_interrupted:
                await self._is_drained.wait()
                if not self._ready:
                    return ()
                continue
            if self._away is not None:
                away, self._away = self._away, None
                raise away
            if self._is_back:
                self._is_back = False
                return ()
            self._news.clear()
            await self._news.wait()
        return ()

    def interrupt(self) -> None:
        """Takes back the demand. `get` returns when no more tasks can come."""
        self._polls.interrupt()
        if self._is_interrupted:
            return
        self._is_interrupted = True
        self._news.set()
        if self._stream is None:
            self._is_drained.set()
        else:
            self._surrender = asyncio.create_task(self._surrender_to(self._stream))

    async def _surrender_to(self, stream: Stream) -> None:
        # A stream that does not answer is as good as none.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                await stream.surrender()
        self._is_drained.set()

    async def started(self, lease: Lease) -> None:
        """Tells taskd that a handler begins, before it does: a task that kills its worker must cost an attempt."""
        if self._stream is not None:
            await self._stream.started(lease.id)

    def give_back(self) -> None:
        """Lets taskd have the tasks that came and are not in hand any more, at no cost.

        The session goes on on another stream, which names those in hand. The others did not arrive.
        """
        self._ready.clear()
        if self._stream is not None:
            self._gave_back.clear()
            self._stream.finish(close=False)

    # Reports.

    async def complete(self, completions: Sequence[Completion]) -> Sequence[Answer]:
        if self._stream is not None and _fits(completions):
            with contextlib.suppress(StreamRefused):
                return await self._report(Kind.COMPLETIONS, [completion(one) for one in completions])
        return await self._polls.complete(completions)

    async def reject(self, rejections: Sequence[Rejection]) -> Sequence[Answer]:
        if self._stream is not None and _fits(rejections):
            with contextlib.suppress(StreamRefused):
                return await self._report(Kind.REJECTIONS, [rejection(one) for one in rejections])
        return await self._polls.reject(rejections)

    async def extend(self, leases: Sequence[Lease]) -> Sequence[Answer]:
        if self._stream is not None:
            with contextlib.suppress(StreamRefused):
                items = [extension(lease, self._lease) for lease in leases]
                return await self._report(Kind.EXTENSIONS, items, extension_timeout(self._lease))
        return await self._polls.extend(leases)

    async def _report(self, kind: Kind, items: Sequence[Any], timeout: float = REPORT_TIMEOUT) -> Sequence[Answer]:
        answers: list[Answer] = []
        for at in range(0, len(items), self._most_items):
            stream = self._stream
            if stream is None:
                raise Unavailable("the stream broke")
            answered = await stream.report(kind, items[at : at + self._most_items], timeout)
            answers.extend(map(read_answer, answered))
        if kind is not Kind.EXTENSIONS:
            # There is room in the session again.
            self._ask_at = 0.0
        return answers

    # What the stream says.

    def want(self) -> int:
        missing = self._missing()
        self._asked += missing
        return missing

    def granted(self, wanted: int, granted: int) -> None:
        self._asked = max(0, self._asked - max(0, wanted - granted))
        if granted < wanted:
            # max_session_tasks or max_worker_tasks is reached.
            self._ask_at = time.monotonic() + _ASK_AGAIN
            asyncio.get_running_loop().call_later(_ASK_AGAIN, self._ask_again)

    def _ask_again(self) -> None:
        self._ask_at = 0.0
        self._wake()

    def _wake(self) -> None:
        if self._stream is not None:
            self._stream.wake()

    def opened(self, stream: Stream, opened: pb.SessionOpened) -> None:
        self._stream, self._session, self._takeover = stream, opened.session, False
        self.granted(self._first_want, opened.granted)
        self._gave_back.set()
        # Those that have started since the first frame.
        started = {task_id for task_id, is_started in self._holding() if is_started}
        stream.tell(started - self._first_started)
        self._away, self._is_back = None, True
        self._news.set()
        logger.debug("a stream to %s is open", self._connection.address)
        if not opened.resumed and self._holding():
            self._on_moved()

    def tasks(self, tasks: Sequence[pb.LeasedTask]) -> None:
        self._asked = max(0, self._asked - len(tasks))
        self._ready.extend(map(read_lease, tasks))
        self._news.set()
        if self._is_drained.is_set():
            # The stop came while the stream was being opened, and nobody takes them any more.
            self.give_back()

    def ended(self, ended: Sequence[pb.ItemResult]) -> None:
        for item in ended:
            waiting = next((lease for lease in self._ready if lease.id == item.id), None)
            if waiting is not None:
                self._ready.remove(waiting)
            else:
                self._on_ended(item.id, read_answer(item))

    # The streams.

    async def _run(self) -> None:
        """Holds a stream, one after the other, until `close` or an error that does not pass."""
        pause = Pauses(0.1, 5.0)
        try:
            while self.pushes:
                began = time.monotonic()
                try:
                    await self._serve()
                except Unavailable as error:
                    self._away = error
                    self._news.set()
                if time.monotonic() - began > _GOOD:
                    pause.reset()
                await asyncio.sleep(pause.next())
        except Exception as error:
            # `get` raises it.
            self._error = error
        finally:
            self._is_drained.set()
            self._gave_back.set()
            self._news.set()

    async def _serve(self) -> None:
        """One stream. Raises Unavailable if it could not be opened, and another error if it never will."""
        call, at = self._connection.stream()
        stream = Stream(call, self, self._most_items)
        try:
            await stream.run(self._first_frame())
        except Silent as error:
            await self._connection.abandon(at)
            self._read_end(Unavailable(f"{error} ({self._connection.address_of(at)})"))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                logger.info("taskd has no streams; asking by long polls")
                self.pushes = False
                return
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                # This process has all sessions that it may have.
                self._connection.leave(at)
            if self._stream is stream and error.code() in REFUSALS:
                self._read_refusal(stream, error)
            else:
                self._read_end(self._connection.error(error, at))
        finally:
            self._stream = None
            if self._is_interrupted:
                self._is_drained.set()

    def _first_frame(self) -> pb.WorkerFrame:
        self._asked, self._ask_at = 0, 0.0
        if self._is_interrupted:
            # Nobody takes them any more, so they go back.
            self._ready.clear()
        holding = self._holding()
        self._first_started = {task_id for task_id, is_started in holding if is_started}
        frame = pb.WorkerFrame(open=self._ask, started=self._first_started)
        frame.open.session = self._session
        frame.open.takeover = self._takeover
        # What came and was not taken yet, too, unless it goes back.
        frame.open.holding.extend([task_id for task_id, _ in holding] + [lease.id for lease in self._ready])
        frame.open.want = self._first_want = self.want()
        return frame

    def _read_end(self, error: TaskdError) -> None:
        """A stream that was open is opened again, and only if that fails is taskd away."""
        if self._stream is None or not isinstance(error, Unavailable):
            raise error
        logger.info("the stream ended, opening another: %s", error)

    def _read_refusal(self, stream: Stream, error: grpc.aio.AioRpcError) -> None:
        """taskd ended an open stream because of a frame. Unary calls say which of its reports is wrong."""
        logger.warning("taskd refused a frame, opening another stream: %s", error.details())
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT and stream.largest > 1:
            # taskd's max_items may be lower.
            self._most_items = stream.largest // 2

    async def close(self) -> None:
        """Ends the session: what is left in hand goes back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                await self._gave_back.wait()
        if self._stream is not None:
            self._stream.finish(close=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await self._stream.ended.wait()
        begun = [one for one in (self._runner, self._surrender, self._withdrawal) if one is not None]
        for one in begun:
            one.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        await self._polls.close()


def _fits(outcomes: Sequence[Completion] | Sequence[Rejection]) -> bool:
    return sum(one.size() for one in outcomes) <= _MAX_FRAME_BYTES + 1024
