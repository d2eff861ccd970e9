"""Workers on streams: demand, cancels, cuts, moves, stops; and a server that misbehaves."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import Background, Program, Proxy, Taskd, until
from fake import FakeStream, FakeTaskd, leased

from taskd_client import Client, NewTask, Priority, Task, TaskStatus, Throttle, Unavailable, Worker
from taskd_client._connection import COMPLETE, Connection, Target
from taskd_client.v1 import taskd_pb2 as pb

MakeTaskd = Callable[..., Taskd]
Start = Callable[..., Program]


def sessions(taskd: Taskd) -> int:
    """The open sessions, as taskd's metrics say; none before the first one."""
    lines = str(taskd.get("/metrics")).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("taskd_sessions_open_sessions "))


def test_a_worker_holds_a_stream_and_gets_no_more_than_it_has_room_for(new_taskd: MakeTaskd) -> None:
    taskd = new_taskd()
    worker = Worker(taskd.address, queue="q", concurrency=3, prefetch=2)
    go, running, most = threading.Event(), 0, 0
    lock = threading.Lock()

    @worker.handler
    def work(task: Task[Any]) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        go.wait(60)
        with lock:
            running -= 1
        return "done"

    with Client(taskd.address) as client:
        inserted = client.insert_batch([NewTask(queue="q", key=str(n)) for n in range(20)])
        with Background(worker):
            assigned = [TaskStatus.ASSIGNED]
            until(lambda: len(list(client.list_tasks("q", statuses=assigned))) == 5, "five tasks are assigned")
            until(lambda: running == 3, "three handlers run")
            assert sessions(taskd) == 1
            until(lambda: worker.stats.got == 5, "the worker has them")
            go.set()
            for one in inserted:
                assert client.wait(one.id, timeout=60).attempts == 0
        # The session ends with the worker.
        until(lambda: sessions(taskd) == 0, "the session is closed")
    assert (worker.stats.completed, worker.stats.lost, most) == (20, 0, 3)


def test_a_worker_may_ask_instead(new_taskd: MakeTaskd) -> None:
    taskd = new_taskd()
    worker = Worker(taskd.address, queue="q", stream=False, wait=1)
    worker.handler(lambda task: sessions(taskd))
    with Client(taskd.address) as client, Background(worker):
        assert client.insert("q", "k", wait=60).result == 0


def test_a_cancel_comes_by_the_stream(taskd: Taskd, queue: str) -> None:
    # No extension is due for twenty minutes.
    worker = Worker(taskd.address, queue=[queue, f"{queue}.threads"], lease=3600)
    began, in_thread, ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    @worker.handler
    async def hang(task: Task[Any]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    @worker.handler(queue=f"{queue}.threads")
    def wait(task: Task[Any]) -> None:
        assert not task.wait_cancelled(0.01)
        in_thread.set()
        seen.append(task.wait_cancelled(60))

    with Client(taskd.address) as client, Background(worker):
        ids = [client.insert(queue, "k").id, client.insert(f"{queue}.threads", "k").id]
        assert began.wait(60)
        assert in_thread.wait(60)
        client.cancel(ids)
        assert ended.wait(60)
        until(lambda: seen == [True], "the thread has seen it")
        until(lambda: worker.stats.running == 0, "both handlers ended")
    assert worker.stats.lost == 2


def test_a_stream_that_is_cut_goes_on_with_its_tasks(taskd: Taskd, queue: str) -> None:
    first, second = Proxy(taskd.address), Proxy(taskd.address)
    worker = Worker([first.address, second.address], queue=queue, concurrency=2, prefetch=4)
    go = threading.Event()

    @worker.handler
    async def work(task: Task[Any]) -> None:
        while not go.is_set():
            await asyncio.sleep(0.01)

    with Client(taskd.address) as client:
        inserted = client.insert_batch([NewTask(queue=queue, key=str(n)) for n in range(8)])
        with Background(worker):
            until(lambda: worker.stats.got == 6, "it has what it has room for")
            first.cut()
            until(lambda: second.connections, "it has connected again")
            go.set()
            for one in inserted:
                task = client.wait(one.id, timeout=60)
                assert (task.status, task.attempts) == (TaskStatus.COMPLETED, 0)
    assert (worker.stats.got, worker.stats.completed, worker.stats.lost) == (8, 8, 0)
    second.cut()


def test_a_connection_that_falls_silent_is_replaced(taskd: Taskd, queue: str) -> None:
    proxy = Proxy(taskd.address)
    # A session of ten seconds, which a busy machine does not lose at once.
    worker = Worker(proxy.address, queue=queue, lease=30)
    worker._source = partial(with_timeout, worker._source, 10.0)  # type: ignore[method-assign]
    go = threading.Event()

    @worker.handler
    async def work(task: Task[Any]) -> str:
        while not go.is_set():
            await asyncio.sleep(0.01)
        return "done"

    with Client(taskd.address) as client:
        running = client.insert(queue, "running")
        with Background(worker):
            until(lambda: worker.stats.running == 1, "a handler runs")
            proxy.freeze()
            go.set()
            assert client.insert(queue, "later", wait=60).result == "done"
            task = client.wait(running.id, timeout=60)
            assert (task.status, task.attempts) == (TaskStatus.COMPLETED, 0)
    assert (proxy.connections, worker.stats.lost) == (2, 0)
    proxy.cut()


def with_timeout(make: Callable[[Sequence[str]], Any], timeout: float, queues: Sequence[str]) -> Any:
    """A source whose session lasts so long."""
    source = make(queues)
    source._ask.timeout.FromMilliseconds(int(timeout * 1000))
    return source


@pytest.mark.parametrize("stream", [True, False])
def test_a_taskd_that_stops_and_starts_again_costs_no_attempt(new_taskd: MakeTaskd, stream: bool) -> None:
    taskd = new_taskd()
    worker = Worker(taskd.address, queue="q", stream=stream, wait=2)
    go = threading.Event()

    @worker.handler
    async def work(task: Task[Any]) -> str:
        while not go.is_set():
            await asyncio.sleep(0.01)
        return "done"

    with Client(taskd.address) as client, Background(worker):
        running = client.insert("q", "running")
        until(lambda: worker.stats.running == 1, "a handler runs")
        taskd.stop()
        taskd.start()
        go.set()
        assert client.insert("q", "later", wait=60).result == "done"
        task = client.wait(running.id, timeout=60)
        assert (task.status, task.attempts) == (TaskStatus.COMPLETED, 0)
    assert worker.stats.lost == 0


def test_a_worker_that_starts_again_takes_over(taskd: Taskd, queue: str, program: Start, tmp_path: Path) -> None:
    with Client(taskd.address) as client:
        ids = [client.insert(queue, key, max_attempts=2).id for key in ("a", "b", "c")]
        killed = program("slow.py", taskd.address, queue, str(tmp_path), "5", "3600")
        killed.says("began a")
        until(lambda: client.get_task(ids[2]).leased, "it has all of them")
        killed.signal(signal.SIGKILL)
        killed.wait()
        second = Worker(taskd.address, queue=queue, name=f"slow-{queue}", takeover=True)
        second.handler(lambda task: task.attempt)
        with Background(second):
            tasks = [client.wait(one, timeout=60) for one in ids]
    # Only the task that had started has failed once.
    assert [(task.status, task.attempts) for task in tasks] == [(TaskStatus.COMPLETED, n) for n in (1, 0, 0)]


def test_a_task_that_kills_its_worker_at_once_has_failed_and_the_others_have_not(
    taskd: Taskd, queue: str, program: Start
) -> None:
    with Client(taskd.address) as client:
        new = [NewTask(queue=queue, key=key) for key in ("a", "b", "c")]
        inserted = client.insert_batch([NewTask(queue=queue, key="poison", priority=Priority.HIGH), *new])
        queued = [TaskStatus.QUEUED]
        until(lambda: len(list(client.list_tasks(queue, statuses=queued))) == 4, "all of them are queued")
        assert program("die.py", taskd.address, queue).wait() == 3
        second = Worker(taskd.address, queue=queue, name=f"die-{queue}", takeover=True)
        second.handler(lambda task: task.attempt)
        with Background(second):
            tasks = [client.wait(one.id, timeout=60) for one in inserted]
    assert [(task.status, task.attempts) for task in tasks] == [(TaskStatus.COMPLETED, n) for n in (1, 0, 0, 0)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_without_taskd_ends_with_an_error(
    new_taskd: MakeTaskd, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    taskd = new_taskd()
    worker = Worker(taskd.address, queue="q", grace=0.5, stream=stream)
    go = threading.Event()

    @worker.handler
    async def work(task: Task[Any]) -> None:
        while not go.is_set():
            await asyncio.sleep(0.01)

    with Client(taskd.address) as client:
        client.insert("q", "k")
    with pytest.raises(Unavailable, match="stopped with 1 reports that taskd did not take"), Background(worker):
        until(lambda: worker.stats.running == 1, "a handler runs")
        taskd.kill()
        worker.stop()
        go.set()
    assert "stopped with 1 reports that taskd did not take" in [
        record.message for record in caplog.records if record.levelno == logging.ERROR
    ]


# A server that misbehaves.


def run(worker: Worker, test: Callable[[asyncio.Task[None]], Awaitable[None]], *fakes: FakeTaskd) -> None:
    """Lets the worker work at the fakes, in the order of its addresses, until the test is over."""

    async def all_() -> None:
        for fake in fakes:
            await fake.__aenter__()
        worker._target = type(worker._target)(addresses=tuple(fake.address for fake in fakes), token=None, tls=None)
        serving = asyncio.create_task(worker.serve())
        try:
            async with asyncio.timeout(60):
                await test(serving)
                worker.stop()
                await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for fake in fakes:
                await fake.__aexit__()

    asyncio.run(all_())


async def seen(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def make_worker(**options: Any) -> tuple[Worker, asyncio.Event]:
    """A worker whose handlers wait for the event."""
    worker, go = Worker(queue="q", name="w", **options), asyncio.Event()

    @worker.handler
    async def work(task: Task[Any]) -> str:
        await go.wait()
        return task.key

    return worker, go


def test_a_taskd_without_streams_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    worker, go = make_worker()
    go.set()
    fake = FakeTaskd()
    fake.polled = [leased("a"), leased("b")]

    async def test(_: asyncio.Task[None]) -> None:
        await seen(lambda: worker.stats.completed == 2)

    with caplog.at_level("INFO", "taskd.worker"):
        run(worker, test, fake)
    assert "taskd has no streams; asking by long polls" in caplog.text
    assert [name for name, _ in fake.calls].count("completions") in (1, 2)


def test_a_process_that_stops_sends_its_workers_on() -> None:
    worker, go = make_worker(concurrency=2, lease=60)
    half_closed = asyncio.Event()
    frames: list[pb.WorkerFrame] = []

    async def stops(stream: FakeStream) -> None:
        await stream.accept(session="old")
        assert (stream.open.want, stream.open.session, stream.open.tells_started) == (2, "", True)
        await stream.send_tasks("a")
        await stream.until(lambda frame: "id-a" in frame.started)
        await stream.send(closing={"reason": "it stops"})
        await stream.serve()
        assert stream.is_half_closed
        half_closed.set()
        await stream.abort(grpc.StatusCode.UNAVAILABLE, "it has stopped")

    async def goes_on(stream: FakeStream) -> None:
        # It knows nothing of the session.
        await stream.accept(session="new")
        frames.append(stream.first)
        frames.append(await stream.until(lambda frame: len(frame.extensions) > 0))
        go.set()
        frames.append(await stream.until(lambda frame: len(frame.completions) > 0))
        await stream.serve()

    async def test(_: asyncio.Task[None]) -> None:
        await half_closed.wait()
        await seen(lambda: worker.stats.completed == 1)

    run(worker, test, FakeTaskd(stops), FakeTaskd(goes_on))
    opened, extended, completed = frames
    assert (opened.open.session, list(opened.open.holding), list(opened.started)) == ("old", ["id-a"], ["id-a"])
    assert opened.open.want == 1
    # At once, and not after a third of the lease: so the new session has the lease.
    assert [one.lease_token for one in extended.extensions] == ["token-a"]
    assert [(one.lease_token, one.result) for one in completed.completions] == [("token-a", b"a")]


def test_a_task_that_starts_between_two_streams_is_told_on_the_next() -> None:
    worker = Worker(queue="q", name="w", concurrency=1, prefetch=1, lease=60)
    go = {key: asyncio.Event() for key in "ab"}
    started: list[str] = []

    @worker.handler
    async def work(task: Task[Any]) -> None:
        started.append(task.key)
        await go[task.key].wait()

    async def breaks(stream: FakeStream) -> None:
        await stream.accept()
        await stream.send_tasks("a", "b")
        await stream.until(lambda frame: "id-a" in frame.started)
        await stream.abort(grpc.StatusCode.INTERNAL, "it broke")

    async def opens_late(stream: FakeStream) -> None:
        stream.first = await stream.read() or stream.first
        go["a"].set()
        await seen(lambda: started == ["a", "b"])
        opened = pb.SessionOpened(session="new")
        opened.timeout.FromSeconds(30)
        opened.heartbeat.FromSeconds(10)
        await stream.send(opened=opened)
        await stream.until(lambda frame: "id-b" in frame.started)
        go["b"].set()
        await stream.serve()

    async def test(_: asyncio.Task[None]) -> None:
        await seen(lambda: worker.stats.completed == 2)

    fake = FakeTaskd(breaks, opens_late)
    run(worker, test, fake)
    assert list(fake.streams[1].first.started) == ["id-a"]


def test_a_silent_stream_is_given_up() -> None:
    worker, go = make_worker(lease=60)
    heard: list[str] = []

    async def falls_silent(stream: FakeStream) -> None:
        await stream.accept(timeout=2.0)
        await stream.send_tasks("a")
        # It hears heartbeats, and says nothing.
        while (frame := await stream.read()) is not None:
            heard.append("heartbeat" if not frame.ByteSize() else "frame")

    async def goes_on(stream: FakeStream) -> None:
        await stream.accept(resumed=True)
        assert (stream.open.session, list(stream.open.holding)) == ("s1", ["id-a"])
        go.set()
        await stream.serve()

    async def test(_: asyncio.Task[None]) -> None:
        await seen(lambda: worker.stats.completed == 1)

    run(worker, test, FakeTaskd(falls_silent, goes_on))
    assert "heartbeat" in heard


def test_demand_that_was_not_taken_is_asked_for_again() -> None:
    worker, go = make_worker(concurrency=4)
    wants: list[int] = []

    async def short(stream: FakeStream) -> None:
        await stream.accept(granted=1)
        while (frame := await stream.read()) is not None and not frame.close:
            if frame.want:
                wants.append(frame.want)
            await stream.answer(frame, granted=min(frame.want, 2))
            if len(wants) == 2:
                go.set()

    async def test(_: asyncio.Task[None]) -> None:
        await go.wait()

    run(worker, test, FakeTaskd(short))
    # Four, of which taskd took one; then three, of which it took two; then the last one.
    assert wants[:2] == [3, 1]


def test_a_throttled_worker_takes_back_its_demand_and_asks_again() -> None:
    worker = Worker(queue="q", name="w", concurrency=1, prefetch=2)

    @worker.handler
    async def work(task: Task[Any]) -> None:
        if task.key == "a":
            raise Throttle("the service is away", after=0.3)

    async def sends(stream: FakeStream) -> None:
        await stream.accept()
        assert stream.open.want == 3
        await stream.send_tasks("a")
        await stream.until(lambda frame: frame.surrender)
        frame = await stream.until(lambda frame: frame.want > 0)
        assert frame.want == 3
        await stream.send_tasks("b")
        await stream.serve()

    async def test(_: asyncio.Task[None]) -> None:
        await seen(lambda: worker.stats.completed == 1)

    run(worker, test, FakeTaskd(sends))
    assert (worker.stats.got, worker.stats.returned) == (2, 1)


def test_a_refused_frame_goes_by_unary_calls() -> None:
    worker, go = make_worker(concurrency=8)
    go.set()

    async def refuses(stream: FakeStream) -> None:
        await stream.accept()
        await stream.send_tasks("a", "b", "c")
        while (frame := await stream.read()) is not None:
            if frame.completions:
                await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many items")
            await stream.answer(frame)

    async def goes_on(stream: FakeStream) -> None:
        await stream.accept(resumed=True)
        await stream.serve()

    async def test(_: asyncio.Task[None]) -> None:
        await seen(lambda: worker.stats.completed == 3)

    fake = FakeTaskd(refuses, goes_on)
    run(worker, test, fake)
    assert sorted(one.id for name, call in fake.calls if name == "completions" for one in call.completions) == [
        "id-a",
        "id-b",
        "id-c",
    ]


def test_reports_go_by_unary_calls_while_there_is_no_stream() -> None:
    worker, go = make_worker()

    async def breaks(stream: FakeStream) -> None:
        await stream.accept()
        await stream.send_tasks("a")
        await stream.until(lambda frame: "id-a" in frame.started)
        go.set()
        await stream.abort(grpc.StatusCode.INTERNAL, "it broke")

    async def test(_: asyncio.Task[None]) -> None:
        await seen(lambda: worker.stats.completed == 1)

    # Further streams are refused: there is no script for them.
    fake = FakeTaskd(breaks)
    run(worker, test, fake)
    assert [name for name, _ in fake.calls] == ["completions"]


def test_calls_on_a_connection_that_is_given_up_may_be_repeated() -> None:
    async def test() -> None:
        async with FakeTaskd() as fake:
            fake.is_hanging.set()
            connection = Connection(Target(addresses=(fake.address,), token=None, tls=None))
            request = pb.CompleteTasksRequest(worker="w", completions=[pb.Completion(id="a")])
            call = asyncio.create_task(connection.call(COMPLETE, request, 60.0))
            await seen(lambda: fake.calls)
            await connection.abandon(0)
            with pytest.raises(Unavailable, match="the call was cancelled"):
                await call
            fake.is_hanging.clear()
            assert len((await connection.call(COMPLETE, request, 60.0)).results) == 1
            await connection.close()

    asyncio.run(test())


def test_a_stop_gives_back_what_has_not_started_on_another_stream() -> None:
    worker, go = make_worker(concurrency=1, prefetch=2, lease=1)
    frames: list[pb.WorkerFrame] = []

    async def first(stream: FakeStream) -> None:
        await stream.accept()
        await stream.send_tasks("a", "b", "c")
        await stream.until(lambda frame: "id-a" in frame.started)
        worker.stop()
        frames.append(await stream.until(lambda frame: frame.surrender))
        await stream.serve()
        assert stream.is_half_closed

    async def second(stream: FakeStream) -> None:
        await stream.accept(resumed=True)
        frames.append(stream.first)
        # The worker knows that the stream is open when it extends a lease on it.
        await stream.until(lambda frame: len(frame.extensions) > 0)
        go.set()
        frames.append(await stream.until(lambda frame: len(frame.completions) > 0))
        frames.append(await stream.until(lambda frame: frame.close))

    async def test(serving: asyncio.Task[None]) -> None:
        await serving

    fake = FakeTaskd(first, second)
    run(worker, test, fake)
    _, opened, completed, _ = frames
    assert (opened.open.session, list(opened.open.holding), opened.open.want) == ("s1", ["id-a"], 0)
    assert [one.id for one in completed.completions] == ["id-a"]
    assert (worker.stats.got, worker.stats.completed, worker.stats.returned) == (3, 1, 2)
    assert [name for name, _ in fake.calls if name != "extensions"] == []
