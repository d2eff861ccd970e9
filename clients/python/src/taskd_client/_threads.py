"""Threads and processes for handlers that are not async."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, cast

from taskd_client._handler import Handler, Outcome, completed, failed
from taskd_client.source import Completion, Lease, Rejection
from taskd_client.task import Task
from taskd_client.v1 import taskd_pb2 as pb

_Job = tuple[Future[Any], contextvars.Context, Callable[[], Any]]


class Threads:
    """Threads that do not keep the program alive.

    The threads of ThreadPoolExecutor do: a handler that hangs would hold up the end of the program for ever.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = threading.Semaphore(0)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, contextvars.copy_context(), call))
        if not self._idle.acquire(blocking=False) and self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._work, name=f"taskd-handler-{self._threads}", daemon=True).start()
        return future

    def close(self) -> None:
        """Ends the threads that have nothing to do, and the others when their handlers return."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            future, context, call = job
            if future.set_running_or_notify_cancel():
                try:
                    result = context.run(call)
                except StopIteration as error:
                    # An asyncio future refuses it, and its waiter would wait for ever.
                    future.set_exception(RuntimeError(f"the handler raised {error!r}"))
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            # The traceback of an error holds the frames of the handler, and so its task.
            del job, future, context, call
            self._idle.release()


class Processes:
    """Processes for handlers that compute for long. A process that dies costs an attempt of its tasks, no more."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        # A fork would copy gRPC's threads in the middle of their work.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._count, mp_context=context, initializer=_begin)

    def submit(self, handler: Handler, lease: Lease, worker: str) -> Future[Any]:
        """Begins a handler. Only one thread calls this."""
        try:
            return self._pool.submit(_run, handler.function, handler.decode, lease, worker)
        except BrokenProcessPool:
            # The others of the pool have learned it from their futures.
            self._pool.shutdown(wait=False)
            self._pool = self._start()
            return self._pool.submit(_run, handler.function, handler.decode, lease, worker)

    async def outcome(self, future: Future[Any], lease: Lease) -> Outcome:
        """Waits for the end of a handler."""
        try:
            outcome, discovered = await asyncio.wrap_future(future)
        except BrokenProcessPool:
            return Rejection(lease=lease, reason="the process of the handler died")
        if isinstance(outcome, Completion):
            return replace(outcome, lease=lease, discovered=[pb.NewTask.FromString(one) for one in discovered])
        return cast(Rejection, outcome)

    def close(self) -> None:
        # A handler that goes on beyond the grace has lost its task.
        processes = list((getattr(self._pool, "_processes", None) or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def _begin() -> None:
    """Leaves signals to the parent, which lets handlers finish; and ends with the parent, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@functools.lru_cache(maxsize=64)
def _handler(function: Callable[..., Any], decode: Callable[[bytes], Any] | None) -> Handler:
    return Handler.of(function, decode=decode)


def _run(
    function: Callable[..., Any], decode: Callable[[bytes], Any] | None, lease: Lease, worker: str
) -> tuple[Outcome, list[bytes]]:
    """Runs a handler in its process. The discovered tasks go back as bytes."""
    task: Task[Any] | None = None
    try:
        handler = _handler(function, decode)
        task = handler.open(lease, worker)
        outcome = completed(lease, task, handler.call(task))
    except BaseException as error:
        # Nothing that a handler raises leaves its process: what cannot be unpickled would end the pool, with the tasks
        # of all its processes.
        limit = None if task is None else task.limit
        return replace(failed(lease, error), limit=limit), []
    discovered = [task.SerializeToString() for task in outcome.discovered]
    return replace(outcome, discovered=(), limit=task.limit), discovered
