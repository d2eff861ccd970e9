"""Workers against a real taskd: handlers, results, failures, leases."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from conftest import Background, Taskd
from conftest import until as wait_for

from taskd_client import (
    AsyncClient,
    Client,
    InvalidRequest,
    NewTask,
    PutOff,
    Reject,
    Retry,
    Task,
    TaskInfo,
    TaskRejected,
    TaskStatus,
    Throttle,
    Worker,
    current_task,
)


@asynccontextmanager
async def working(*workers: Worker) -> AsyncIterator[None]:
    """Workers that work for as long as the block lasts. An error of theirs fails the test."""
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(worker.serve())
        try:
            yield
        finally:
            for worker in workers:
                worker.stop()


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    async with asyncio.timeout(60):
        while not (value := await condition()):
            await asyncio.sleep(0.02)
    return value


def finish(taskd: Taskd, worker: Worker, *tasks: NewTask, attempts: int = 1) -> list[TaskInfo]:
    """Inserts the tasks, lets the worker do them, and returns them in their last status."""

    async def run() -> list[TaskInfo]:
        async with AsyncClient(taskd.address) as client, working(worker):
            ids = [inserted.id for inserted in await client.insert_batch(tasks)]
            return [await ended(client, one, attempts) for one in ids]

    return asyncio.run(run())


async def ended(client: AsyncClient, task_id: str, attempts: int = 1) -> TaskInfo:
    """A finished task with its history. taskd stores attempts a moment after they have their effect."""
    await client.wait(task_id, timeout=60)

    async def with_history() -> TaskInfo | None:
        task = await client.get_task(task_id)
        return task if len(task.history) >= attempts or task.status is TaskStatus.CANCELLED else None

    task: TaskInfo = await until(with_history, "the history is stored")
    return task


def result(taskd: Taskd, task: TaskInfo) -> Any:
    assert task.status is TaskStatus.COMPLETED, task.reason
    (one,) = taskd.results(task.id)
    return one.get("result", one.get("result_base64"))


def test_a_worker_does_its_tasks(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue, name="ten-lines")

    @worker.handler
    async def fetch(task):  # type: ignore[no-untyped-def]
        assert [current_task()] == [task]
        return {"length": task.payload["n"], "by": task.worker, "header": task.headers["h"]}

    new = [NewTask(queue=queue, key=f"k{n}", payload={"n": n}, headers={"h": "é"}) for n in range(50)]
    tasks = finish(taskd, worker, *new)
    assert [result(taskd, task) for task in tasks] == [
        {"length": n, "by": "ten-lines", "header": "é"} for n in range(50)
    ]
    assert (worker.stats.got, worker.stats.completed) == (50, 50)
    assert (worker.stats.rejected, worker.stats.lost, worker.stats.running) == (0, 0, 0)


def test_results_and_payloads_come_back_as_they_went_in(taskd: Taskd, queue: str) -> None:
    values: list[Any] = [None, b"\xff\x00", "tëxt", "", {"a": [1, 2.5, None]}, [1], 7, True]
    seen: dict[str, Any] = {}
    worker = Worker(taskd.address, queue=queue)

    @worker.handler
    async def echo(task: Task[Any]) -> Any:
        seen[task.key] = task.payload
        return task.payload

    tasks = finish(taskd, worker, *[NewTask(queue=queue, key=str(n), payload=one) for n, one in enumerate(values)])
    # Nothing has no kind.
    expected = [None if value == "" else value for value in values]
    assert [seen[str(n)] for n in range(len(values))] == expected
    assert [task.payload for task in tasks] == expected
    assert taskd.results(tasks[1].id)[0]["result_base64"] == "/wA="
    assert result(taskd, tasks[2]) == "tëxt"
    assert result(taskd, tasks[4]) == values[4]


def test_a_plain_function_runs_in_a_thread(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue, concurrency=3)
    together = threading.Barrier(3)

    @worker.handler
    def block(task: Task[Any]) -> str:
        assert current_task() is task
        # Passes only if three handlers run at once.
        together.wait(30)
        return threading.current_thread().name

    tasks = finish(taskd, worker, *[NewTask(queue=queue, key=str(n)) for n in range(6)])
    assert all(result(taskd, task).startswith("taskd-handler-") for task in tasks)


@dataclass
class Page:
    url: str
    depth: int = 0


def test_payloads_have_the_type_of_the_annotation(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)

    @worker.handler
    async def fetch(task: Task[Page]) -> Page:
        return Page(task.payload.url, task.payload.depth + 1)

    good, bad = finish(
        taskd,
        worker,
        NewTask(queue=queue, key="good", payload=Page("u", 3)),
        NewTask(queue=queue, key="bad", payload={"url": "u", "depth": "deep"}),
    )
    assert result(taskd, good) == {"url": "u", "depth": 4}
    # It fits at no attempt, so there is one only.
    assert (bad.status, len(bad.history)) == (TaskStatus.DEAD, 1)
    assert bad.history[0].reason == "payload.depth is a str; int is expected"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_failures_say_why(taskd: Taskd, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(taskd.address, queue=queue)

    @worker.handler
    async def fail(task: Task[Any]) -> object:
        match task.key:
            case "raises":
                raise ValueError("boom")
            case "exits":
                raise SystemExit(3)
            case "groups":
                raise BaseExceptionGroup("some", [KeyError("a")])
            case "cancels":
                raise asyncio.CancelledError
            case "rejects":
                raise Reject("there is no such page")
            case "mute":
                raise Mute
            case "past":
                raise Retry(after=-1)
            case "loop":
                loop: list[Any] = []
                loop.append(loop)
                return loop
        return object()

    expected = {
        "raises": "ValueError: boom",
        "exits": "SystemExit: 3",
        "groups": "ExceptionGroup: some (1 sub-exception)",
        "cancels": "the handler cancelled itself",
        "rejects": "there is no such page",
        "mute": "Mute",
        "past": "ValueError: -1 is no time: give seconds, zero or more",
        "loop": "the result cannot be sent: a list cannot be sent: Circular reference detected",
        "object": "the result cannot be sent: a object cannot be sent: object has no form in JSON",
    }
    # A program that has set up no logging sees warnings.
    with caplog.at_level("WARNING", "taskd.worker"):
        tasks = finish(taskd, worker, *[NewTask(queue=queue, key=key, max_attempts=1) for key in expected])
    assert {task.key: task.history[0].reason for task in tasks} == expected
    assert {task.status for task in tasks} == {TaskStatus.DEAD}
    assert worker.stats.rejected == len(expected)
    for task in tasks:
        reason = expected[task.key]
        assert f"{reason} (key {task.key!r}, task {task.id})" in caplog.text


def test_a_plain_function_fails_as_well(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)

    @worker.handler
    def fail(task: Task[Any]) -> None:
        # An asyncio future refuses this one.
        raise StopIteration if task.key == "stop" else OSError(2, "gone")

    stop, gone = finish(taskd, worker, *[NewTask(queue=queue, key=key, max_attempts=1) for key in ("stop", "gone")])
    assert stop.history[0].reason == "RuntimeError: the handler raised StopIteration()"
    assert gone.history[0].reason == "FileNotFoundError: [Errno 2] gone"


def test_a_retry_waits_as_long_as_it_says(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)
    began: list[float] = []

    @worker.handler
    async def again(task: Task[Any]) -> int:
        began.append(time.monotonic())
        if task.attempt < 3:
            raise Retry("the site is busy", after=0.2)
        return task.attempt

    (task,) = finish(taskd, worker, NewTask(queue=queue, key="k"), attempts=3)
    assert result(taskd, task) == 3
    assert [one.reason for one in task.history] == ["the site is busy", "the site is busy", ""]
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(began))


def test_discovered_tasks_are_done_once_each(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)
    seen: list[str] = []

    @worker.handler
    async def crawl(task: Task[dict[str, int]]) -> None:
        seen.append(task.key)
        depth = task.payload["depth"]
        for child in range(3 if depth else 0):
            # Each parent finds the same one besides.
            task.discover(f"{task.key}/{child}", payload={"depth": depth - 1})
            task.discover("shared", payload={"depth": 0}, headers={"found": "often"})

    async def run() -> None:
        async with AsyncClient(taskd.address) as client, working(worker):
            await client.insert(queue, "r", payload={"depth": 3})

            async def all_completed() -> bool:
                tasks = [task.status async for task in client.list_tasks(queue, page=1000)]
                return len(tasks) == 41 and set(tasks) == {TaskStatus.COMPLETED}

            await until(all_completed, "41 tasks are completed")

    asyncio.run(run())
    assert len(seen) == len(set(seen)) == 1 + 3 + 9 + 27 + 1


def test_a_discovered_task_that_is_wrong_costs_only_itself(
    taskd: Taskd, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(taskd.address, queue=queue)
    found = f"{queue}-found"

    @worker.handler
    async def crawl(task: Task[Any]) -> None:
        task.discover("first", queue=found)
        # taskd keeps these as dead letters.
        task.discover("child", queue="not a name")
        task.discover("k" * 5000, queue=found)
        # And these cannot be sent.
        task.discover("half \ud800", queue=found)
        task.discover("object", payload=object(), queue=found)
        task.discover("header", headers={"a": "\udfff"}, queue=found)
        task.discover("early", delay=-1, queue=found)
        task.discover("last", queue=found)

    (task,) = finish(taskd, worker, NewTask(queue=queue, key="k", max_attempts=1))
    assert task.status is TaskStatus.COMPLETED
    lines = [record.getMessage() for record in caplog.records if "not stored" in record.getMessage()]
    assert [line.split(":")[0] for line in lines] == [
        "4 discovered tasks are not stored; the first",
        "2 discovered tasks are not stored; the first",
    ]
    with Client(taskd.address) as client:
        assert wait_for(lambda: sorted(one.key for one in client.list_tasks(found)), "they are stored") == [
            "first",
            "last",
        ]


def test_a_handler_discovers_as_many_tasks_as_a_sitemap_has(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)
    found = f"{queue}-found"

    @worker.handler
    async def crawl(task: Task[Any]) -> None:
        for number in range(50_000):
            task.discover(f"http://example.org/{number}", queue=found)
        task.discover("k" * 5000, queue=found)

    (task,) = finish(taskd, worker, NewTask(queue=queue, key="k", max_attempts=1))
    assert task.status is TaskStatus.COMPLETED
    wait_for(lambda: len([*pages(taskd, found)]) == 50_000, "all are tasks")


def pages(taskd: Taskd, queue: str) -> list[TaskInfo]:
    with Client(taskd.address) as client:
        return [*client.list_tasks(queue, page=1000)]


def test_a_task_is_put_off_at_no_cost(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)
    attempts: list[int] = []

    @worker.handler
    async def work(task: Task[Any]) -> int:
        attempts.append(task.attempt)
        if len(attempts) < 4:
            raise PutOff("the site is busy", after=0.2)
        return len(attempts)

    (task,) = finish(taskd, worker, NewTask(queue=queue, key="k", max_attempts=1))
    assert (task.status, task.attempts) == (TaskStatus.COMPLETED, 0)
    assert attempts == [1, 1, 1, 1]
    assert (worker.stats.returned, worker.stats.rejected) == (3, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_taskd_reads_the_weights_of_queues(taskd: Taskd, queue: str, stream: bool) -> None:
    worker = Worker(taskd.address, queue=queue, weights={"other": 3}, stream=stream)
    worker.handler(lambda task: None)
    with pytest.raises(InvalidRequest, match='weights names "other"'):
        asyncio.run(worker.serve())


@pytest.mark.parametrize("stream", [True, False])
def test_a_throttled_worker_takes_nothing_meanwhile(taskd: Taskd, queue: str, stream: bool) -> None:
    worker = Worker(taskd.address, queue=queue, concurrency=1, prefetch=1, stream=stream)
    began: list[float] = []

    @worker.handler
    async def work(task: Task[Any]) -> None:
        began.append(time.monotonic())
        if len(began) == 1:
            raise Throttle("the service is away", after=1.5)

    tasks = [NewTask(queue=queue, key=key, max_attempts=1) for key in ("a", "b", "c")]
    for task in finish(taskd, worker, *tasks):
        assert (task.status, task.attempts) == (TaskStatus.COMPLETED, 0)
    assert len(began) == 4
    assert began[1] - began[0] >= 1.5


@pytest.mark.parametrize("is_async", [True, False])
def test_a_handler_holds_and_slows_its_limit_key(
    new_taskd: Callable[..., Taskd], queue: str, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    taskd = new_taskd(f'[queues.{queue}]\nlimit_by = "given"\nlimit_at_a_time = 1\nmax_attempts = 1\n')
    plain = f"{queue}-plain"
    worker = Worker(taskd.address, queue=[queue, plain])
    visits: list[tuple[str, str, float, float]] = []

    def visit(task: Task[Any]) -> str:
        began = time.monotonic()
        is_first = task.key not in [key for key, *_ in visits]
        try:
            match task.key:
                case "root":
                    for name in ("a", "b"):
                        task.discover(name, limit_key="site")
                    task.hold(timedelta(seconds=1))
                case "a" if is_first:
                    task.hold(1.5)
                    raise PutOff("the site answers 429")
                case "a":
                    task.pace(1)
                case "plain":
                    task.hold(3600)
            return task.limit_key
        finally:
            visits.append((task.key, task.limit_key, began, time.monotonic()))

    async def visit_in_the_loop(task: Task[Any]) -> str:
        return visit(task)

    worker.handler(visit_in_the_loop if is_async else visit)
    with Background(worker), Client(taskd.address) as client:
        assert client.insert(plain, "plain").is_new
        assert client.insert(queue, "root", limit_key="site").is_new
        client.wait_drained(queue, timeout=60)
        client.wait_drained(plain, timeout=60)
        ids = {task.key: task.id for task in client.list_tasks(queue)}
        # SQL has the attempts a moment after they have their effect.
        wait_for(lambda: all(client.get_task(one).history for one in ids.values()), "the attempts are stored")
        tasks = {key: client.get_task(one) for key, one in ids.items()}
    starts = {key: task.history[-1].started_at for key, task in tasks.items()}
    assert starts["a"]
    assert starts["b"]
    limited = [visit for visit in visits if visit[0] != "plain"]
    assert [(key, limit_key) for key, limit_key, *_ in limited] == [(key, "site") for key in ("root", "a", "a", "b")]
    (_, _, _, root_ended), (_, _, first_began, first_ended), (_, _, second_began, _), _ = limited
    assert first_began - root_ended >= 1
    assert second_began - first_ended >= 1.5
    assert (starts["b"] - starts["a"]).total_seconds() >= 1
    assert {task.status for task in tasks.values()} == {TaskStatus.COMPLETED}
    assert tasks["a"].attempts == 0
    assert (worker.stats.completed, worker.stats.returned, worker.stats.rejected) == (4, 1, 0)
    assert "the task has no limit key, so hold and pace do nothing" in caplog.text


def test_a_task_has_a_deadline(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)
    found = f"{queue}-found"

    @worker.handler
    async def work(task: Task[Any]) -> None:
        task.discover("within", finish_within=0.5, queue=found)
        task.discover("by", deadline=datetime.now() + timedelta(seconds=0.5), queue=found)
        task.discover("long", finish_within=timedelta(days=2), queue=found)

    (task,) = finish(taskd, worker, NewTask(queue=queue, key="k", finish_within=3600))
    assert task.status is TaskStatus.COMPLETED
    with Client(taskd.address) as client:
        soon = client.insert(found, "soon", finish_within=0.5).id
        late = client.insert(found, "late", deadline=datetime.now() + timedelta(seconds=0.5)).id
        assert [client.wait(one, timeout=60).status for one in (soon, late)] == [TaskStatus.DEAD] * 2
        assert client.get_task(soon).reason.startswith("the deadline of ")
        wait_for(lambda: len([*client.list_tasks(found)]) == 5, "they are stored")
        statuses = {one.key: client.get_task(one.id) for one in client.list_tasks(found)}
        assert client.wait(statuses["by"].id, timeout=60).status is TaskStatus.DEAD
        assert client.wait(statuses["within"].id, timeout=60).status is TaskStatus.DEAD
        assert not client.get_task(statuses["long"].id).status.is_final
        with pytest.raises(TaskRejected, match="deadline and finish_within are both given"):
            client.insert(found, "both", deadline=datetime.now(), finish_within=1)


def test_a_huge_result_fails_its_own_task_only(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)
    together = asyncio.Event()

    @worker.handler
    async def produce(task: Task[Any]) -> bytes:
        sizes = {"large": 2 << 20, "larger": 40 << 20}
        if len(running := worker_tasks) < 3:
            running.append(task.key)
            if len(running) == 3:
                together.set()
        # All three reports are there at the same time.
        await together.wait()
        return b"x" * sizes.get(task.key, 1)

    worker_tasks: list[str] = []
    keys = ("large", "larger", "small")
    large, larger, small = finish(taskd, worker, *[NewTask(queue=queue, key=key, max_attempts=1) for key in keys])
    assert result(taskd, small) == "eA=="
    assert large.history[0].reason == "taskd refused the result: result has 2097152 bytes; at most 1048576"
    assert (larger.status, larger.history[0].reason[:25]) == (TaskStatus.DEAD, "taskd refused the result:")


def test_leases_are_extended_while_a_handler_runs(taskd: Taskd, queue: str) -> None:
    # A machine that is busy for a second must not cost the lease.
    worker = Worker(taskd.address, queue=queue, lease=4)

    async def run() -> TaskInfo:
        async with AsyncClient(taskd.address) as client:

            @worker.handler
            async def slow(task: Task[Any]) -> None:
                deadlines: set[datetime] = set()
                # Three deadlines: the lease was extended twice.
                while len(deadlines) < 3:
                    info = await client.get_task(task.id)
                    deadlines |= {one.lease_expires_at for one in info.history if one.lease_expires_at}
                    await asyncio.sleep(0.05)

            async with working(worker):
                return await ended(client, (await client.insert(queue, "slow")).id)

    task = asyncio.run(run())
    assert (task.status, task.attempts, len(task.history)) == (TaskStatus.COMPLETED, 0, 1)


def test_leases_of_tasks_that_wait_in_the_worker_are_extended(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue, lease=4, concurrency=1, prefetch=2)

    async def run() -> list[TaskInfo]:
        async with AsyncClient(taskd.address) as client:
            ids = [(await client.insert(queue, key)).id for key in ("first", "second")]

            @worker.handler
            async def slow(task: Task[Any]) -> None:
                deadlines: set[datetime] = set()
                while task.key == "first" and len(deadlines) < 3:
                    info = await client.get_task(ids[1])
                    deadlines |= {one.lease_expires_at for one in info.history if one.lease_expires_at}
                    await asyncio.sleep(0.05)

            async with working(worker):
                return [await ended(client, one) for one in ids]

    tasks = asyncio.run(run())
    assert [(task.status, task.attempts) for task in tasks] == [(TaskStatus.COMPLETED, 0)] * 2


def test_num_2_is_done_by_two_workers(taskd: Taskd, queue: str) -> None:
    workers = [Worker(taskd.address, queue=queue, name=f"num-{n}") for n in range(2)]
    for worker in workers:

        @worker.handler
        async def vote(task: Task[Any]) -> str:
            return task.worker

    async def run() -> list[str]:
        async with AsyncClient(taskd.address) as client, working(*workers):
            new = [NewTask(queue=queue, key=str(n), replicas=2) for n in range(20)]
            ids = [inserted.id for inserted in await client.insert_batch(new)]
            for one in ids:
                await client.wait(one, timeout=60)
            return ids

    for one in asyncio.run(run()):
        found = taskd.results(one)
        assert sorted(each["worker"] for each in found) == ["num-0", "num-1"]
        assert all(each["result"] == each["worker"] for each in found)


def test_a_cancelled_task_ends_its_handler(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue, lease=10)
    began, ended = asyncio.Event(), asyncio.Event()
    in_thread = threading.Event()

    @worker.handler
    async def hang(task: Task[Any]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            assert task.cancelled
            ended.set()

    @worker.handler(queue=f"{queue}.threads")
    def loop(task: Task[Any]) -> None:
        in_thread.set()
        while not task.cancelled:
            time.sleep(0.01)

    async def run() -> list[TaskInfo]:
        async with AsyncClient(taskd.address) as client, working(worker):
            ids = [(await client.insert(queue, "k")).id, (await client.insert(f"{queue}.threads", "k")).id]
            await began.wait()
            await until(lambda: asyncio.sleep(0, in_thread.is_set()), "the thread began")
            assert [answer.status.value for answer in await client.cancel(ids)] == ["OK", "OK"]
            await ended.wait()
            await until(lambda: asyncio.sleep(0, worker.stats.running == 0), "the thread ended")
            return [await client.wait(one) for one in ids]

    assert {task.status for task in asyncio.run(run())} == {TaskStatus.CANCELLED}
    assert worker.stats.lost == 2


def test_a_handler_that_takes_too_long_is_cancelled(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue, timeout=60)
    ended = threading.Event()

    @worker.handler(timeout=1)
    async def hang(task: Task[Any]) -> None:
        await asyncio.Event().wait()

    @worker.handler(queue=f"{queue}.threads", timeout=1)
    def loop(task: Task[Any]) -> None:
        while not task.cancelled:
            time.sleep(0.01)
        ended.set()

    new = [NewTask(queue=name, key="k", max_attempts=1) for name in (queue, f"{queue}.threads")]
    tasks = finish(taskd, worker, *new)
    assert [task.history[0].reason for task in tasks] == ["timed out after 1 s"] * 2
    assert ended.wait(30)


def test_a_worker_serves_several_queues(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=[f"{queue}.a", f"{queue}.b"])

    @worker.handler(queue=f"{queue}.c")
    async def special(task: Task[Any]) -> str:
        return f"special {task.queue}"

    @worker.handler
    async def general(task: Task[Any]) -> str:
        return f"general {task.queue}"

    assert worker.queues == [f"{queue}.a", f"{queue}.b", f"{queue}.c"]
    tasks = finish(taskd, worker, *[NewTask(queue=f"{queue}.{one}", key="k") for one in "abc"])
    assert [result(taskd, task) for task in tasks] == [
        f"general {queue}.a",
        f"general {queue}.b",
        f"special {queue}.c",
    ]


def test_a_second_worker_of_the_machine_and_queue_needs_a_name(taskd: Taskd, queue: str) -> None:
    first = Worker(taskd.address, queue=[f"{queue}.other", queue])
    first.handler(lambda task: "first")
    second = Worker(taskd.address, queue=queue)
    second.handler(lambda task: "second")
    named = Worker(taskd.address, queue=[queue, f"{queue}.named"], name=f"{queue}-2")
    named.handler(lambda task: task.worker)
    assert first.name == second.name == socket.gethostname()
    with Client(taskd.address) as client:
        with Background(first):
            assert client.insert(queue, "a", wait=60).result == "first"
            said = f"a worker {first.name} of queue {queue} runs on this machine already"
            with pytest.raises(InvalidRequest, match=said):
                asyncio.run(second.serve())
            with pytest.raises(SystemExit, match=f"taskd worker: {said}"):
                second.run()
            with Background(named):
                assert client.insert(f"{queue}.named", "a", wait=60).result == named.name
        # The name is free again.
        with Background(second):
            assert client.insert(queue, "b", wait=60).result == "second"


def test_a_wrong_queue_name_ends_the_worker(taskd: Taskd) -> None:
    worker = Worker(taskd.address, queue="not a name")
    worker.handler(lambda task: None)
    with pytest.raises(InvalidRequest, match="contains ' '"):
        asyncio.run(worker.serve())
    with pytest.raises(SystemExit, match=r"taskd worker: .*contains ' '"):
        worker.run()


def test_a_wrong_lease_ends_the_worker(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue, lease=100 * 3600)
    worker.handler(lambda task: None)
    with pytest.raises(InvalidRequest, match="lease_duration"):
        asyncio.run(worker.serve())


def test_a_cancelled_poll_leaves_nothing_to_other_loops(taskd: Taskd, queue: str) -> None:
    """gRPC has one queue of events for all loops: what comes for a closed loop is an error in another one."""
    errors: list[str] = []

    async def serve() -> None:
        worker = Worker(taskd.address, queue=queue, stream=False, wait=10)

        @worker.handler
        async def handle(task: Task[None]) -> None: ...

        serving = asyncio.create_task(worker.serve())
        await asyncio.sleep(0.1)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    def serve_again_and_again() -> None:
        for _ in range(10):
            asyncio.run(serve())

    async def watch() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context)))
        async with AsyncClient(taskd.address) as client:
            serving = asyncio.create_task(asyncio.to_thread(serve_again_and_again))
            while not serving.done():
                await client.insert(queue, str(time.monotonic()))
            await serving

    asyncio.run(watch())
    assert errors == []


def test_a_worker_that_is_cancelled_gives_its_tasks_back(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)
    began = asyncio.Event()
    handler_ended = asyncio.Event()

    @worker.handler
    async def hang(task: Task[Any]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            handler_ended.set()

    async def run() -> None:
        async with AsyncClient(taskd.address) as client:
            inserted = await client.insert(queue, "k")
            serving = asyncio.create_task(worker.serve())
            await began.wait()
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            assert handler_ended.is_set()

            async def rejected() -> list[str]:
                history = (await client.get_task(inserted.id)).history
                return [one.reason for one in history if one.state == "REJECTED"]

            assert await until(rejected, "the rejection is stored") == ["the worker stopped"]

    asyncio.run(run())


def test_threads_and_prefetch_under_many_short_tasks(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue, concurrency=8, prefetch=200)

    @worker.handler
    def quick(task: Task[int]) -> int:
        return task.payload

    count = 3000
    with Client(taskd.address) as client:
        counts = client.insert_many(NewTask(queue=queue, key=str(n), payload=n) for n in range(count))
        assert counts.created == count

    async def run() -> None:
        async with working(worker):
            await until(lambda: asyncio.sleep(0, worker.stats.completed == count), "all are completed")

    asyncio.run(run())
    assert worker.stats.lost == worker.stats.rejected == 0
