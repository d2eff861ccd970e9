"""Connections to one or several processes of taskd, and calls with their errors."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio

from taskd_client._time import Pauses
from taskd_client.errors import (
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TaskdError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from taskd_client.v1 import taskd_pb2 as pb

DEFAULT_ADDRESS = "127.0.0.1:7601"
_VERSION = "0.1.0"

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """A call of taskd. Written by hand instead of generated, so that it has types."""

    path: str
    serialize: Callable[[RequestT], bytes]
    parse: Callable[[bytes], ResponseT]


def _method(service: str, name: str, request: type[Any], response: type[Any]) -> Method[Any, Any]:
    return Method(f"/taskd.v1.{service}/{name}", request.SerializeToString, response.FromString)


INSERT: Method[pb.InsertTasksRequest, pb.InsertTasksResponse] = _method(
    "Discovery", "InsertTasks", pb.InsertTasksRequest, pb.InsertTasksResponse
)
GET_TASK: Method[pb.GetTaskRequest, pb.Task] = _method("Discovery", "GetTask", pb.GetTaskRequest, pb.Task)
GET_QUEUE: Method[pb.GetQueueRequest, pb.Queue] = _method("Operator", "GetQueue", pb.GetQueueRequest, pb.Queue)
LIST: Method[pb.ListTasksRequest, pb.ListTasksResponse] = _method(
    "Discovery", "ListTasks", pb.ListTasksRequest, pb.ListTasksResponse
)
EXPLAIN: Method[pb.ExplainTaskRequest, pb.TaskExplanation] = _method(
    "Discovery", "ExplainTask", pb.ExplainTaskRequest, pb.TaskExplanation
)
CANCEL: Method[pb.CancelTasksRequest, pb.CancelTasksResponse] = _method(
    "Discovery", "CancelTasks", pb.CancelTasksRequest, pb.CancelTasksResponse
)
BOOKS: Method[pb.GetBooksRequest, pb.Books] = _method("Operator", "GetBooks", pb.GetBooksRequest, pb.Books)
PAUSE: Method[pb.PauseQueueRequest, pb.PauseQueueResponse] = _method(
    "Operator", "PauseQueue", pb.PauseQueueRequest, pb.PauseQueueResponse
)
RESUME: Method[pb.ResumeQueueRequest, pb.ResumeQueueResponse] = _method(
    "Operator", "ResumeQueue", pb.ResumeQueueRequest, pb.ResumeQueueResponse
)
LIST_LETTERS: Method[pb.ListDeadLettersRequest, pb.ListDeadLettersResponse] = _method(
    "Operator", "ListDeadLetters", pb.ListDeadLettersRequest, pb.ListDeadLettersResponse
)
RETRY_LETTERS: Method[pb.ChangeDeadLettersRequest, pb.ChangeDeadLettersResponse] = _method(
    "Operator", "RetryDeadLetters", pb.ChangeDeadLettersRequest, pb.ChangeDeadLettersResponse
)
PURGE_LETTERS: Method[pb.ChangeDeadLettersRequest, pb.ChangeDeadLettersResponse] = _method(
    "Operator", "PurgeDeadLetters", pb.ChangeDeadLettersRequest, pb.ChangeDeadLettersResponse
)
PUBLISH: Method[pb.PublishRequest, pb.PublishResponse] = _method(
    "Topics", "Publish", pb.PublishRequest, pb.PublishResponse
)
GET: Method[pb.GetTasksRequest, pb.GetTasksResponse] = _method(
    "Tasks", "GetTasks", pb.GetTasksRequest, pb.GetTasksResponse
)
COMPLETE: Method[pb.CompleteTasksRequest, pb.CompleteTasksResponse] = _method(
    "Tasks", "CompleteTasks", pb.CompleteTasksRequest, pb.CompleteTasksResponse
)
REJECT: Method[pb.RejectTasksRequest, pb.RejectTasksResponse] = _method(
    "Tasks", "RejectTasks", pb.RejectTasksRequest, pb.RejectTasksResponse
)
EXTEND: Method[pb.ExtendTasksRequest, pb.ExtendTasksResponse] = _method(
    "Tasks", "ExtendTasks", pb.ExtendTasksRequest, pb.ExtendTasksResponse
)
# Calls with many messages.
STREAM: Method[pb.WorkerFrame, pb.TaskdFrame] = _method("Tasks", "StreamTasks", pb.WorkerFrame, pb.TaskdFrame)
WATCH_TASK: Method[pb.WatchTaskRequest, pb.TaskEvent] = _method(
    "Discovery", "WatchTask", pb.WatchTaskRequest, pb.TaskEvent
)
WATCH_QUEUE: Method[pb.WatchQueueRequest, pb.TaskEvent] = _method(
    "Discovery", "WatchQueue", pb.WatchQueueRequest, pb.TaskEvent
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """The certificates for TLS. Without `ca`, the authorities that gRPC brings decide."""

    ca: str | Path | None = None
    """The authority of taskd's certificate (PEM)."""
    cert: str | Path | None = None
    """The certificate of this client (PEM), if taskd asks for one; with `key`."""
    key: str | Path | None = None
    server_name: str | None = None
    """The name in taskd's certificate, if it is not that of the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        def read(path: str | Path | None) -> bytes | None:
            return None if path is None else Path(path).read_bytes()

        if (self.cert is None) != (self.key is None):
            raise InvalidRequest("TLS: cert and key belong together; give both")
        try:
            return grpc.ssl_channel_credentials(read(self.ca), read(self.key), read(self.cert))
        except OSError as error:
            raise InvalidRequest(f"TLS: {error.filename} cannot be read: {error.strerror}") from error


Addresses = str | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The processes of taskd, and how to speak with them."""

    addresses: tuple[str, ...]
    token: str | None
    tls: TLS | None

    @classmethod
    def read(cls, address: Addresses, token: str | None, tls: TLS | bool | None) -> Target:
        """Takes `host:port`, `http://host:port` and `https://host:port`, one or several."""
        given = [address] if isinstance(address, str) else list(address)
        names = [name.strip() for one in given for name in one.split(",") if name.strip()]
        if not names:
            raise InvalidRequest('there is no address; give that of taskd\'s gRPC, for example "127.0.0.1:7601"')
        targets = [_host_and_port(name) for name in names]
        if any(secure for _, secure in targets) and not all(secure for _, secure in targets):
            raise InvalidRequest("some addresses begin with https:// and others do not; give all with https://")
        if tls is True or (tls is None and targets[0][1]):
            tls = TLS()
        if tls:
            # Now, so that a wrong path is an error here and not at the first call.
            tls.credentials()
        # The commands of taskd take it from there, too.
        token = token if token is not None else os.environ.get("TASKD_TOKEN") or None
        return cls(addresses=tuple(name for name, _ in targets), token=token, tls=tls or None)


def _host_and_port(address: str) -> tuple[str, bool]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequest(f"{address!r} is no address: {error}") from error
    if parts.scheme not in ("", "http", "https") or not host or port is None or parts.path not in ("", "/"):
        raise InvalidRequest(f"{address!r} is no address; give host:port, for example 127.0.0.1:7601")
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}", parts.scheme == "https"


_OPTIONS: list[tuple[str, str | int]] = [
    # taskd bounds its answers: 64 MiB is the most that a worker may ask for.
    ("grpc.max_receive_message_length", 72 << 20),
    ("grpc.max_send_message_length", -1),
    # A connection that fell silent is found within half a minute, also while a call waits for tasks.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Also how long a connection may take to open.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.primary_user_agent", f"taskd-python/{_VERSION}"),
    # Two clients of a process have two connections.
    ("grpc.use_local_subchannel_pool", 1),
]

_ERRORS: dict[grpc.StatusCode, type[TaskdError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}

# How long a call of many messages that was cancelled may take to end.
_SETTLE = 1.0
# The end of a cancelled unary call comes a moment later, and nobody can wait for it.
_END_COMES = 0.05

# Another process may serve these: this one is away, hangs, or does not run the pipeline.
_MOVE_ON = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}

# A server that takes connections and does not speak gRPC.
_ANOTHER_PORT = re.compile("failed to connect to all addresses.*Socket closed")

Call = grpc.aio.UnaryUnaryCall[Any, Any]
StreamCall = grpc.aio.StreamStreamCall[pb.WorkerFrame, pb.TaskdFrame]


async def settle(call: grpc.aio.Call, *tasks: asyncio.Task[None]) -> None:
    """Cancels a call of many messages, and waits until nothing more comes of it.

    gRPC has one queue for the events of all loops. One for a loop that has been closed holds up the others.
    """
    call.cancel()
    ended = [*tasks, asyncio.ensure_future(call.code())]
    await asyncio.wait(ended, timeout=_SETTLE)
    for one in ended:
        one.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


async def patiently(call: Callable[[float], Awaitable[ResponseT]], patience: float) -> ResponseT:
    """Repeats a call until taskd answers it. The call takes the longest time that it may last."""
    pause, end = Pauses(), time.monotonic() + patience
    while True:
        try:
            return await call(max(end - time.monotonic(), 1.0))
        except Unavailable:
            wait = pause.next()
            if time.monotonic() + wait >= end:
                raise
            await asyncio.sleep(wait)


class Connection:
    """Calls one process of several, and the next one when it is away. It belongs to one event loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._current = 0
        self._is_closed = False
        self._under_way = 0
        self._was_cancelled = False
        token = target.token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    @property
    def address(self) -> str:
        return self._target.addresses[self._current]

    def start(self, method: Method[RequestT, ResponseT], request: RequestT, timeout: float) -> tuple[Call, int]:
        """Begins a call. It returns the number of the address, too, for `finish`."""
        channel, at = self._channel()
        call = channel.unary_unary(method.path, request_serializer=method.serialize, response_deserializer=method.parse)
        return call(request, timeout=timeout, metadata=self._metadata), at

    def stream(self) -> tuple[StreamCall, int]:
        """Begins a stream of a worker. It returns the number of the address, too, for `error`."""
        channel, at = self._channel()
        call = channel.stream_stream(STREAM.path, STREAM.serialize, STREAM.parse)
        return call(metadata=self._metadata), at

    async def watch(
        self, method: Method[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT | None, None]:
        """The messages of one call, until its end or its error. None: taskd has begun to answer."""
        channel, at = self._channel()
        start = channel.unary_stream(
            method.path, request_serializer=method.serialize, response_deserializer=method.parse
        )
        call = start(request, metadata=self._metadata)
        try:
            await call.initial_metadata()
            if not call.done():
                yield None
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self.error(error, at) from error
        finally:
            # The caller may leave before the end.
            await settle(call)

    async def finish(self, call: Call, at: int) -> Any:
        """The answer of a call, or its error."""
        self._under_way += 1
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self.error(error, at) from error
        except asyncio.CancelledError:
            self._was_cancelled = True
            task = asyncio.current_task()
            if self._is_closed or task is None or task.cancelling():
                raise
            # Not the caller was cancelled, but the call, with its connection.
            raise Unavailable(f"the call was cancelled ({self._target.addresses[at]})") from None
        finally:
            self._under_way -= 1

    def error(self, error: grpc.aio.AioRpcError, at: int) -> TaskdError:
        """The error of a call, of this package. The next call goes elsewhere if this address is away."""
        if error.code() in _MOVE_ON:
            self.leave(at)
        kind, said = _ERRORS.get(error.code(), Unavailable), str(error.details())
        # Where no taskd listens, the connection is refused.
        hint = ""
        if _ANOTHER_PORT.search(said):
            hint = "; is this taskd's gRPC port? 7601 by default"
            hint += "" if self._target.tls else "; if it has TLS, write https:// before the address"
        return kind(f"{said} ({error.code().name}, {self._target.addresses[at]}){hint}")

    def leave(self, at: int) -> None:
        """Makes the next call at the next address, if no other call has left this one before."""
        if self._current == at:
            self._current = (at + 1) % len(self._target.addresses)

    async def call(self, method: Method[RequestT, ResponseT], request: RequestT, timeout: float) -> ResponseT:
        """Calls once."""
        answer: ResponseT = await self.finish(*self.start(method, request, timeout))
        return answer

    async def call_patiently(
        self, method: Method[RequestT, ResponseT], request: RequestT, timeout: float, patience: float
    ) -> ResponseT:
        """Repeats the call until taskd answers it, at most for the time that `patience` gives."""
        return await patiently(lambda limit: self.call(method, request, min(timeout, limit)), patience)

    async def abandon(self, at: int) -> None:
        """Drops the connection to an address that says nothing any more: the next call makes another one."""
        self.leave(at)
        channel = self._channels.pop(at, None)
        if channel is not None:
            await channel.close()

    def address_of(self, at: int) -> str:
        return self._target.addresses[at]

    def _channel(self) -> tuple[grpc.aio.Channel, int]:
        at = self._current
        return self._channels.get(at) or self._open(at), at

    def _open(self, at: int) -> grpc.aio.Channel:
        tls, options = self._target.tls, list(_OPTIONS)
        if tls and tls.server_name:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        address = self._target.addresses[at]
        if tls:
            channel = grpc.aio.secure_channel(address, tls.credentials(), options=options)
        else:
            channel = grpc.aio.insecure_channel(address, options=options)
        self._channels[at] = channel
        return channel

    async def close(self) -> None:
        self._is_closed = True
        # A channel that closes cancels its calls.
        self._was_cancelled |= self._under_way > 0
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
        if self._was_cancelled:
            # The loop must not end before its calls: see `settle`.
            await asyncio.sleep(_END_COMES)
