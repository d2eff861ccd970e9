"""The examples of the README run as they stand."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

from conftest import ROOT, Taskd

import taskd
from taskd.testing import MockSource

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
    (code,) = re.findall(r"```python\n(from taskd.*?)```", (ROOT / "docs" / "workers.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("worker.run()", ""), names)
    source = MockSource()
    source.insert("demo", "a", payload=[1])
    source.run(names["worker"])
    assert source.result("a") == {"payload": [1]}
    assert source.task("a/child").queue == "found"


def test_the_typed_worker() -> None:
    names: dict[str, Any] = {"dataclass": dataclasses.dataclass, "Task": taskd.Task, "worker": taskd.Worker(queue="q")}
    exec(example("class Page"), names)
    exec(example("def shrink"), names)
    assert names["worker"].queues == ["q", "images"]


def test_the_client(taskd: Taskd, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "urls.txt").write_text("https://example.com/\nhttps://example.com/a\n")
    monkeypatch.chdir(tmp_path)
    code = example("insert_many").replace("127.0.0.1:7601", taskd.address)
    # Nobody works here.
    names: dict[str, Any] = {}
    exec(re.sub(r".*client.wait.*\n", "", code), names)
    names["lines"].close()
    assert (names["counts"].created, names["counts"].duplicates) == (1, 1)
