"""Kills, stops and wrong connections."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import Background, Program, Proxy, Taskd, free_port, until

from taskd_client import (
    TLS,
    AsyncClient,
    Client,
    InvalidRequest,
    NewTask,
    PermissionDenied,
    Task,
    TaskdError,
    TaskStatus,
    Unauthenticated,
    Unavailable,
    Worker,
)

MakeTaskd = Callable[..., Taskd]
Start = Callable[..., Program]


@pytest.mark.parametrize("stream", [True, False])
def test_kills_of_taskd_lose_and_repeat_nothing(new_taskd: MakeTaskd, stream: bool) -> None:
    taskd = new_taskd()
    worker = Worker(taskd.address, queue="q", lease=2, concurrency=4, wait=2, stream=stream)

    @worker.handler
    async def work(task: Task[int]) -> int:
        await asyncio.sleep(0.01)
        return task.payload

    count = 240
    with Client(taskd.address) as client:
        inserted = list(client.insert_each(NewTask(queue="q", key=str(n), payload=n) for n in range(count)))
        with Background(worker):
            for done in (count // 8, count // 4):
                until(lambda done=done: worker.stats.completed >= done, "the worker works")  # type: ignore[misc]
                taskd.kill()
                taskd.start()
            for one in inserted:
                assert client.wait(one.id, timeout=60).status is TaskStatus.COMPLETED
    for n, one in enumerate(inserted):
        results = taskd.results(one.id)
        assert [(each["result"], each.get("surplus", False)) for each in results] == [(n, False)], results


def test_a_worker_that_is_killed_loses_nothing(taskd: Taskd, queue: str, program: Start, tmp_path: Path) -> None:
    with Client(taskd.address) as client:
        ids = [client.insert(queue, key).id for key in ("a", "b")]
        killed = program("slow.py", taskd.address, queue, str(tmp_path), "1")
        killed.says("began a")
        killed.signal(signal.SIGKILL)
        killed.wait()
        second = Worker(taskd.address, queue=queue, lease=2)
        second.handler(lambda task: task.worker)
        with Background(second):
            for one in ids:
                assert client.wait(one, timeout=60).status is TaskStatus.COMPLETED
    for one in ids:
        assert [each["worker"] for each in taskd.results(one)] == [second.name]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_finishes_what_began_and_gives_back_the_rest(
    taskd: Taskd, queue: str, program: Start, tmp_path: Path, stream: bool
) -> None:
    with Client(taskd.address) as client:
        ids = [client.insert(queue, key).id for key in ("a", "b", "c")]
        worker = program("slow.py", taskd.address, queue, str(tmp_path), "5", "30", *(() if stream else ("polls",)))
        worker.says("began a")
        until(lambda: client.get_task(ids[2]).leased, "it has fetched the others")
        worker.signal(signal.SIGTERM)
        worker.says("stopping: 1 handlers are at work")
        # Another worker gets the others while the handler goes on.
        second = Worker(taskd.address, queue=queue, lease=2)
        second.handler(lambda task: task.worker)
        with Background(second):
            for one in ids[1:]:
                assert client.wait(one, timeout=60).status is TaskStatus.COMPLETED
            assert client.get_task(ids[0]).leased == 1
            (tmp_path / "a").touch()
            assert client.wait(ids[0], timeout=60).status is TaskStatus.COMPLETED
        assert worker.wait() == 0
        tasks = [client.get_task(one) for one in ids]
    # What went back has cost nothing.
    assert "the end Stats(got=3, completed=1, rejected=0, lost=0, returned=2" in worker.said()
    assert [task.attempts for task in tasks] == [0, 0, 0]
    assert [each["worker"] for each in taskd.results(ids[0])] == [f"slow-{queue}"]
    assert worker.said().count("began") == 1


def test_a_second_signal_cancels_the_handlers(taskd: Taskd, queue: str, program: Start, tmp_path: Path) -> None:
    with Client(taskd.address) as client:
        task = client.insert(queue, "a")
        worker = program("slow.py", taskd.address, queue, str(tmp_path))
        worker.says("began a")
        worker.signal(signal.SIGINT)
        worker.says("stopping: 1 handlers are at work")
        worker.signal(signal.SIGINT)
        assert worker.wait() == 0
        history = until(lambda: client.get_task(task.id).history, "the rejection is stored")
    assert [(one.state, one.reason) for one in history] == [("REJECTED", "the worker stopped")]
    assert "the end" in worker.said()


def test_handlers_in_processes(taskd: Taskd, queue: str, program: Start) -> None:
    with Client(taskd.address) as client:
        kinds = ["plain", "die", "reject", "discover", "misfit"]
        tasks = {kind: client.insert(queue, kind, payload={"kind": kind}).id for kind in kinds[:4]}
        tasks["misfit"] = client.insert(queue, "misfit", payload={"sort": "x"}).id
        worker = program("processes.py", taskd.address, queue)

        def reasons(kind: str) -> list[str]:
            return [one.reason for one in client.get_task(tasks[kind]).history]

        for one in tasks.values():
            client.wait(one, timeout=60)
        # The death of a process may cost the others an attempt, too. Failures are stored a moment after their effect.
        until(lambda: "as the payload says" in reasons("reject"), "the rejection is stored")
        until(lambda: "payload.kind is missing" in reasons("misfit"), "the rejection is stored")
        until(lambda: "the process of the handler died" in reasons("die"), "the death is stored")
        assert client.get_task(tasks["die"]).status is TaskStatus.COMPLETED
        found = until(lambda: list(client.list_tasks(queue, key="found")), "the task was discovered")
        client.wait(found[0].id, timeout=60)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    parent = worker.process.pid
    assert f"at {parent}\n" in worker.said()
    for kind, why in [("reject", "as the payload says"), ("die", "the process of the handler died")]:
        assert f"rejected: {why} (key '{kind}', task {tasks[kind]})" in worker.said()
    assert taskd.results(tasks["plain"])[0]["result"]["pid"] != parent


def test_an_error_that_cannot_be_pickled_costs_only_its_own_task(taskd: Taskd, queue: str, program: Start) -> None:
    wrong = ["own", "locked", "silent", "exit"]
    with Client(taskd.address) as client:
        slow = [client.insert(queue, f"slow-{number}", max_attempts=1).id for number in range(4)]
        failed = [client.insert(queue, key, max_attempts=1).id for key in wrong]
        worker = program("raises.py", taskd.address, queue)
        assert [client.wait(one, timeout=60).status for one in slow] == [TaskStatus.COMPLETED] * 4
        assert [client.wait(one, timeout=60).status for one in failed] == [TaskStatus.DEAD] * 4
        reasons = [until(lambda: client.get_task(one).history, "it is stored")[0].reason for one in failed]  # noqa: B023
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert reasons == ["Own: 1", "Locked: locked", "Silent", "SystemExit: over"]
    assert "the process of the handler died" not in worker.said()


def test_the_processes_end_with_their_worker(taskd: Taskd, queue: str, program: Start) -> None:
    with Client(taskd.address) as client:
        worker = program("processes.py", taskd.address, queue)
        task = client.wait(client.insert(queue, "k", payload={"kind": "plain"}).id, timeout=60)
    child = Path(f"/proc/{taskd.results(task.id)[0]['result']['pid']}")
    assert child.exists()
    worker.signal(signal.SIGKILL)
    worker.wait()
    until(lambda: not child.exists() or "zombie" in (child / "status").read_text(), "the process has ended")


def test_a_dead_address_is_passed_over(taskd: Taskd, queue: str) -> None:
    addresses = [f"127.0.0.1:{free_port()}", taskd.address]
    worker = Worker(addresses, queue=queue)
    worker.handler(lambda task: "done")
    with Client(",".join(addresses)) as client, Background(worker):
        assert client.wait(client.insert(queue, "k").id, timeout=60).status is TaskStatus.COMPLETED


@pytest.mark.parametrize("stream", [True, False])
def test_a_worker_moves_to_the_next_address_amid_work(taskd: Taskd, queue: str, stream: bool) -> None:
    first, second = Proxy(taskd.address), Proxy(taskd.address)
    worker = Worker([first.address, second.address], queue=queue, lease=6, concurrency=4, stream=stream)

    @worker.handler
    async def work(task: Task[int]) -> int:
        await asyncio.sleep(0.005)
        return task.payload

    count = 240
    with Client(taskd.address) as client:
        inserted = list(client.insert_each(NewTask(queue=queue, key=str(n), payload=n) for n in range(count)))
        with Background(worker):
            until(lambda: worker.stats.completed >= count // 4, "the worker works")
            assert (first.connections, second.connections) == (1, 0)
            # Reports that are on their way lose their answers, and are sent again.
            first.cut()
            for one in inserted:
                assert client.wait(one.id, timeout=60).status is TaskStatus.COMPLETED
    assert second.connections == 1
    assert (worker.stats.completed, worker.stats.lost) == (count, 0)
    for n, one in enumerate(inserted):
        assert [(each["worker"], each["result"]) for each in taskd.results(one.id)] == [(worker.name, n)]
    second.cut()


def test_a_worker_waits_until_taskd_is_there(new_taskd: MakeTaskd, caplog: pytest.LogCaptureFixture) -> None:
    taskd = new_taskd()
    taskd.kill()
    worker = Worker(taskd.address, queue="q")
    worker.handler(lambda task: "done")
    with caplog.at_level("INFO", "taskd.worker"), Background(worker):
        until(lambda: "taskd is away, trying again" in caplog.text, "the worker says that it waits")
        taskd.start()
        until(lambda: "taskd is back" in caplog.text or _insert_and_wait(taskd), "the worker says that it goes on")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"][1:] == []


def _insert_and_wait(taskd: Taskd) -> bool:
    """A task ends the wait of the worker's call, so that it notices."""
    with Client(taskd.address) as client:
        return client.wait(client.insert("q", "k").id, timeout=60).status is not TaskStatus.COMPLETED


def test_the_http_port_is_named_as_a_mistake(taskd: Taskd) -> None:
    said = r"is this taskd's gRPC port\? 7601 by default"
    with Client(f"127.0.0.1:{taskd.http}", patience=2) as client, pytest.raises(Unavailable, match=said):
        client.insert("q", "k")


def test_a_call_gives_up_after_its_patience() -> None:
    with Client(f"127.0.0.1:{free_port()}", patience=0.3) as client, pytest.raises(Unavailable, match="UNAVAILABLE"):
        client.insert("q", "k")


@pytest.mark.parametrize("stream", [True, False])
def test_calls_keep_to_the_limits_of_taskd(new_taskd: MakeTaskd, stream: bool) -> None:
    taskd = new_taskd("max_items = 2\nmax_session_tasks = 12\n")
    worker = Worker(taskd.address, queue="q", concurrency=5, prefetch=20, lease=4, stream=stream)
    began: set[str] = set()

    async def run() -> None:
        async with AsyncClient(taskd.address) as client:

            @worker.handler
            async def work(task: Task[Any]) -> None:
                began.add(task.key)
                deadlines: set[datetime] = set()
                # Five leases at once are extended, and five reports come at once.
                while len(began) < 5 or (len(began) == 5 and len(deadlines) < 2):
                    info = await client.get_task(task.id)
                    deadlines |= {one.lease_expires_at for one in info.history if one.lease_expires_at}
                    await asyncio.sleep(0.02)

            inserted = await client.insert_batch([NewTask(queue="q", key=str(n)) for n in range(30)])
            serving = asyncio.create_task(worker.serve())
            for one in inserted:
                assert (await client.wait(one.id, timeout=60)).status is TaskStatus.COMPLETED
            worker.stop()
            await serving

    asyncio.run(run())
    assert (worker.stats.completed, worker.stats.rejected, worker.stats.lost) == (30, 0, 0)


def test_tokens(new_taskd: MakeTaskd, program: Start) -> None:
    taskd = new_taskd('auth = "tokens"\n')
    ops = taskd.command("token", "create", "ops", "--roles", "admin").split()[-1]
    work = taskd.command("token", "create", "w1", "--roles", "work", "--worker", "w1", "--queues", "mine").split()[-1]

    def is_known() -> bool:
        with Client(taskd.address, token=work) as client:
            try:
                client.insert("mine", "k")
            except TaskdError as error:
                return isinstance(error, PermissionDenied)
        return True

    # taskd knows a new token within a second.
    until(is_known, "taskd knows the token")

    def worker(**options: Any) -> Worker:
        made = Worker(taskd.address, wait=1, **options)
        made.handler(lambda task: "done")
        return made

    with pytest.raises(Unauthenticated):
        asyncio.run(worker(queue="mine").serve())
    with pytest.raises(Unauthenticated):
        asyncio.run(worker(queue="mine", token="taskd_wrong").serve())
    with pytest.raises(SystemExit, match="UNAUTHENTICATED"):
        worker(queue="mine", token="wrong").run()
    with pytest.raises(PermissionDenied):
        asyncio.run(worker(queue="mine", token=work, name="w2").serve())
    with pytest.raises(PermissionDenied):
        asyncio.run(worker(queue="other", token=work, name="w1").serve())
    with Client(taskd.address, token=work) as client, pytest.raises(PermissionDenied):
        client.insert("mine", "k")
    with Client(taskd.address, token=ops) as client:
        inserted = client.insert("mine", "k")
        with Background(worker(queue="mine", token=work, name="w1")):
            client.wait(inserted.id, timeout=60)
        said = program("slow.py", taskd.address, "mine", "/tmp", env={"TASKD_TOKEN": "wrong"})
        assert said.wait() == 1
        # The worker says first where it takes tasks, and then why it cannot.
        lines = said.said().splitlines()
        assert len(lines) == 2, lines
        assert lines[1].startswith("taskd worker: "), lines


def test_tls(new_taskd: MakeTaskd, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=taskd.test"]
    command += ["-addext", "subjectAltName=DNS:taskd.test", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    taskd = new_taskd(f'tls_cert_file = "{cert}"\ntls_key_file = "{key}"\n')
    tls = TLS(ca=cert, server_name="taskd.test")
    worker = Worker(f"https://{taskd.address}", queue="q", tls=tls)
    worker.handler(lambda task: "done")
    with Client(taskd.address, tls=tls) as client, Background(worker):
        assert client.wait(client.insert("q", "k").id, timeout=60).status is TaskStatus.COMPLETED
    with Client(f"https://{taskd.address}", patience=0.3) as client, pytest.raises(Unavailable):
        client.insert("q", "k")
    said = "if it has TLS, write https:// before the address"
    with Client(taskd.address, patience=2) as client, pytest.raises(Unavailable, match=said):
        client.insert("q", "k")
    with pytest.raises(InvalidRequest, match="none cannot be read: No such file"):
        Client(taskd.address, tls=TLS(ca=tmp_path / "none"))
    with pytest.raises(InvalidRequest, match="cert and key belong together"):
        Worker(taskd.address, tls=TLS(cert=cert))


def test_an_async_client_in_a_loop_of_its_own(taskd: Taskd, queue: str) -> None:
    async def run() -> None:
        async with AsyncClient(taskd.address) as client:
            assert (await client.insert(queue, "k")).is_new

    for _ in range(2):
        asyncio.run(run())
        queue += "x"


def test_a_blocked_loop_is_named(taskd: Taskd, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(taskd.address, queue=queue, lease=3)

    @worker.handler
    async def block(task: Task[Any]) -> None:
        await asyncio.sleep(0.1)
        time.sleep(2.5)

    with Client(taskd.address) as client, Background(worker):
        client.wait(client.insert(queue, "k").id, timeout=60)
        until(lambda: "make the handler a plain function" in caplog.text, "a warning")
