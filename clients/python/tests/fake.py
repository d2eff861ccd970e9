"""A gRPC server that speaks as a test says, for what a real taskd does only when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio

from taskd_client.v1 import taskd_pb2 as pb

Script = Callable[["FakeStream"], Awaitable[None]]


class FakeStream:
    """One stream of a worker."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.open = pb.OpenSession()
        self.first = pb.WorkerFrame()
        # The worker has closed its side.
        self.is_half_closed = False

    async def read(self) -> pb.WorkerFrame | None:
        frame = await self.context.read()
        return frame if isinstance(frame, pb.WorkerFrame) else None

    async def accept(
        self, *, session: str = "s1", granted: int | None = None, timeout: float = 30.0, **opened: Any
    ) -> None:
        """Reads the first frame, and opens a session."""
        frame = await self.read()
        assert frame is not None
        self.first, self.open = frame, frame.open
        message = pb.SessionOpened(session=session, granted=frame.open.want if granted is None else granted, **opened)
        message.timeout.FromMilliseconds(int(timeout * 1000))
        message.heartbeat.FromMilliseconds(int(timeout * 1000 / 3))
        await self.send(opened=message)

    async def send(self, **parts: Any) -> None:
        await self.context.write(pb.TaskdFrame(**parts))

    async def send_tasks(self, *keys: str) -> None:
        await self.send(tasks=[leased(key) for key in keys])

    async def until(self, condition: Callable[[pb.WorkerFrame], bool]) -> pb.WorkerFrame:
        """Answers frames with OK until one fits, which it answers, too."""
        while (frame := await self.read()) is not None:
            await self.answer(frame)
            if condition(frame):
                return frame
        self.is_half_closed = True
        raise AssertionError("the worker has ended its side")

    async def answer(self, frame: pb.WorkerFrame, *, granted: int | None = None) -> None:
        if not frame.number:
            return
        ok = pb.ITEM_STATUS_OK
        await self.send(
            answer=pb.FrameAnswer(
                number=frame.number,
                completions=[pb.ItemResult(id=one.id, status=ok) for one in frame.completions],
                rejections=[pb.ItemResult(id=one.id, status=ok) for one in frame.rejections],
                extensions=[pb.ItemResult(id=one.id, status=ok) for one in frame.extensions],
                granted=frame.want if granted is None else granted,
            )
        )

    async def serve(self) -> None:
        """Answers all frames until the worker closes."""
        while (frame := await self.read()) is not None:
            await self.answer(frame)
            if frame.close:
                return
        self.is_half_closed = True

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        await self.context.abort(code, details)


def leased(key: str) -> pb.LeasedTask:
    return pb.LeasedTask(id=f"id-{key}", queue="q", key=key.encode(), lease_token=f"token-{key}", attempt=1, replicas=1)


class FakeTaskd:
    """Serves streams by scripts, the first stream by the first one; and unary calls, which it counts."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.streams: list[FakeStream] = []
        self.calls: list[tuple[str, Any]] = []
        self.errors: list[BaseException] = []
        # Tasks for long polls.
        self.polled: list[pb.LeasedTask] = []
        # Inserts, of which the first calls store one task each.
        self.inserts: list[pb.InsertTasksRequest] = []
        self.try_later = 0
        # Calls that publish records; of the next ones, the statuses of their first records, or "away".
        self.publishes: list[int] = []
        self.publish_answers: Iterator[str] = iter(())
        # What happens to the next inserts: "away", "hangs", or nothing.
        self.insert_faults: Iterator[str] = iter(())
        # Reports by unary calls are not answered while it is set.
        self.is_hanging = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> FakeTaskd:
        # As taskd's.
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", 32 << 20)])
        unary: dict[str, tuple[Any, Any, Any]] = {
            "GetTasks": (self._get, pb.GetTasksRequest, pb.GetTasksResponse),
            "CompleteTasks": (self._report, pb.CompleteTasksRequest, pb.CompleteTasksResponse),
            "RejectTasks": (self._report, pb.RejectTasksRequest, pb.RejectTasksResponse),
            "ExtendTasks": (self._report, pb.ExtendTasksRequest, pb.ExtendTasksResponse),
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                call, request_deserializer=request.FromString, response_serializer=response.SerializeToString
            )
            for name, (call, request, response) in unary.items()
        }
        if self._scripts:
            handlers["StreamTasks"] = grpc.stream_stream_rpc_method_handler(
                self._stream,
                request_deserializer=pb.WorkerFrame.FromString,
                response_serializer=pb.TaskdFrame.SerializeToString,
            )
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("taskd.v1.Tasks", handlers)])
        insert = grpc.unary_unary_rpc_method_handler(
            self._insert,
            request_deserializer=pb.InsertTasksRequest.FromString,
            response_serializer=pb.InsertTasksResponse.SerializeToString,
        )
        inserts = grpc.method_handlers_generic_handler("taskd.v1.Discovery", {"InsertTasks": insert})
        publish = grpc.unary_unary_rpc_method_handler(
            self._publish,
            request_deserializer=pb.PublishRequest.FromString,
            response_serializer=pb.PublishResponse.SerializeToString,
        )
        topics = grpc.method_handlers_generic_handler("taskd.v1.Topics", {"Publish": publish})
        self._server.add_generic_rpc_handlers([inserts, topics])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        await self._server.stop(0)
        assert not self.errors, self.errors

    async def _stream(self, _: Any, context: Any) -> None:
        if not self._scripts:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the fake has no script any more")
        script, stream = self._scripts.pop(0), FakeStream(context)
        self.streams.append(stream)
        try:
            await script(stream)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except BaseException as error:
            self.errors.append(error)
            raise

    async def _get(self, request: pb.GetTasksRequest, _: Any) -> pb.GetTasksResponse:
        self.calls.append(("GetTasks", request))
        tasks, self.polled = self.polled[: request.max_tasks], self.polled[request.max_tasks :]
        if not tasks:
            await asyncio.sleep(0.05)
        return pb.GetTasksResponse(tasks=tasks)

    async def _insert(self, request: pb.InsertTasksRequest, context: Any) -> pb.InsertTasksResponse:
        self.inserts.append(request)
        match next(self.insert_faults, ""):
            case "away":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the fake is away")
            case "hangs":
                await asyncio.Event().wait()
        stored = 1 if len(self.inserts) <= self.try_later else len(request.tasks)
        results = [
            pb.InsertResult(id=task.key.decode(), status=pb.INSERT_STATUS_CREATED)
            if at < stored
            else pb.InsertResult(status=pb.INSERT_STATUS_TRY_LATER)
            for at, task in enumerate(request.tasks)
        ]
        return pb.InsertTasksResponse(results=results)

    async def _publish(self, request: pb.PublishRequest, context: Any) -> pb.PublishResponse:
        """Takes 600 records, and 8 MiB, at once."""
        count = len(request.records)
        if count > 600:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{count} items; at most 600 (max_items)")
        if request.ByteSize() > 8 << 20:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "the message is too large")
        self.publishes.append(count)
        first = next(self.publish_answers, "STORED")
        if first == "away":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the fake is away")
        others = [pb.PublishResult(status=pb.PUBLISH_STATUS_STORED)] * (count - 1)
        return pb.PublishResponse(results=[pb.PublishResult(status=f"PUBLISH_STATUS_{first}"), *others])

    async def _report(self, request: Any, _: Any) -> Any:
        fields = ("completions", "rejections", "extensions")
        (name,) = [name for name in fields if name in request.DESCRIPTOR.fields_by_name]
        self.calls.append((name, request))
        while self.is_hanging.is_set():
            await asyncio.sleep(0.01)
        items: Sequence[Any] = getattr(request, name)
        answer = {
            "completions": pb.CompleteTasksResponse,
            "rejections": pb.RejectTasksResponse,
            "extensions": pb.ExtendTasksResponse,
        }[name]
        return answer(results=[pb.ItemResult(id=item.id, status=pb.ITEM_STATUS_OK) for item in items])
