"""One stream of a worker: its frames, and the answers to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import grpc.aio

from taskd_client._connection import StreamCall, settle
from taskd_client.errors import Unavailable
from taskd_client.v1 import taskd_pb2 as pb

# How long taskd may take to open a session.
_OPEN_WITHIN = 10.0
# Until taskd has said how often it wants to hear of the worker.
_FIRST_HEARTBEAT = 5.0
# The share of a session's time-out after which a silent stream is given up. taskd may have heard its last frame a
# heartbeat before, a third of the time-out, and ends the session when the time-out is over.
_PATIENCE_SHARE = 0.6


class Kind(Enum):
    """The kinds of reports, by the name that a frame and its answer have for them."""

    COMPLETIONS = "completions"
    REJECTIONS = "rejections"
    EXTENSIONS = "extensions"


class Owner(Protocol):
    """Whose stream it is: it hears what taskd says, and knows how much the worker wants."""

    def want(self) -> int:
        """How many more tasks taskd shall send. They count as wanted from here on."""
        ...

    def granted(self, wanted: int, granted: int) -> None: ...

    def opened(self, stream: Stream, opened: pb.SessionOpened) -> None: ...

    def tasks(self, tasks: Sequence[pb.LeasedTask]) -> None: ...

    def ended(self, ended: Sequence[pb.ItemResult]) -> None: ...


class StreamRefused(Exception):
    """taskd ended the stream because of a frame of this worker, which may be the one with these reports."""


class Silent(Exception):
    """taskd said nothing for as long as its session lasts."""


@dataclass(slots=True)
class _Parcel:
    """Reports that go in one frame, and their answer."""

    kind: Kind
    items: Sequence[Any]
    answer: asyncio.Future[Sequence[pb.ItemResult]]


@dataclass(slots=True)
class _Frame:
    """A frame that taskd has not answered."""

    parcels: list[_Parcel] = field(default_factory=list)
    want: int = 0
    surrendered: asyncio.Future[None] | None = None


class Stream:
    """A stream, from its first frame to its end. One task writes, one reads, and one listens for silence."""

    def __init__(self, call: StreamCall, owner: Owner, most_items: int) -> None:
        self._call = call
        self._owner = owner
        self._most_items = most_items
        self._heartbeat = _FIRST_HEARTBEAT
        self._patience = _OPEN_WITHIN
        self._heard = time.monotonic()
        self._wake = asyncio.Event()
        self._numbers = itertools.count(1)
        self._parcels: dict[Kind, deque[_Parcel]] = {kind: deque() for kind in Kind}
        # The ids of started tasks, and those who wait until they are told.
        self._started: list[str] = []
        self._told: asyncio.Future[None] | None = None
        self._surrendered: asyncio.Future[None] | None = None
        self._sent: dict[int, _Frame] = {}
        self._is_over = False
        # No more wants: taskd ends the stream, or this side does.
        self._is_closing = False
        # Say `close` when all is answered; or only end this side.
        self._says_close: bool | None = None
        self.ended = asyncio.Event()

    @property
    def largest(self) -> int:
        """The most items of a frame that taskd has not answered."""
        return max((sum(len(one.items) for one in frame.parcels) for frame in self._sent.values()), default=0)

    # The worker's side.

    def wake(self) -> None:
        """The owner may want more tasks."""
        self._wake.set()

    async def report(self, kind: Kind, items: Sequence[Any], timeout: float) -> Sequence[pb.ItemResult]:
        """Sends items, and returns their answers. Raises Unavailable, or StreamRefused."""
        if self._is_over:
            raise Unavailable("the stream is over")
        parcel = _Parcel(kind, items, asyncio.get_running_loop().create_future())
        self._parcels[kind].append(parcel)
        self._wake.set()
        try:
            async with asyncio.timeout(timeout):
                return await parcel.answer
        except TimeoutError:
            with contextlib.suppress(ValueError):
                self._parcels[kind].remove(parcel)
            raise Unavailable(f"taskd did not answer {len(items)} {kind.value} within {timeout:g} s") from None

    async def started(self, task_id: str) -> None:
        """Returns when the frame that says so is on its way; or the stream is over, and the next one says it."""
        if self._is_over:
            return
        self.tell([task_id])
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._told)

    def tell(self, started: Iterable[str]) -> None:
        """Says that these tasks have started."""
        self._started.extend(started)
        self._wake.set()

    async def surrender(self) -> None:
        """Takes back all demand. No task comes when it has returned."""
        if self._is_over:
            return
        if self._surrendered is None:
            self._surrendered = asyncio.get_running_loop().create_future()
        self._wake.set()
        await asyncio.shield(self._surrendered)

    def finish(self, *, close: bool) -> None:
        """Ends the stream when all frames are answered; with `close` the session, too."""
        self._says_close = close or bool(self._says_close)
        self._is_closing = True
        self._wake.set()

    # The stream.

    async def run(self, first: pb.WorkerFrame) -> None:
        """From the first frame to the end. Returns after a good end; raises AioRpcError or Silent after another."""
        writer = asyncio.create_task(self._write_all(first))
        reader = asyncio.create_task(self._read_all())
        listener = asyncio.create_task(self._listen())
        ended: Sequence[BaseException | None] = ()
        try:
            # The writer ends before the reader when this side has said all.
            while not (reader.done() or listener.done() or (writer.done() and writer.exception())):
                going = [one for one in (reader, listener, writer) if not one.done()]
                await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_over = True
            listener.cancel()
            self._wake.set()
            await settle(self._call, reader, writer)
            ended = await asyncio.gather(reader, listener, writer, return_exceptions=True)
            self._release(next((one for one in ended if isinstance(one, grpc.aio.AioRpcError)), None))
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _listen(self) -> None:
        while (left := self._heard + self._patience - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 1.0))
        raise Silent(f"taskd said nothing for {self._patience:g} s")

    async def _read_all(self) -> None:
        while isinstance(frame := await self._call.read(), pb.TaskdFrame):
            self._heard = time.monotonic()
            if frame.HasField("opened"):
                self._heartbeat = max(frame.opened.heartbeat.ToTimedelta().total_seconds(), 0.1)
                self._patience = max(frame.opened.timeout.ToTimedelta().total_seconds() * _PATIENCE_SHARE, 1.0)
                self._owner.opened(self, frame.opened)
            if frame.tasks:
                self._owner.tasks(frame.tasks)
            if frame.HasField("answer"):
                self._read_answer(frame.answer)
            if frame.ended:
                self._owner.ended(frame.ended)
            if frame.HasField("closing"):
                # The owner goes on elsewhere as soon as what is under way has its answers.
                self.finish(close=False)

    def _read_answer(self, answer: pb.FrameAnswer) -> None:
        frame = self._sent.pop(answer.number, None)
        if frame is None:
            return
        for parcel in frame.parcels:
            # One that waited for too long is gone.
            if not parcel.answer.done():
                parcel.answer.set_result(list(getattr(answer, parcel.kind.value)))
        if frame.want:
            self._owner.granted(frame.want, answer.granted)
        if frame.surrendered is not None:
            _resolve(frame.surrendered)
        if self._is_closing:
            self._wake.set()

    async def _write_all(self, first: pb.WorkerFrame) -> None:
        frame: pb.WorkerFrame | None = first
        loop = asyncio.get_running_loop()
        spoke = loop.time()
        # The reader learns why a stream ended.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while not self._is_over:
                if frame is not None:
                    told = None
                    if frame is not first and frame.started:
                        told, self._told = self._told, None
                    try:
                        await self._call.write(frame)
                    finally:
                        _resolve(told)
                    spoke = loop.time()
                    if frame.close:
                        return
                self._wake.clear()
                if (frame := self._next_frame()) is not None:
                    continue
                if self._says_close is not None and not self._sent:
                    if not self._says_close:
                        await self._call.done_writing()
                        return
                    frame = pb.WorkerFrame(close=True)
                    continue
                try:
                    async with asyncio.timeout_at(spoke + self._heartbeat):
                        await self._wake.wait()
                except TimeoutError:
                    frame = pb.WorkerFrame()

    def _next_frame(self) -> pb.WorkerFrame | None:
        """The next thing to say; None if there is nothing."""
        sent, frame = _Frame(), pb.WorkerFrame(started=self._started)
        self._started.clear()
        if self._surrendered is not None:
            frame.surrender = True
            sent.surrendered, self._surrendered = self._surrendered, None
        elif not self._is_closing:
            frame.want = sent.want = self._owner.want()
        # A want goes without reports: taskd claims meanwhile.
        if not frame.want and not frame.surrender:
            self._add_reports(frame, sent)
        if sent.parcels or frame.want or frame.surrender:
            frame.number = next(self._numbers)
            self._sent[frame.number] = sent
            return frame
        return frame if frame.started else None

    def _add_reports(self, frame: pb.WorkerFrame, sent: _Frame) -> None:
        left = self._most_items
        for kind, parcels in self._parcels.items():
            if parcels and (len(parcels[0].items) <= left or left == self._most_items):
                parcel = parcels.popleft()
                getattr(frame, kind.value).extend(parcel.items)
                left -= len(parcel.items)
                sent.parcels.append(parcel)

    def _release(self, error: grpc.aio.AioRpcError | None) -> None:
        """Nobody waits for a stream that is over."""
        is_refused = error is not None and error.code() in REFUSALS
        under_way = [parcel for frame in self._sent.values() for parcel in frame.parcels]
        for parcel in under_way:
            if not parcel.answer.done():
                said = error.details() if error is not None else ""
                parcel.answer.set_exception(StreamRefused(said) if is_refused else Unavailable("the stream broke"))
                # Somebody may have stopped waiting.
                parcel.answer.exception()
        for parcel in itertools.chain.from_iterable(self._parcels.values()):
            if not parcel.answer.done():
                parcel.answer.set_exception(Unavailable("the stream broke"))
                parcel.answer.exception()
        for one in (self._told, self._surrendered, *(frame.surrendered for frame in self._sent.values())):
            _resolve(one)
        self.ended.set()


# taskd does not take a frame, whoever sends it.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
