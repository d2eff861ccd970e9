"""Clients that watch tasks and queues, inserts that wait, idempotency keys, and backoffs of tasks."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from conftest import Background, Proxy, Taskd, until
from fake import FakeTaskd

from taskd_client import (
    AsyncClient,
    Backoff,
    Client,
    Gap,
    InsertStatus,
    InvalidRequest,
    NewTask,
    NotFound,
    Reject,
    Task,
    TaskEvent,
    TaskRejected,
    TaskStatus,
    Unsupported,
    Worker,
)

MakeTaskd = Callable[..., Taskd]


def make_worker(taskd: Taskd, queue: str, **options: Any) -> Worker:
    """A worker whose handler answers with the payload, and rejects None."""
    worker = Worker(taskd.address, queue=queue, **options)

    @worker.handler
    async def work(task: Task[Any]) -> Any:
        if task.payload is None:
            raise Reject("there is nothing")
        return task.payload

    return worker


def test_a_task_is_watched_until_its_end(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        task = client.insert(queue, "k", payload=1)
        events = client.watch(task.id)
        first = next(events)
        assert (first.task_id, first.queue, first.status.is_final) == (task.id, queue, False)
        assert first.at is not None
        with Background(make_worker(taskd, queue)):
            rest = list(events)
        statuses = [event.status for event in rest]
        assert statuses[-1] is TaskStatus.COMPLETED
        # Each differs from the one before.
        assert all(one is not other for one, other in zip([first.status, *statuses], statuses, strict=False))
        # The end again, unless the caller has seen it.
        assert [event.status for event in client.watch(task.id)] == [TaskStatus.COMPLETED]
        assert list(client.watch(task.id, last_event_id=rest[-1].event_id)) == []
        with pytest.raises(NotFound):
            next(client.watch("01939b3e-0000-7000-8000-000000000000"))
        with pytest.raises(InvalidRequest):
            next(client.watch(task.id, last_event_id="what"))


def test_a_watch_goes_on_when_its_connection_breaks(taskd: Taskd, queue: str) -> None:
    first, second = Proxy(taskd.address), Proxy(taskd.address)

    async def run() -> Sequence[TaskEvent]:
        async with AsyncClient([first.address, second.address]) as client:
            task = await client.insert(queue, "k", payload=1)
            seen = []
            async with aclosing(client.watch(task.id)) as events:
                async for event in events:
                    seen.append(event)
                    if len(seen) == 1:
                        first.cut()
                        background.__enter__()
            return seen

    background = Background(make_worker(taskd, queue))
    events = asyncio.run(run())
    background.__exit__()
    second.cut()
    statuses = [event.status for event in events]
    assert statuses[-1] is TaskStatus.COMPLETED
    assert len(set(statuses)) == len(statuses)


def test_a_queue_is_watched(new_taskd: MakeTaskd) -> None:
    taskd = new_taskd()
    seen: list[TaskEvent] = []

    def watch_until(client: Client, is_last: Callable[[TaskEvent], bool], last_event_id: str = "") -> None:
        for event in client.watch_queue("q", last_event_id=last_event_id):
            # taskd may say at any time that it has lost something.
            if isinstance(event, TaskEvent):
                seen.append(event)
                if is_last(event):
                    return

    with Client(taskd.address) as client, Background(make_worker(taskd, "q")):
        watcher = threading.Thread(target=watch_until, args=(client, lambda event: event.status.is_final))
        watcher.start()
        # The watch begins at some time, and does not tell the past.
        for n in itertools.count():
            client.insert("q", str(n), payload=1, wait=60)
            if not watcher.is_alive():
                break
        assert {event.queue for event in seen} == {"q"}
        # Behind the last event come those that were missed.
        missed = client.insert("q", "missed", payload=1, wait=60)
        watch_until(client, lambda event: event.task_id == missed.id and event.status.is_final, seen[-1].event_id)
        # A process that was started again does not know the event any more.
        last = seen[-1].event_id
        taskd.stop()
        taskd.start()
        assert next(client.watch_queue("q", last_event_id=last)) == Gap()


def test_a_cut_before_the_first_event_is_a_gap(new_taskd: MakeTaskd) -> None:
    taskd = new_taskd()
    # The client may not have heard of the first ones that its watch is open.
    proxies = [Proxy(taskd.address) for _ in range(5)]

    def metrics() -> str:
        return str(taskd.get("/metrics"))

    async def run() -> None:
        addresses = [proxy.address for proxy in proxies]
        async with AsyncClient(addresses) as client, aclosing(client.watch_queue("q")) as events:
            first = asyncio.ensure_future(anext(events))

            async def cut(proxy: Proxy) -> None:
                def is_open() -> bool:
                    return first.done() or (proxy.connections > 0 and "\ntaskd_events_watchers 1\n" in metrics())

                await asyncio.to_thread(until, is_open, "the queue is watched")
                proxy.cut()

            for proxy in proxies[:-1]:
                await cut(proxy)
            assert await asyncio.wait_for(first, 60) == Gap()

    asyncio.run(run())
    proxies[-1].cut()


def test_a_watch_of_an_older_taskd_is_not_supported() -> None:
    async def run() -> None:
        async with FakeTaskd() as fake, AsyncClient(fake.address) as client:
            with pytest.raises(Unsupported):
                await anext(client.watch("01939b3e-0000-7000-8000-000000000000"))

    asyncio.run(run())


def test_an_insert_waits_for_the_result(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client, Background(make_worker(taskd, queue, name="w")):
        one = client.insert(queue, "k", payload={"n": 1}, wait=60)
        assert (one.status, one.task_status, one.result) == (InsertStatus.CREATED, TaskStatus.COMPLETED, {"n": 1})
        (found,) = one.results
        assert (found.worker, found.value, found.attempt, found.surplus) == ("w", {"n": 1}, 1, False)
        assert found.completed_at is not None
        # A duplicate has the result of the task that was there.
        again = client.insert(queue, "k", payload={"n": 2}, wait=60)
        assert (again.is_new, again.id, again.result) == (False, one.id, {"n": 1})
        tasks = [
            NewTask(queue=queue, key="text", payload="tëxt"),
            NewTask(queue=queue, key="bytes", payload=b"\xff"),
            NewTask(queue=queue, key="none"),
            NewTask(queue="not a name", key="wrong"),
        ]
        answers = client.insert_batch(tasks, wait=60)
        assert [answer.result for answer in answers] == ["tëxt", b"\xff", None, None]
        dead, rejected = answers[2:]
        assert (dead.task_status, dead.is_open) == (TaskStatus.DEAD, False)
        assert (rejected.status, rejected.task_status, rejected.is_open) == (InsertStatus.REJECTED, None, False)
        with pytest.raises(InvalidRequest, match="1001 tasks in an insert that waits; at most 1000"):
            client.insert_batch([NewTask(queue=queue, key=str(n)) for n in range(1001)], wait=1)


def test_an_insert_waits_longer_than_taskd_does(new_taskd: MakeTaskd) -> None:
    taskd = new_taskd('max_wait = "200ms"\n')
    go = threading.Event()
    worker = Worker(taskd.address, queue="q")

    @worker.handler
    def work(task: Task[Any]) -> str:
        go.wait(60)
        return "done"

    with Client(taskd.address) as client, Background(worker):
        early = client.insert("q", "k", wait=0.5)
        assert (early.is_new, early.is_open, early.result) == (True, True, None)
        threading.Timer(0.7, go.set).start()
        late = client.insert("q", "k2", wait=60)
        # It was sent several times, and was new the first time.
        assert (late.is_new, late.is_open, late.result) == (True, False, "done")


def test_an_insert_that_is_repeated_waits_no_longer() -> None:
    async def run() -> None:
        async with FakeTaskd() as fake, AsyncClient(fake.address) as client:
            fake.insert_faults = iter(["away"])
            (inserted,) = await client.insert_batch([NewTask(queue="q", key="k")], wait=0.5)
            assert (inserted.id, inserted.is_open) == ("k", True)
            waits = [request.wait.ToTimedelta() for request in fake.inserts]
            assert waits[0] > waits[1], waits
            assert waits == sorted(waits, reverse=True)

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["away", "hangs"])
def test_an_insert_that_waits_keeps_the_answers_that_it_has(fault: str) -> None:
    async def run() -> None:
        async with FakeTaskd() as fake, AsyncClient(fake.address) as client:
            # It tries no longer than it is to wait: the client's patience is a minute.
            fake.insert_faults = itertools.chain([""], itertools.repeat(fault))
            async with asyncio.timeout(30):
                (inserted,) = await client.insert_batch([NewTask(queue="q", key="k")], wait=5)
            assert (inserted.id, inserted.status, inserted.is_open) == ("k", InsertStatus.CREATED, True)
            assert len(fake.inserts) > 1

    asyncio.run(run())


def test_an_insert_that_is_sent_again_is_answered_as_the_first_time(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        first = client.insert(queue, "k", payload=1, idempotency_key="i")
        again = client.insert(queue, "k", payload=1, idempotency_key="i")
        assert (again.status, again.id) == (InsertStatus.CREATED, first.id)
        assert client.insert(queue, "k", payload=1).status is InsertStatus.DUPLICATE
        with pytest.raises(TaskRejected, match="idempotency"):
            client.insert(queue, "other", payload=1, idempotency_key="i")


def test_a_task_has_a_backoff_of_its_own(new_taskd: MakeTaskd) -> None:
    # The queue would let it wait for ever.
    taskd = new_taskd('[queues.q]\nbackoff = ["1h"]\n')
    worker = Worker(taskd.address, queue="q")
    attempts: list[str] = []

    @worker.handler
    async def work(task: Task[Any]) -> int:
        attempts.append(task.key)
        if task.key == "parent":
            task.discover("child", backoff=Backoff("linear", initial=0.05, jitter=0))
        elif task.attempt < 3:
            raise OSError("not yet")
        return task.attempt

    backoff = Backoff("exponential", initial=0.05, maximum=0.2, jitter=0.5, give_up_after=3600)
    with Client(taskd.address) as client, Background(worker):
        assert client.insert("q", "k", backoff=backoff, wait=60).result == 3
        parent = client.insert("q", "parent", wait=60)
        assert client.get_task(parent.id).backoff is None
        child = until(lambda: list(client.list_tasks("q", key="child")), "the child is stored")[0]
        assert client.wait(child.id, timeout=60).status is TaskStatus.COMPLETED
        (task,) = client.list_tasks("q", key="k")
        assert client.get_task(task.id).backoff == backoff
        assert client.get_task(child.id).backoff == Backoff("linear", initial=0.05, maximum=86_400, jitter=0)
        # The limit alone leaves the waits to the queue.
        dead = client.insert("q", "limit", backoff=Backoff(give_up_after=60), wait=60)
        assert dead.task_status is TaskStatus.DEAD
        with pytest.raises(ValueError, match="'fast' is no backoff; there are constant, linear, exponential"):
            client.insert("q", "l", backoff=Backoff("fast"))  # type: ignore[arg-type]
        with pytest.raises(TaskRejected, match="backoff"):
            client.insert("q", "l", backoff=Backoff("constant"))
    assert sorted(attempts) == ["child"] * 3 + ["k"] * 3 + ["limit", "parent"]
