"""Handlers: how a user's function is called, and what becomes of its task."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from taskd_client._codec import encode
from taskd_client._typed import PayloadReader, payload_reader
from taskd_client.errors import PayloadError, PutOff, Reject, Retry, Throttle, Unserialisable
from taskd_client.source import Completion, Lease, Rejection
from taskd_client.task import Task, key_text, set_current_task

Outcome = Completion | Rejection
# An async function of a task, and of a function that calls the handler or the next hook.
Around = Callable[[Task[Any], Callable[[], Awaitable[Any]]], Awaitable[Any]]

# taskd takes 4,096.
_MAX_REASON_BYTES = 4000
_CUT = " …"


class ResultError(Unserialisable):
    """A function returned what cannot be sent."""


@dataclass(frozen=True, slots=True)
class Handler:
    """A function for tasks, and how it is run."""

    function: Callable[[Task[Any]], Any]
    read: PayloadReader
    decode: Callable[[bytes], Any] | None
    is_async: bool
    timeout: float | None

    @classmethod
    def of(
        cls, function: Callable[..., Any], timeout: float | None = None, decode: Callable[[bytes], Any] | None = None
    ) -> Handler:
        """TypeError if taskd cannot call the function."""
        name = getattr(function, "__qualname__", repr(function))
        if not callable(function):
            raise TypeError(f"a handler is a function of a task, not {function!r}")
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError(f"{name} has a `yield`; a handler returns its result, and task.discover(…) reports tasks")
        parameters = [
            one
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if len(parameters) != 1 or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
            raise TypeError(f"{name} shall have one parameter, the task: def {name}(task)")
        read = _decoder(decode) if decode else payload_reader(_payload_type(function, parameters[0].name))
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        return cls(function=function, read=read, decode=decode, is_async=is_async, timeout=timeout)

    def open(self, lease: Lease, worker: str) -> Task[Any]:
        """The task for the function. Raises PayloadError."""
        return Task(
            id=lease.id,
            queue=lease.queue,
            key=key_text(lease.key),
            payload=self.read(lease.payload, lease.encoding),
            raw=lease.payload,
            headers=lease.headers,
            traceparent=lease.traceparent,
            attempt=lease.attempt,
            replicas=lease.replicas,
            priority=lease.priority,
            limit_key=lease.limit_key,
            worker=worker,
        )

    def call(self, task: Task[Any]) -> Any:
        """Calls a function that is not async."""
        set_current_task(task)
        return self.function(task)


def _decoder(decode: Callable[[bytes], Any]) -> PayloadReader:
    def read(raw: bytes, encoding: int) -> Any:
        try:
            return decode(raw)
        except Exception as error:
            raise PayloadError(f"the payload cannot be decoded: {error}") from error

    return read


def _payload_type(function: Callable[..., Any], parameter: str) -> Any:
    """`Page`, if the parameter is a `Task[Page]`; else anything."""
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    try:
        annotation = typing.get_type_hints(function).get(parameter, Any)
    except NameError as error:
        raise TypeError(
            f"the annotation of {parameter!r} names something that is not defined where the handler is: {error}; "
            "define the payload's type in the module"
        ) from error
    if annotation in (Any, Task, object):
        return Any
    if get_origin(annotation) is not Task:
        raise TypeError(
            f"the handler's parameter {parameter!r} is the task: annotate it with Task[…], not {annotation}"
        )
    (payload,) = get_args(annotation)
    return Any if isinstance(payload, typing.TypeVar) else payload


def completed(lease: Lease, task: Task[Any], result: object) -> Completion:
    """The outcome of a function that returned. Raises ResultError."""
    try:
        encoded, encoding = encode(result)
    except Unserialisable as error:
        raise ResultError(f"the result cannot be sent: {error}") from error
    return Completion(
        lease=lease,
        result=encoded,
        encoding=encoding,
        discovered=tuple(task.discovered),
        not_stored=tuple(task.not_stored),
    )


def failed(lease: Lease, error: BaseException) -> Rejection:
    """The outcome of a function that raised."""
    match error:
        case Reject():
            return Rejection(lease=lease, reason=reason(error.reason or "rejected"), retry=False)
        case Retry():
            return Rejection(lease=lease, reason=reason(error.reason or "retry"), delay=error.after)
        case PutOff():
            why = reason(error.reason or "put off")
            pause = error.after or 0.0 if isinstance(error, Throttle) else 0.0
            return Rejection(lease=lease, reason=why, delay=error.after, not_started=True, pause=pause)
        case PayloadError():
            # It fits at no attempt.
            return Rejection(lease=lease, reason=reason(str(error)), retry=False)
        case ResultError():
            return Rejection(lease=lease, reason=reason(str(error)))
        case _:
            return Rejection(lease=lease, reason=reason(error_text(error)))


def error_text(error: BaseException) -> str:
    """The name of an error, and what it says."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:
        # It is the user's, whatever it raises.
        text = ""
    return f"{name}: {text}" if text else name


def reason(given: object) -> str:
    """The text without lone surrogates, cut to the bytes that taskd takes. An error as a reason has its name, too."""
    if not isinstance(given, str):
        given = error_text(given) if isinstance(given, BaseException) else repr(given)
    raw = given.encode(errors="replace")
    if len(raw) <= _MAX_REASON_BYTES:
        return raw.decode()
    return raw[: _MAX_REASON_BYTES - len(_CUT.encode())].decode(errors="ignore") + _CUT
