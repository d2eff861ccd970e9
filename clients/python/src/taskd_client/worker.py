"""The worker: registers handlers, and runs them on the tasks of its queues."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from taskd_client._connection import DEFAULT_ADDRESS, TLS, Addresses, Connection, Target
from taskd_client._grpc_source import GrpcSource
from taskd_client._handler import Around, Handler
from taskd_client._name import default_name, take_name
from taskd_client._session import Session
from taskd_client._stream_source import StreamSource
from taskd_client._surplus import Surplus
from taskd_client._time import Seconds, seconds
from taskd_client.errors import InvalidRequest, TaskdError
from taskd_client.source import Source

logger = logging.getLogger("taskd.worker")

# taskd refuses a shorter one.
_SHORTEST_LEASE = 0.1

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a worker, checked."""

    name: str
    concurrency: int
    prefetch: int
    processes: int
    lease: float
    wait: float
    timeout: float | None
    grace: float
    max_bytes: int
    stream: bool
    takeover: bool

    @property
    def enough(self) -> int:
        """Room for fewer tasks is not worth asking for them: with a prefetch, the worker has something to do."""
        return max(1, self.prefetch // 2)


@dataclass(slots=True)
class Stats:
    """The counts of a worker since it was made."""

    got: int = 0
    """Leases."""
    completed: int = 0
    rejected: int = 0
    lost: int = 0
    """Leases that ended otherwise: expired, cancelled, or done by another worker."""
    returned: int = 0
    """Leases that went back at no cost: at a stop before they began, or put off by their handlers."""
    running: int = 0
    """Handlers that are at work."""


class Worker:
    """Takes tasks of its queues and runs a handler on each.

    worker = Worker("127.0.0.1:7601", queue="pages")

    @worker.handler
    async def fetch(task):
        return {"length": len(task.key)}

    worker.run()
    """

    def __init__(
        self,
        address: Addresses = DEFAULT_ADDRESS,
        queue: str | Sequence[str] = (),
        *,
        name: str | None = None,
        weights: Mapping[str, int] | None = None,
        concurrency: int | None = None,
        prefetch: int = 0,
        processes: int = 0,
        lease: Seconds = 30.0,
        wait: Seconds = 30.0,
        timeout: Seconds | None = None,
        grace: Seconds = 25.0,
        max_bytes: int = 0,
        stream: bool = True,
        takeover: bool = False,
        token: str | None = None,
        tls: TLS | bool | None = None,
    ) -> None:
        """Connects to nothing yet.

        address: `host:port` of taskd's gRPC, or several: the worker takes the next one when one is away.
        queue: one or several; those that handlers name are added.
        name: how taskd knows this worker. It credits a name once for a task, and takes two workers of one name for one.
            Without it, the variable TASKD_WORKER has it, or it is that of the host; a second worker without a name on
            the same host and queue does not start.
        weights: how several queues share the tasks, from 1 to 1000 each. With {"a": 3, "b": 1} three of four are of a
            while both have some; a queue that is absent has 1. Priorities then order the tasks of each queue only.
        concurrency: how many handlers run at once (10; with `processes`, as many as these).
        prefetch: how many tasks wait in this worker, ready to begin. More is faster for short tasks.
        processes: above zero, handlers that are not async run in so many processes instead of threads.
        lease: how long taskd leaves a task to this worker. The worker extends leases while handlers run, so it does not
            bound how long these take. After half of it without a sign of this worker (at least 5 s, at most 10 min),
            taskd gives its tasks to others; where the worker asks for tasks, after all of it.
        wait: how long a call waits for tasks, where the worker asks for them.
        timeout: how long a handler may take. Without one, as long as it likes.
        grace: how long a stop waits for handlers.
        max_bytes: about the bytes of tasks in an answer (3.5 MiB).
        stream: taskd sends tasks as they come. False, or a taskd that has no streams: the worker asks, by long polls.
        takeover: with a fixed `name`, this start ends the sessions of an earlier one, and their tasks go back at once.
        token: the access token; without one, the variable TASKD_TOKEN has it.
        """
        if concurrency is None:
            concurrency = processes or 10
        if concurrency < 1 or prefetch < 0 or processes < 0:
            raise ValueError("concurrency is at least 1; prefetch and processes are 0 or more")
        if seconds(lease) < _SHORTEST_LEASE:
            raise ValueError(f"lease is {lease!r}; taskd takes leases from {_SHORTEST_LEASE:g} s on")
        self._target = Target.read(address, token, tls)
        self._queues = [queue] if isinstance(queue, str) else list(queue)
        self._weights = dict(weights or {})
        self._options = Options(
            name=name if name is not None else default_name(),
            concurrency=concurrency,
            prefetch=prefetch,
            processes=processes,
            lease=seconds(lease),
            wait=seconds(wait),
            timeout=None if timeout is None else seconds(timeout),
            grace=seconds(grace),
            max_bytes=max_bytes,
            stream=stream,
            takeover=takeover,
        )
        self._has_default_name = name is None
        self._handlers: dict[str | None, Handler] = {}
        self._around: list[Around] = []
        self._session: tuple[asyncio.AbstractEventLoop, Session] | None = None
        # A signal handler of the user may call `stop` at any line.
        self._lock = threading.RLock()
        self.stats = Stats()

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def queues(self) -> list[str]:
        """The queues that it asks for: its own, and those that handlers name."""
        return list(dict.fromkeys([*self._queues, *(queue for queue in self._handlers if queue)]))

    @overload
    def handler(self, function: FunctionT, /) -> FunctionT: ...

    @overload
    def handler(
        self,
        /,
        *,
        queue: str | None = None,
        timeout: Seconds | None = None,
        decode: Callable[[bytes], Any] | None = None,
    ) -> Callable[[FunctionT], FunctionT]: ...

    def handler(
        self,
        function: FunctionT | None = None,
        /,
        *,
        queue: str | None = None,
        timeout: Seconds | None = None,
        decode: Callable[[bytes], Any] | None = None,
    ) -> FunctionT | Callable[[FunctionT], FunctionT]:
        """Registers a function of a task; as `@worker.handler`, or as `@worker.handler(queue="pages", timeout=5)`.

        An async function runs in the event loop, another one in a thread. Without `queue` it takes the tasks of all
        queues that have no handler of their own. `decode` reads payloads of types that an annotation cannot say. The
        function itself stays as it is, so that a test can call it.
        """

        if queue == "":
            raise ValueError('the queue has no name; give one, as in @worker.handler(queue="pages")')

        def register(function: FunctionT) -> FunctionT:
            if queue in self._handlers:
                raise ValueError(f"there is a handler for {f'queue {queue!r}' if queue else 'all queues'} already")
            limit = None if timeout is None else seconds(timeout)
            self._handlers[queue] = Handler.of(function, limit, decode)
            return function

        return register if function is None else register(function)

    def around(self, hook: FunctionT, /) -> FunctionT:
        """Registers an async function that runs around each handler; the first one is the outermost.

        @worker.around
        async def timed(task, call):
            began = time.monotonic()
            try:
                return await call()
            finally:
                print(task.key, time.monotonic() - began)

        It returns the result of the task. The handler of a plain function runs in its thread as without a hook; with
        `processes` there are no hooks.
        """
        if not inspect.iscoroutinefunction(hook):
            raise TypeError("a hook is an async function: async def hook(task, call)")
        self._around.append(hook)
        return hook

    def run(self) -> None:
        """Works until SIGTERM or SIGINT, then finishes what began, reports it, and returns.

        If the program has set up no logging, it says on stderr from where it takes tasks. The second signal cancels the
        handlers. An error with which the worker cannot go on, such as a wrong token, ends the program with a line.
        `serve` raises it instead, and leaves signals alone.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # A process for handlers imports the program, down to this line.
            return
        if not logger.hasHandlers():
            print(self._greeting(), file=sys.stderr, flush=True)
        try:
            asyncio.run(self._run())
        except TaskdError as error:
            raise SystemExit(f"taskd worker: {error}") from error

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        for one in signals:
            # Windows has none; Ctrl-C then cancels.
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(one, self.stop)
        try:
            await self.serve()
        finally:
            for one in signals:
                with contextlib.suppress(NotImplementedError):
                    loop.remove_signal_handler(one)

    async def serve(self, source: Source | None = None) -> None:
        """Works until `stop`, in a program with an event loop of its own.

        If it is cancelled, it cancels its handlers, and gives their tasks back.

        `source` is for tests: see taskd.testing.
        """
        queues = self.queues
        if not self._handlers:
            raise InvalidRequest("there is no handler; write @worker.handler above a function")
        if source is None and not queues:
            raise InvalidRequest('the worker has no queue; give one: Worker(…, queue="pages")')
        unhandled = [queue for queue in queues if queue not in self._handlers and None not in self._handlers]
        if unhandled:
            raise InvalidRequest(f"there is no handler for queue {unhandled[0]!r}")
        if self._options.processes:
            if self._around:
                raise InvalidRequest("a worker with `processes` has no hooks: wrap the functions of its handlers")
            self._check_processes()
        with self._lock:
            if self._session is not None:
                raise InvalidRequest("this worker works already")
            own = source or self._source(queues)
            surplus = Surplus(self._target) if source is None else None
            session = Session(self._options, self._handlers, own, self.stats, surplus, self._around)
            self._session = (asyncio.get_running_loop(), session)
        try:
            with contextlib.ExitStack() as stack:
                if source is None:
                    if self._has_default_name:
                        take_name(stack, self.name, queues)
                    logger.info("%s", self._greeting())
                await session.run()
        finally:
            with self._lock:
                self._session = None
            await own.close()
            if surplus is not None:
                await surplus.close()

    def _greeting(self) -> str:
        return f"worker {self.name} takes tasks of {', '.join(self.queues)} from {', '.join(self._target.addresses)}"

    def _check_processes(self) -> None:
        """InvalidRequest if a handler cannot go to another process."""
        for handler in self._handlers.values():
            try:
                pickle.dumps((handler.function, handler.decode) if not handler.is_async else None)
            except Exception as error:
                raise InvalidRequest(
                    f"a handler for processes, and its `decode`, is a function of a module, by its name: {error}"
                ) from error

    def _source(self, queues: Sequence[str]) -> Source:
        options = self._options
        connection = Connection(self._target)
        if not options.stream:
            return GrpcSource(
                connection,
                worker=options.name,
                queues=queues,
                weights=self._weights,
                lease=options.lease,
                wait=options.wait,
                max_bytes=options.max_bytes,
            )
        return StreamSource(
            connection,
            worker=options.name,
            queues=queues,
            weights=self._weights,
            lease=options.lease,
            wait=options.wait,
            max_bytes=options.max_bytes,
            enough=options.enough,
            takeover=options.takeover,
        )

    def stop(self) -> None:
        """Begins a stop, from any thread or handler; the second call cancels the handlers."""
        with self._lock:
            session = self._session
        if session is not None:
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                session[0].call_soon_threadsafe(session[1].stop)
