"""Completions that bring the next tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from conftest import Background, Taskd, until
from test_reports import Scripted, work

from taskd_client import Answer, Client, InvalidRequest, ItemStatus, Task, Unavailable, Worker, _reports, _session
from taskd_client._grpc_source import GrpcSource
from taskd_client.source import Completion, Lease

OK = Answer(ItemStatus.OK)


class Bringing(Scripted):
    """Its first poll brings one task, and the other ones come as a test says."""

    def __init__(self, *keys: str) -> None:
        super().__init__(*keys)
        self.polls = 0
        self.asked: list[int] = []
        self.is_asked_no_more = asyncio.Event()
        self.error: Exception | None = None
        self.hangs = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def get(self, max_tasks: int) -> Sequence[Lease]:
        self.polls += 1
        return await super().get(max_tasks)

    async def complete_and_get(
        self, completions: Sequence[Completion], max_tasks: int
    ) -> tuple[Sequence[Answer], Sequence[Lease]] | None:
        self.asked.append(max_tasks)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if self.hangs:
            await self.is_asked_no_more.wait()
            return None
        await self.may_answer.wait()
        taken, self.leases = self.leases[:max_tasks], self.leases[max_tasks:]
        return [OK for _ in completions], taken

    def ask_no_more(self) -> None:
        self.is_asked_no_more.set()


def worker_of(*, concurrency: int = 1) -> Worker:
    worker = Worker(queue="q", lease=60, concurrency=concurrency)

    @worker.handler
    async def handle(task: Task[None]) -> None:
        await asyncio.sleep(0)

    return worker


@pytest.mark.parametrize("concurrency", [1, 10])
def test_a_report_brings_the_next_tasks(concurrency: int) -> None:
    source, worker = Bringing(*[str(n) for n in range(100)]), worker_of(concurrency=concurrency)
    work(worker, source, lambda: worker.stats.completed == 100)
    # The first tasks, and those behind a report that brought none.
    assert source.polls == 2
    assert source.completed == []
    assert max(source.asked) == concurrency


def test_a_report_that_takes_long_goes_anew_and_the_worker_polls_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_session, "_ASKS_NOT_FOR", 60.0)
    source, worker = Bringing("a", "b"), worker_of()
    source.hangs = True
    work(worker, source, lambda: worker.stats.completed == 2)
    assert (source.polls, len(source.asked)) == (3, 1)
    assert source.completed == [["a"], ["b"]]


@pytest.mark.parametrize("error", [InvalidRequest("unknown field `next`"), Unavailable("taskd is away")])
def test_a_report_that_is_refused_or_fails_goes_anew(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_session, "_ASKS_NOT_FOR", 60.0)
    source, worker = Bringing("a", "b"), worker_of()
    source.error = error
    work(worker, source, lambda: worker.stats.completed == 2)
    assert len(source.asked) == 1
    assert sorted(key for keys in source.completed for key in keys) == ["a", "b"]


def test_tasks_that_come_with_the_stop_go_back_at_no_cost() -> None:
    source, worker = Bringing("a", "b"), worker_of()
    source.may_answer.clear()

    async def run() -> None:
        serving = asyncio.create_task(worker.serve(source))
        async with asyncio.timeout(60):
            while not source.asked:
                await asyncio.sleep(0)
            worker.stop()
            source.may_answer.set()
            await serving

    asyncio.run(run())
    assert source.completed == []
    assert [(one.lease.id, one.not_started, one.delay) for one in source.rejected] == [("b", True, 0.0)]
    assert (worker.stats.completed, worker.stats.returned, worker.stats.lost) == (1, 1, 0)


def test_taskd_answers_a_report_with_tasks(taskd: Taskd, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = 0
    get = GrpcSource.get

    async def counted(source: GrpcSource, max_tasks: int) -> Sequence[Lease]:
        nonlocal polls
        polls += 1
        return await get(source, max_tasks)

    monkeypatch.setattr(GrpcSource, "get", counted)
    monkeypatch.setattr(_reports, "_ASKS_FOR", 60.0)
    worker = Worker(taskd.address, queue=queue, concurrency=1, stream=False)

    @worker.handler
    async def handle(task: Task[None]) -> None:
        pass

    with Client(taskd.address) as client:
        ids = [client.insert(queue, str(n)).id for n in range(60)]
        with Background(worker):
            until(lambda: worker.stats.completed == 60, "all is done")
        assert all(client.get_task(one).attempts == 0 for one in ids)
    assert polls < 10
    assert (worker.stats.got, worker.stats.completed, worker.stats.lost) == (60, 60, 0)
