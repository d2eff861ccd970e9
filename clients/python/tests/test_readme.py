"""The examples of the README run as they stand."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import ROOT, Background, Program, Taskd, until

import taskd_client as taskd_package
from taskd_client.testing import MockSource

README = (ROOT / "clients" / "python" / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def example(text: str) -> str:
    (found,) = [code for code in EXAMPLES if text in code]
    return str(found)


def test_the_worker_and_its_tests() -> None:
    names: dict[str, Any] = {"asyncio": asyncio}
    worker = example("worker.run()")
    assert len([line for line in worker.splitlines() if line]) <= 10
    exec(worker.replace("worker.run()", ""), names)
    exec(example("MockSource()"), names)
    names["test_a_page"]()
    names["test_a_crawl"]()


def test_the_worker_of_the_documents() -> None:
    (code,) = re.findall(r"```python\n(from taskd_client.*?)```", (ROOT / "docs" / "workers.md").read_text(), re.DOTALL)
    assert code == example("worker.run()")
    names: dict[str, Any] = {}
    exec(code.replace("worker.run()", ""), names)
    source = MockSource()
    source.insert("demo", "root", payload={"depth": 2})
    source.insert("demo", "without a payload")
    source.run(names["worker"])
    assert source.result("root/1/0") == source.result("without a payload") == "done"
    assert len(source.discovered) == 6


def test_a_worker_says_where_it_takes_tasks(taskd: Taskd, program: Callable[..., Program], tmp_path: Path) -> None:
    code = example("worker.run()").replace("127.0.0.1:7601", taskd.address)
    logs = "import logging; logging.basicConfig(level=logging.INFO)\n"
    for name, text in (("plain.py", code), ("logs.py", logs + code)):
        (tmp_path / name).write_text(text)
        worker = program(str(tmp_path / name))
        worker.says(f" takes tasks of demo from {taskd.address}\n")
        assert worker.said().count("takes tasks of") == 1


def test_the_typed_worker() -> None:
    names: dict[str, Any] = {
        "dataclass": dataclasses.dataclass,
        "Task": taskd_package.Task,
        "worker": taskd_package.Worker(queue="q"),
    }
    exec(example("class Page"), names)
    exec(example("def shrink"), names)
    assert names["worker"].queues == ["q", "images"]


def test_the_polite_handler() -> None:
    busy = SimpleNamespace(status_code=429, headers={"retry-after": "7"})
    answers = iter([busy, SimpleNamespace(status_code=200, headers={})])
    worker = taskd_package.Worker(queue="q")
    names: dict[str, Any] = {
        "requests": SimpleNamespace(get=lambda _: next(answers)),
        "worker": worker,
        "PutOff": taskd_package.PutOff,
    }
    exec(example("429"), names)
    source = MockSource(max_attempts=1)
    source.insert("q", "https://example.org/", limit_key="example.org")
    source.run(worker)
    task = source.task("https://example.org/")
    assert (task.result, task.put_off, [limit.hold for limit in task.limits]) == (200, 1, [7])


def test_results_and_watches(taskd: Taskd) -> None:
    names: dict[str, Any] = {}
    code = example("async def render").replace("127.0.0.1:7601", taskd.address)
    exec(code, names)
    watched = threading.Event()
    # With a wait that is over before the task is.
    slow: dict[str, Any] = {"print": lambda *_: watched.set()}
    exec(code.replace("wait=120", "wait=0", 1), slow)
    worker = taskd_package.Worker(taskd.address, queue="render")

    @worker.handler
    def render(task: taskd_package.Task[Any]) -> bytes:
        assert not task.key.endswith("slow") or watched.wait(60)
        return task.key.encode()

    async def run() -> bytes:
        reporting = asyncio.create_task(names["report"]())
        result: bytes = await names["render"]("https://example.com/")
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        return result

    with Background(worker):
        assert asyncio.run(run()) == b"https://example.com/"
        assert asyncio.run(slow["render"]("https://example.com/slow")) == b"https://example.com/slow"


def test_the_client(taskd: Taskd, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "urls.txt").write_text("https://example.com/\nhttps://example.com/a\n")
    monkeypatch.chdir(tmp_path)
    code = example("insert_many").replace("127.0.0.1:7601", taskd.address)
    # Nobody works here.
    names: dict[str, Any] = {}
    exec(re.sub(r".*client.wait.*\n", "", code), names)
    names["lines"].close()
    assert (names["counts"].created, names["counts"].duplicates) == (1, 1)


def without_a_library(page: str, taskd: Taskd, queue: str, folder: Path) -> str:
    """A file with the worker of a page that needs no library, for this taskd and this queue."""
    (code,) = re.findall(r"```python\n(import json, urllib.*?)```", (ROOT / page).read_text(), re.DOTALL)
    file = folder / "worker.py"
    file.write_text(code.replace("127.0.0.1:7600", f"127.0.0.1:{taskd.http}").replace('"demo"', f'"{queue}"'))
    return str(file)


def test_the_worker_in_ten_lines(taskd: Taskd, queue: str, program: Callable[..., Program], tmp_path: Path) -> None:
    worker = program(without_a_library("README.md", taskd, queue, tmp_path))
    with taskd_package.Client(taskd.address) as client:
        client.insert(queue, "root", payload={"depth": 2})
    until(lambda: worker.said().count("\n") >= 7, "it has done seven tasks")
    children = [f"root/{n}" for n in (0, 1)]
    keys = ["root", *children, *(f"{child}/{n}" for child in children for n in (0, 1))]
    assert sorted(worker.said().splitlines()) == sorted(f"{key} OK" for key in keys)


def test_a_worker_without_a_library(taskd: Taskd, queue: str, program: Callable[..., Program], tmp_path: Path) -> None:
    worker = program(without_a_library("docs/workers.md", taskd, queue, tmp_path))
    with taskd_package.Client(taskd.address) as client:
        task = client.insert(queue, "k", payload=[1])
    assert taskd.results(task.id)[0]["result"] == {"payload": [1]}
    worker.says("'status': 'OK'")
