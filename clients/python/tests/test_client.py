"""Clients against a real taskd: inserts, reads, cancels."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sqlite3
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from conftest import Background, Program, Taskd, until
from fake import FakeTaskd

from taskd_client import (
    UNFINISHED,
    AsyncClient,
    Client,
    InsertStatus,
    InvalidRequest,
    ItemStatus,
    LetterKind,
    NewTask,
    NewTree,
    NotFound,
    Priority,
    PublishStatus,
    Record,
    Reject,
    Task,
    TaskRejected,
    TaskStatus,
    Unavailable,
    Unserialisable,
    Worker,
)
from taskd_client.v1 import taskd_pb2 as pb


def test_an_insert_is_answered(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        first = client.insert(queue, "k", payload={"n": 1})
        again = client.insert(queue, "k", payload={"n": 2})
        assert (first.status, first.is_new) == (InsertStatus.CREATED, True)
        assert (again.status, again.is_new, again.id) == (InsertStatus.DUPLICATE, False, first.id)
        with pytest.raises(TaskRejected, match="contains ' '"):
            client.insert("not a name", "k")
        with pytest.raises(Unserialisable, match="object has no form in JSON"):
            client.insert(queue, "k", payload={"a": object()})
        with pytest.raises(TypeError, match="the key 5 is int; give str or bytes"):
            client.insert(queue, key=5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="-5 is no time: give seconds, zero or more"):
            client.insert(queue, "k", delay=-5)


def test_a_batch_is_answered_task_by_task(taskd: Taskd, queue: str) -> None:
    tasks = [
        NewTask(queue=queue, key="a"),
        NewTask(queue="not a name", key="b"),
        NewTask(queue=queue, key="a"),
        NewTask(queue=queue, key=b"\xff"),
        NewTask(queue=queue, payload="named by its payload"),
    ]
    with Client(taskd.address) as client:
        results = client.insert_batch(tasks)
        created, rejected, duplicate = InsertStatus.CREATED, InsertStatus.REJECTED, InsertStatus.DUPLICATE
        assert [one.status for one in results] == [created, rejected, duplicate, created, created]
        assert "contains ' '" in results[1].error
        assert results[2].id == results[0].id
        # A key that is no text comes as one that goes back the same.
        assert client.get_task(results[3].id).key == "\udcff"
        assert not client.insert(queue, client.get_task(results[3].id).key).is_new
        assert len(client.get_task(results[4].id).key) == 64


def test_a_generator_of_any_length_takes_bounded_memory(taskd: Taskd, queue: str) -> None:
    made = answered = furthest = 0

    def tasks() -> Iterator[NewTask]:
        nonlocal made, furthest
        for n in range(20_000):
            made += 1
            furthest = max(furthest, made - answered)
            yield NewTask(queue=queue, key=str(n % 15_000), payload=b"x" * 100)

    with Client(taskd.address) as client:
        statuses = []
        for one in client.insert_each(tasks()):
            answered += 1
            statuses.append(one.status)
        assert statuses.count(InsertStatus.CREATED) == 15_000
        assert statuses[15_000:] == [InsertStatus.DUPLICATE] * 5_000
        # A batch that waits, those on the way, and what each side reads ahead.
        assert furthest <= 8_000
        counts = client.insert_many(NewTask(queue=name, key="0") for name in (queue, "not a name", f"{queue}.new"))
        assert (counts.created, counts.duplicates, counts.rejected) == (1, 1, 1)
        assert "contains ' '" in counts.errors[0]


def test_an_async_source_of_any_length_takes_bounded_memory(taskd: Taskd, queue: str) -> None:
    made = answered = furthest = 0

    async def tasks() -> AsyncIterator[NewTask]:
        nonlocal made, furthest
        for n in range(20_000):
            made += 1
            furthest = max(furthest, made - answered)
            yield NewTask(queue=queue, key=str(n % 15_000))

    async def run() -> None:
        nonlocal answered
        async with AsyncClient(taskd.address) as client:
            statuses = []
            async for one in client.insert_each(tasks()):
                answered += 1
                statuses.append(one.status)
            assert statuses == [InsertStatus.CREATED] * 15_000 + [InsertStatus.DUPLICATE] * 5_000
            assert len(await client.insert_batch([NewTask(queue=queue, key=str(n)) for n in range(2_500)])) == 2_500
            assert await client.insert_batch([]) == []

    asyncio.run(run())
    assert furthest <= 8_000


def test_tasks_do_not_wait_for_a_slow_source(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:

        def tasks() -> Iterator[NewTask]:
            yield NewTask(queue=queue, key="a")
            until(lambda: list(client.list_tasks(queue)), "the first task is inserted", 20)
            yield NewTask(queue=queue, key="b")

        assert client.insert_many(tasks()).created == 2


def test_answers_do_not_wait_for_a_slow_async_source(taskd: Taskd, queue: str) -> None:
    async def run() -> None:
        is_answered, is_closed = asyncio.Event(), asyncio.Event()

        async def tasks() -> AsyncIterator[NewTask]:
            yield NewTask(queue=queue, key="a")
            await is_answered.wait()
            yield NewTask(queue=queue, key="b")
            try:
                await asyncio.Event().wait()
            finally:
                is_closed.set()

        async with AsyncClient(taskd.address) as client, asyncio.timeout(20):
            async with aclosing(client.insert_each(tasks())) as answers:
                assert (await anext(answers)).is_new
                is_answered.set()
                assert (await anext(answers)).is_new
            assert is_closed.is_set()

    asyncio.run(run())


def test_a_source_is_read_in_the_thread_of_its_caller(taskd: Taskd, queue: str) -> None:
    # A cursor of SQLite refuses any other thread.
    with Client(taskd.address) as client, closing(sqlite3.connect(":memory:")) as database:
        rows = database.execute("select 'a' union select 'b'")
        assert client.insert_many(NewTask(queue=queue, key=key) for (key,) in rows).created == 2


def test_ctrl_c_ends_a_watch_and_an_insert(taskd: Taskd, queue: str, program: Callable[..., Program]) -> None:
    started = program("interrupted.py", taskd.address, queue)
    for begun, ended in [("it watches", "the watch has ended"), ("the source blocks", "the insert has ended")]:
        started.says(begun)
        started.signal(signal.SIGINT)
        started.says(ended)
    assert started.wait() == 0, started.said()


def test_a_generator_that_fails_ends_the_insert(taskd: Taskd, queue: str) -> None:
    def tasks() -> Iterator[NewTask]:
        yield NewTask(queue=queue, key="a")
        raise OSError("the file is gone")

    async def async_tasks() -> AsyncIterator[NewTask]:
        for task in tasks():
            yield task

    async def run() -> None:
        async with AsyncClient(taskd.address) as client:
            await client.insert_many(async_tasks())

    with Client(taskd.address) as client, pytest.raises(OSError, match="the file is gone"):
        client.insert_many(tasks())
    with pytest.raises(OSError, match="the file is gone"):
        asyncio.run(run())


def test_priorities_and_statuses_may_be_text(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        client.insert(queue, "k", priority="high")  # type: ignore[arg-type]
        (task,) = client.list_tasks(queue, statuses=["QUEUED", "PENDING"])  # type: ignore[list-item]
        assert task.priority is Priority.HIGH
        with pytest.raises(ValueError, match="'urgent' is not a valid Priority"):
            client.insert(queue, "k", priority="urgent")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'GONE' is not a valid TaskStatus"):
            list(client.list_tasks(queue, statuses=["GONE"]))  # type: ignore[list-item]


def test_large_tasks_go_in_small_batches(taskd: Taskd, queue: str) -> None:
    # 40 MiB: more than taskd takes in one call.
    tasks = (NewTask(queue=queue, key=str(n), payload=b"x" * (1 << 20)) for n in range(40))
    with Client(taskd.address) as client:
        assert client.insert_many(tasks).created == 40
        too_large = client.insert_batch(
            [NewTask(queue=queue, key="huge", payload=b"x" * (40 << 20)), NewTask(queue=queue, key="small")]
        )
    assert [one.status for one in too_large] == [InsertStatus.REJECTED, InsertStatus.CREATED]


def test_a_full_queue_is_tried_later(new_taskd: Callable[..., Taskd]) -> None:
    taskd = new_taskd("[queues.q]\nmax_unfinished = 50\n")
    worker = Worker(taskd.address, queue="q")

    @worker.handler
    async def work(task: object) -> None:
        pass

    async def run() -> int:
        async with AsyncClient(taskd.address) as client:

            async def tasks() -> AsyncIterator[NewTask]:
                for n in range(300):
                    yield NewTask(queue="q", key=str(n), payload=b"x" * (64 << 10))

            inserting = asyncio.create_task(client.insert_many(tasks()))

            async def is_full() -> bool:
                return len([task async for task in client.list_tasks("q", page=1000)]) >= 50

            while not inserting.done() and not await is_full():
                await asyncio.sleep(0.02)
            serving = asyncio.create_task(worker.serve())
            counts = await inserting
            worker.stop()
            await serving
            return counts.created + counts.duplicates

    assert asyncio.run(run()) == 300


def test_a_task_is_read_back(taskd: Taskd, queue: str) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    with Client(taskd.address) as client:
        inserted = client.insert(
            queue,
            "k",
            payload={"n": 1},
            replicas=2,
            priority=Priority.HIGH,
            not_before=due,
            lease=timedelta(minutes=1),
            max_attempts=3,
            headers={"a": "b"},
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
        )
        task = client.get_task(inserted.id)
        assert (task.queue, task.key, task.payload, task.headers) == (queue, "k", {"n": 1}, {"a": "b"})
        assert (task.replicas, task.priority, task.completed) == (2, Priority.HIGH, 0)
        assert task.status in UNFINISHED
        assert task.not_before is not None
        assert abs(task.not_before - due) < timedelta(seconds=1)
        assert task.traceparent.startswith("00-0af7651916cd43dd8448eb211c80319c-")
        with pytest.raises(NotFound):
            client.get_task("01939b3e-0000-7000-8000-000000000000")
        with pytest.raises(ValueError, match="-1 is no time"):
            client.insert(queue, "l", delay=-1)


def test_tasks_are_listed_page_by_page(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        client.insert_many(NewTask(queue=queue, key=f"k{n:03}", headers={"n": str(n % 2)}) for n in range(250))
        keys = [task.key for task in client.list_tasks(queue, page=100)]
        assert sorted(keys) == [f"k{n:03}" for n in range(250)]
        assert len(list(client.list_tasks(queue, headers={"n": "1"}))) == 125
        assert [task.key for task in client.list_tasks(queue, key="k007")] == ["k007"]
        assert len(list(client.list_tasks(queue, key_prefix="k01", statuses=UNFINISHED))) == 10
        assert list(client.list_tasks(queue, statuses=[TaskStatus.COMPLETED])) == []
        assert list(client.list_tasks(queue, until=datetime.now(UTC) - timedelta(hours=1))) == []
        with pytest.raises(InvalidRequest):
            list(client.list_tasks(key_prefix="k"))
        # A list may be left before its end.
        assert next(client.list_tasks(queue, page=1)).queue == queue


def test_a_task_is_explained_and_cancelled(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        task = client.insert(queue, "k", delay=3600)
        explanation = client.explain(queue=queue, key="k", worker="w")
        assert explanation.says
        assert (explanation.worker_may_get, bool(explanation.worker_says)) == (False, True)
        assert client.explain(task.id).worker_may_get is None
        unknown = "01939b3e-0000-7000-8000-000000000000"
        answers = client.cancel([task.id, unknown, "no id"])
        assert [one.status for one in answers] == [ItemStatus.OK, ItemStatus.UNKNOWN_TASK, ItemStatus.INVALID]
        assert client.wait(task.id, timeout=60).status is TaskStatus.CANCELLED
        with pytest.raises(TimeoutError, match="was not finished within"):
            client.wait(client.insert(queue, "l").id, timeout=0.05)


def test_a_client_serves_many_threads_and_opens_again(taskd: Taskd, queue: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    client = Client(taskd.address)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: client.insert(queue, str(n % 50)).is_new, range(200)))
    assert results.count(True) == 50
    client.close()
    assert not client.insert(queue, "1").is_new
    client.close()
    client.close()


def test_a_wrong_address_is_named() -> None:
    for address, said in [
        ("localhost", "give host:port"),
        ("127.0.0.1:port", "is no address"),
        ("ftp://h:1", "give host:port"),
        ("", "there is no address"),
        (["https://a:1", "b:1"], "some addresses begin with https://"),
    ]:
        with pytest.raises(InvalidRequest, match=said):
            Client(address)


def test_tasks_of_a_queue_without_a_worker_wait(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        task = client.insert(queue, "k")
        until(lambda: client.get_task(task.id).status is TaskStatus.QUEUED, "it is queued")


@pytest.mark.parametrize("wait", [None, 60.0])
def test_tasks_that_taskd_stores_later_are_sent_again_as_they_were(wait: float | None) -> None:
    """An insert that does not wait for the end of its tasks must not begin to: that needs another role."""

    async def run() -> None:
        async with FakeTaskd() as fake, AsyncClient(fake.address) as client:
            fake.try_later = 2
            tasks = [NewTask(queue="q", key=key).to_message() for key in "abc"]
            inserted = await client._insert(tasks, None if wait is None else time.monotonic() + wait)
            assert [one.id for one in inserted] == ["a", "b", "c"]
            sent = [[task.key for task in request.tasks] for request in fake.inserts]
            assert sent == [[b"a", b"b", b"c"], [b"b", b"c"], [b"c"]]
            assert [request.HasField("wait") for request in fake.inserts] == [wait is not None] * 3
            assert [request.max_bytes for request in fake.inserts] == [0 if wait is None else 32 << 20] * 3

    asyncio.run(run())


def test_a_task_begins_a_tree_or_joins_one() -> None:
    assert not NewTask(queue="q").to_message().HasField("tree")
    new = NewTask(queue="q", tree="new").to_message()
    assert new.HasField("tree")
    assert not new.tree.id
    assert NewTask(queue="q", tree="0197").to_message().tree.id == "0197"
    tree = NewTask(queue="q", tree=NewTree(then="r", timeout=60, on_dead="hold")).to_message().tree
    assert (tree.then, tree.timeout.seconds, tree.on_dead) == ("r", 60, pb.TREE_ON_DEAD_HOLD)


def test_a_client_that_is_closed_ends_the_calls_of_other_threads(taskd: Taskd, queue: str) -> None:
    client = Client(taskd.address)
    task = client.insert(queue, "k")
    errors: list[Exception] = []
    seen = threading.Event()

    def watch() -> None:
        try:
            for _ in client.watch(task.id):
                seen.set()
        except Unavailable as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    assert seen.wait(60)
    client.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])


def test_a_watch_that_outlives_its_client_is_over(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        task = client.insert(queue, "k")
        events, left = client.watch(task.id), client.watch(task.id)
        inserts = client.insert_each(NewTask(queue=queue, key=str(n)) for n in itertools.count())
        next(events)
        next(left)
        next(inserts)
    with pytest.raises(Unavailable, match="closed"):
        next(events)
    with pytest.raises(Unavailable, match="closed"):
        list(inserts)
    del left
    assert "taskd-client" not in [thread.name for thread in threading.enumerate()]
    # It connects again.
    assert client.get_task(task.id).queue == queue
    client.close()


def test_queues_are_counted_paused_and_resumed(taskd: Taskd, queue: str) -> None:
    with Client(taskd.address) as client:
        client.insert(queue, "a")
        (counts,) = until(lambda: [one for one in client.queues(queue) if one.waiting == 1], "the task waits")
        assert (counts.queue, counts.stored, counts.unfinished, counts.completed) == (queue, 1, 1, 0)
        assert queue in {one.queue for one in client.queues()}
        assert [client.pause_queue(queue), client.pause_queue(queue)] == [True, False]
        assert [client.resume_queue(queue), client.resume_queue(queue)] == [True, False]


def test_records_are_published_to_a_topic(taskd: Taskd) -> None:
    records = [
        Record(value={"n": 1}, key="a", attributes={"lang": ["en", "de"], "kind": "x"}, id="1"),
        Record(value=b"\xff", key="a"),
        Record(key="k" * 4097),
    ]
    with Client(taskd.address) as client:
        with pytest.raises(NotFound):
            client.publish("nowhere", records)
        put = urllib.request.Request(
            f"http://127.0.0.1:{taskd.http}/v1/topics/orders",
            b"{}",
            {"content-type": "application/json"},
            method="PUT",
        )
        urllib.request.urlopen(put, timeout=10).close()
        published = client.publish("orders", records)
    assert [one.status for one in published] == [
        PublishStatus.STORED,
        PublishStatus.STORED,
        PublishStatus.REJECTED,
    ]
    assert published[2].error == "key has 4097 bytes; at most 4096"
    read = taskd.get("/v1/topics/orders/records")["records"]
    assert [one["offset"] for one in read] == [one.offset for one in published[:2]]
    assert (read[0]["value"], read[0]["id"]) == ({"n": 1}, "1")
    assert read[0]["attributes"] == {"kind": ["x"], "lang": ["en", "de"]}
    assert read[1]["value_base64"] == "/w=="


def test_records_go_in_calls_that_taskd_takes_and_none_after_one_that_is_to_be_sent_again() -> None:
    async def run() -> None:
        # Without another try.
        async with FakeTaskd() as fake, AsyncClient(fake.address, patience=0) as client:

            async def publish(records: list[Record], *answers: str) -> tuple[Counter[str], list[int]]:
                fake.publishes.clear()
                fake.publish_answers = iter(answers)
                published = await client.publish("orders", records)
                assert len(published) == len(records)
                return Counter(one.status.value for one in published), list(fake.publishes)

            small = [Record(value=n) for n in range(1200)]
            assert await publish(small) == ({"STORED": 1200}, [500, 500, 200])
            # By their bytes. One that is too large does not hold up the others.
            large = [Record(value=bytes(9 << 20 if n == 3 else 1 << 20)) for n in range(7)]
            assert await publish(large) == ({"STORED": 6, "REJECTED": 1}, [3, 3])
            # A record of the same key in a later call would come before the one that is sent again.
            statuses = {"STORED": 999, "TRY_LATER": 201}
            assert await publish(small, "STORED", "TRY_LATER") == (statuses, [500, 500])
            statuses = {"STORED": 500, "TRY_LATER": 700}
            assert await publish(small, "STORED", "away") == (statuses, [500, 500])
            with pytest.raises(Unavailable):
                await publish(small, "away")

    asyncio.run(run())


def test_dead_letters_are_listed_sent_again_and_removed(taskd: Taskd, queue: str) -> None:
    worker = Worker(taskd.address, queue=queue)
    is_mended = threading.Event()

    @worker.handler
    def work(task: Task[Any]) -> str:
        if not is_mended.is_set():
            raise Reject(f"no {task.key}")
        return "done"

    with Client(taskd.address) as client, Background(worker):
        tasks = [client.insert(queue, key) for key in ("a", "b")]
        for task in tasks:
            assert client.wait(task.id, timeout=60).status is TaskStatus.DEAD
        until(lambda: len(list(client.dead_letters(queue))) == 2, "both are there")
        letters = list(client.dead_letters(queue))
        assert {(one.id, one.kind, one.key, one.reason) for one in letters} == {
            (task.id, LetterKind.TASK, key, f"no {key}") for task, key in zip(tasks, ("a", "b"), strict=True)
        }
        assert [one.key for one in client.dead_letters(queue, reason="no b", page=1)] == ["b"]
        is_mended.set()
        assert client.retry_dead_letters(tasks[0].id).changed == 1
        assert client.wait(tasks[0].id, timeout=60).status is TaskStatus.COMPLETED
        # taskd keeps the letter of a task that has just died.
        kept = client.remove_dead_letters([tasks[1].id, tasks[0].id])
        assert kept.changed == 0
        assert {one for one, why in kept.failed if why} == {task.id for task in tasks}
        assert [one.key for one in client.dead_letters(queue)] == ["b"]
