"""Reports and extensions that taskd does not take at once, with a source that a test controls."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from conftest import ROOT

from taskd_client import Answer, Encoding, ItemStatus, Retry, Task, Unavailable, Worker
from taskd_client._grpc_source import extension_timeout, rejection
from taskd_client._handler import reason
from taskd_client.source import Completion, Lease, Rejection
from taskd_client.v1 import taskd_pb2 as pb

OK = Answer(ItemStatus.OK)


class Scripted:
    """A source of some leases, whose answers a test makes."""

    def __init__(self, *keys: str) -> None:
        self.leases = [
            Lease(id=key, queue="q", key=key.encode(), payload=b"", encoding=Encoding.UNSPECIFIED, token=key)
            for key in keys
        ]
        self.completed: list[Sequence[str]] = []
        self.rejected: list[Rejection] = []
        self.extended = 0
        self.on_complete: Callable[[Sequence[str]], list[Answer]] = lambda keys: [OK for _ in keys]
        self.on_reject: Callable[[Rejection], Answer] = lambda _: OK
        self.on_extend: Callable[[], Answer] = lambda: OK
        self._end = asyncio.Event()

    async def get(self, max_tasks: int) -> Sequence[Lease]:
        if not self.leases:
            await self._end.wait()
        taken, self.leases = self.leases[:max_tasks], self.leases[max_tasks:]
        return taken

    def interrupt(self) -> None:
        self._end.set()

    async def complete(self, completions: Sequence[Completion]) -> Sequence[Answer]:
        keys = [one.lease.id for one in completions]
        self.completed.append(keys)
        return self.on_complete(keys)

    async def reject(self, rejections: Sequence[Rejection]) -> Sequence[Answer]:
        self.rejected.extend(rejections)
        return [self.on_reject(one) for one in rejections]

    async def extend(self, leases: Sequence[Lease]) -> Sequence[Answer]:
        self.extended += 1
        return [self.on_extend() for _ in leases]

    async def close(self) -> None:
        pass


def work(worker: Worker, source: Scripted, condition: Callable[[], Any]) -> None:
    async def run() -> None:
        serving = asyncio.create_task(worker.serve(source))
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)
        worker.stop()
        await serving

    asyncio.run(run())


class Late(Scripted):
    """A call that is interrupted brings tasks all the same: its answer was on the way."""

    def __init__(self, *keys: str) -> None:
        super().__init__(*keys)
        self.asked = asyncio.Event()

    async def get(self, max_tasks: int) -> Sequence[Lease]:
        self.asked.set()
        await self._end.wait()
        await asyncio.sleep(0.1)
        return await super().get(max_tasks)


def test_tasks_that_come_behind_a_cancel_go_back() -> None:
    source, worker = Late("k"), Worker(queue="q", lease=60)

    @worker.handler
    async def handle(task: Task[None]) -> None: ...

    async def run() -> None:
        serving = asyncio.create_task(worker.serve(source))
        await source.asked.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(run())
    assert [(one.lease.id, one.not_started) for one in source.rejected] == [("k", True)]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_shard_that_is_away_holds_up_no_other(is_whole: bool) -> None:
    """A call whose items are all of that shard is answered UNAVAILABLE; of another call, its items TRY_LATER."""
    source = Scripted("away-1", "away-2", "here-1", "here-2")
    worker = Worker(queue="q", lease=60)
    is_back = False
    taken: list[str] = []

    @worker.handler
    async def handle(task: Task[None]) -> None:
        # The others come when the first ones have been refused.
        while task.key.startswith("here") and not source.completed:
            await asyncio.sleep(0.01)

    def complete(keys: Sequence[str]) -> list[Answer]:
        if not is_back and is_whole and all(key.startswith("away") for key in keys):
            raise Unavailable("the shard is away")
        away = [not is_back and key.startswith("away") for key in keys]
        taken.extend(key for key, is_away in zip(keys, away, strict=True) if not is_away)
        return [Answer(ItemStatus.TRY_LATER) if is_away else OK for is_away in away]

    source.on_complete = complete

    def go_on() -> bool:
        nonlocal is_back
        # Only when the others are through does the shard come back.
        is_back = is_back or worker.stats.completed == 2
        return worker.stats.completed == 4

    work(worker, source, go_on)
    assert sorted(taken[:2]) == ["here-1", "here-2"]
    assert sorted(taken[2:]) == ["away-1", "away-2"]
    assert worker.stats.lost == 0


def test_what_is_refused_waits_behind_what_came_meanwhile() -> None:
    """A batch is full of a shard that is away, and others wait behind it."""
    count = 1000
    source = Scripted(*[f"away-{n}" for n in range(count)], "here")
    worker, go = Worker(queue="q", lease=60, concurrency=count + 1), asyncio.Event()

    @worker.handler
    async def handle(task: Task[None]) -> None:
        # All end at once, so that the first batch has no other.
        if worker.stats.running == count + 1:
            go.set()
        await go.wait()

    def complete(keys: Sequence[str]) -> list[Answer]:
        if all(key.startswith("away") for key in keys) and not worker.stats.completed:
            raise Unavailable("the shard is away")
        return [OK for _ in keys]

    source.on_complete = complete
    work(worker, source, lambda: worker.stats.completed == count + 1)
    assert len(source.completed[0]) == count
    assert source.completed[1][0] == "here"


def test_a_rejection_that_is_refused_becomes_a_plain_one() -> None:
    source = Scripted("k")
    worker = Worker(queue="q")

    @worker.handler
    async def handle(task: Task[None]) -> None:
        raise Retry("later", after=5)

    source.on_reject = lambda one: OK if one.delay is None else Answer(ItemStatus.INVALID, "no such delay")
    work(worker, source, lambda: worker.stats.rejected)
    assert [one.delay for one in source.rejected] == [5.0, None]
    assert source.rejected[1].reason == "taskd refused the rejection: no such delay"


def test_a_report_that_is_refused_twice_is_lost_and_not_sent_for_ever() -> None:
    source = Scripted("k")
    worker = Worker(queue="q")

    @worker.handler
    async def handle(task: Task[None]) -> None:
        raise Retry("later")

    source.on_reject = lambda _: Answer(ItemStatus.INVALID, "nothing is right")
    work(worker, source, lambda: worker.stats.lost)
    assert len(source.rejected) == 2


def test_an_extension_that_is_refused_ends_neither_the_work_nor_the_extensions() -> None:
    source = Scripted("k")
    worker = Worker(queue="q", lease=0.3)

    @worker.handler
    async def handle(task: Task[None]) -> None:
        while source.extended < 4:
            await asyncio.sleep(0.01)

    source.on_extend = lambda: Answer(ItemStatus.INVALID, "by is 0s") if source.extended < 3 else OK
    work(worker, source, lambda: worker.stats.completed)
    assert worker.stats.lost == 0


def test_extensions_have_a_limit_in_time() -> None:
    assert [extension_timeout(lease) for lease in (0.1, 2.0, 30.0, 3600.0)] == [0.5, 0.5, 7.5, 30.0]


def test_reasons_and_delays_are_cut_to_what_taskd_takes() -> None:
    assert reason("x" * 4000) == "x" * 4000
    for text in ("x" * 5000, "é" * 3000, "x" + "é" * 3000, "\U0001f41d" * 2000):
        cut = reason(text)
        assert len(cut.encode()) <= 4000
        assert len(cut.encode()) > 3990
        assert text.startswith(cut.removesuffix(" …"))
    lease = Scripted("k").leases[0]
    for delay, sent in ((5.0, 5), (1e18, 365 * 24 * 3600)):
        assert rejection(Rejection(lease=lease, reason="", delay=delay)).delay.seconds == sent


def test_the_package_asks_for_the_protobuf_that_its_code_needs() -> None:
    package = ROOT / "clients" / "python"
    (generated,) = re.findall(
        r"^# Protobuf Python Version: (\S+)$", (package / "src/taskd_client/v1/taskd_pb2.py").read_text(), re.MULTILINE
    )
    assert f'"protobuf>={generated}"' in (package / "pyproject.toml").read_text()
    assert pb.DESCRIPTOR.package == "taskd.v1"


@pytest.mark.parametrize("wait", [0.0, 0.05, 30.0])
def test_a_source_that_does_not_wait_is_not_asked_again_and_again(wait: float) -> None:
    times: list[float] = []

    class Empty(Scripted):
        async def get(self, max_tasks: int) -> Sequence[Lease]:
            times.append(time.monotonic())
            return ()

    worker = Worker(queue="q", wait=wait)
    worker.handler(lambda task: None)
    work(worker, Empty(), lambda: len(times) > 3)
    # A pause is at random, at least half of the least one.
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) > 0.04, times


def test_a_worker_that_stops_does_not_say_that_taskd_is_back(caplog: pytest.LogCaptureFixture) -> None:
    class Away(Scripted):
        async def get(self, max_tasks: int) -> Sequence[Lease]:
            if not caplog.records:
                raise Unavailable("nobody is there")
            return await super().get(max_tasks)

    worker = Worker(queue="q")
    worker.handler(lambda task: None)
    with caplog.at_level("INFO", "taskd.worker"):
        work(worker, Away(), lambda: caplog.records)
    assert [record.message for record in caplog.records] == ["taskd is away, trying again: nobody is there"]


def test_a_worker_with_settings_that_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"lease is 0; taskd takes leases from 0.1 s on"):
        Worker(queue="q", lease=0)
    with pytest.raises(ValueError, match="the queue has no name"):
        Worker(queue="q").handler(queue="")
