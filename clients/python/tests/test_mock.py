"""Handlers without a server: the mock source, and typed payloads."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import logging
import math
import typing
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict
from uuid import UUID

import pytest

from taskd_client import Encoding, InvalidRequest, Limit, PayloadError, PutOff, Reject, Retry, Task, Worker
from taskd_client._codec import encode
from taskd_client._threads import _run
from taskd_client._typed import payload_reader
from taskd_client.logs import JsonFormatter, TaskFields
from taskd_client.source import Lease
from taskd_client.testing import MockSource, make_task


def test_a_crawl_without_a_server() -> None:
    worker = Worker(queue="pages")

    @worker.handler
    async def fetch(task: Task[dict[str, int]]) -> dict[str, int]:
        depth = task.payload["depth"]
        if depth:
            task.discover(f"{task.key}a", payload={"depth": depth - 1})
            task.discover("/", payload={"depth": 9})
            task.discover("elsewhere", queue="images")
        return {"left": depth}

    source = MockSource()
    assert source.insert("pages", "/", payload={"depth": 2})
    assert not source.insert("pages", "/")
    source.run(worker)
    assert source.discovered == ["/a", "elsewhere", "/aa"]
    assert [source.result(key) for key in ("/", "/a", "/aa")] == [{"left": 2}, {"left": 1}, {"left": 0}]
    # Nobody has asked for this queue.
    assert source.task("elsewhere").status == "QUEUED"
    # The handler itself is a function still.
    with pytest.raises(KeyError):
        source.result("none")


def test_failures_and_attempts_without_a_server() -> None:
    worker = Worker(queue="q")

    @worker.handler
    def work(task: Task[Any]) -> int:
        match task.key:
            case "never":
                raise Reject("never")
            case "third" if task.attempt < 3:
                raise Retry("not yet", after=3600)
            case "always":
                raise ValueError("always")
        return task.attempt

    source = MockSource(max_attempts=4)
    for key in ("never", "third", "always"):
        source.insert("q", key)
    source.run(worker)
    assert source.task("never").reasons == ["never"]
    assert source.result("third") == 3
    assert source.task("always").reasons == ["ValueError: always"] * 4
    with pytest.raises(AssertionError, match="'always' is DEAD"):
        source.result("always")
    # A source and a worker run again.
    source.insert("q", "late")
    source.run(worker)
    assert source.result("late") == 1


def test_a_mock_counts_how_often_a_task_is_put_off() -> None:
    worker = Worker(queue="q")

    @worker.handler
    def work(task: Task[Any]) -> int:
        if task.key == "always" or source.task(task.key).put_off < 2:
            raise PutOff("busy", after=3600)
        return task.attempt

    source = MockSource(max_attempts=1)
    source.insert("q", "twice")
    source.insert("q", "always")
    source.run(worker)
    assert (source.result("twice"), source.task("twice").put_off) == (1, 2)
    assert (source.task("always").status, source.task("always").reasons) == ("DELAYED", [])


def test_a_handler_in_a_process_reports_of_its_limit_key() -> None:
    def work(task: Task[Any]) -> None:
        task.hold(5)
        if task.key == "fails":
            raise Retry

    for key in ("works", "fails"):
        lease = Lease(
            id=key, queue="q", key=key.encode(), payload=b"", encoding=Encoding.UNSPECIFIED, token="t", limit_key="site"
        )
        outcome, _ = _run(work, None, lease, "w")
        assert outcome.limit == Limit(hold=5)


def test_a_handler_that_runs_for_long_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(queue="q", lease=1)

    @worker.handler
    async def work(_: Task[Any]) -> None:
        async with asyncio.timeout(60):
            while caplog.text.count("the handler still runs, after") < 2:
                await asyncio.sleep(0.01)

    source = MockSource(max_attempts=1)
    source.insert("q", "slow")
    source.run(worker)
    assert source.result("slow") is None
    assert "(key 'slow', task " in caplog.text


def test_a_handler_is_a_function() -> None:
    worker = Worker(queue="q")

    @worker.handler(timeout=5)
    def double(task: Task[int]) -> int:
        task.discover("found", payload={"n": 1})
        task.discover("output", port="link")
        return 2 * task.payload

    task = make_task(21, key="k", headers={"a": "b"})
    assert double(task) == 42
    outputs = [(found.queue, found.port, found.key) for found in task.discovered]
    assert outputs == [(task.queue, "", b"found"), ("", "link", b"output")]


def test_wrong_handlers_fail_when_they_are_registered() -> None:
    worker = Worker(queue="q")

    def generator(task: Task[Any]) -> Any:
        yield 1

    def none() -> None: ...

    def two(task: Task[Any], other: int) -> None: ...

    class Opaque:
        pass

    def opaque(task: Task[Opaque]) -> None: ...

    def payload(task: dict[str, int]) -> None: ...

    for function, said in [
        (generator, "has a `yield`"),
        (none, "shall have one parameter"),
        (two, "shall have one parameter"),
        (payload, r"annotate it with Task\[…\]"),
        (3, "a handler is a function"),
    ]:
        with pytest.raises(TypeError, match=said):
            worker.handler(function)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"is not defined where the handler is|is no type that a payload can be read"):
        worker.handler(opaque)
    worker.handler(partial(two, other=1))
    with pytest.raises(ValueError, match="there is a handler for all queues already"):
        worker.handler(partial(two, other=2))
    with pytest.raises(InvalidRequest, match="is a function of a module, by its name"):
        in_processes = Worker(queue="q", processes=1)
        in_processes.handler(lambda task: None)
        MockSource().run(in_processes)
    with pytest.raises(InvalidRequest, match=r"there is no handler; write @worker.handler"):
        MockSource().run(Worker(queue="q"))
    for wrong in ({"concurrency": 0}, {"prefetch": -1}, {"lease": -1}):
        with pytest.raises(ValueError):
            Worker(queue="q", **wrong)  # type: ignore[arg-type]


class Colour(enum.Enum):
    RED = "red"


class Link(TypedDict):
    url: str
    text: NotRequired[str]


Metres = NewType("Metres", float)


@dataclasses.dataclass
class Node:
    name: str
    children: list[Node] = dataclasses.field(default_factory=list)
    at: datetime | None = None


@dataclasses.dataclass
class Everything:
    colour: Colour
    links: list[Link]
    sizes: dict[str, Metres]
    pair: tuple[int, str]
    tags: set[str]
    kind: Literal["a", "b"]
    id: UUID
    path: Path
    tree: Node
    note: Annotated[str, "anything"] | None = None
    rest: Any = None
    flag: bool = False


def read(kind: Any, value: Any) -> Any:
    raw, encoding = encode(value)
    return payload_reader(kind)(raw, encoding)


def test_a_dataclass_comes_back_as_it_went() -> None:
    value = Everything(
        colour=Colour.RED,
        links=[{"url": "u"}, {"url": "v", "text": "t"}],
        sizes={"a": Metres(1.5)},
        pair=(1, "x"),
        tags={"t"},
        kind="b",
        id=UUID(int=7),
        path=Path("/a/b"),
        tree=Node("root", [Node("leaf", at=datetime(2026, 1, 2, tzinfo=UTC))]),
        rest=[1, {"a": None}],
        flag=True,
    )
    assert read(Everything, value) == value


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, "x", "no JSON"),
        (int, [1], "payload is a list; int is expected"),
        (int, True, "payload is a bool; int is expected"),
        (list[int], [1, "b"], r"payload\[1\] is a str; int is expected"),
        (Node, {"children": []}, "payload.name is missing"),
        (Node, {"name": "a", "children": [{"name": 1}]}, r"payload.children\[0\].name is a int; str is expected"),
        (Node, {"name": "a", "at": "noon"}, "payload.at is no datetime"),
        (Link, {}, "payload.url is missing"),
        (Link, {"url": None}, "payload.url is missing; str is expected"),
        (Literal["a"], "b", "no JSON"),
        (Literal[1], True, "payload is True; one of 1 is expected"),
        (Literal[0, 1], 1.0, "payload is 1.0; one of 0, 1 is expected"),
        (tuple[()], [1], "payload has 1 items; 0 are expected"),
        (float, b"1e400", "payload is larger than a float"),
        (float, 10**400, "payload is larger than a float"),
        (dict[int, str], {"one": "x"}, "a key of payload is no int"),
        (dict[str, int], {"a": None}, "payload.a is missing; int is expected"),
        (tuple[int, int], [1], "payload has 1 items; 2 are expected"),
        (int | None, {}, "int is expected; .*null is expected"),
        (str, [1], "payload is a list; str is expected"),
        (str, b"\xff", "payload is no str"),
    ],
)
def test_a_payload_that_does_not_fit_says_where(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        read(kind, value)


def test_payloads_of_simple_types() -> None:
    assert read(tuple[()], []) == ()
    assert read(typing.Sequence, [1, "a"]) == [1, "a"]
    assert read(typing.Mapping, {"a": 1}) == {"a": 1}
    assert read(dict[int, str], {1: "x"}) == {1: "x"}
    assert read(Literal[1, True], True) is True
    assert read(bytes, "text") == b"text"
    assert read(str, "text") == "text"
    assert read(str, b"text") == "text"
    assert read(str, None) == ""
    assert read(float, 3) == 3.0
    assert read(Any, None) is None
    assert read(int | None, None) is None
    # From a program that knows no encodings.
    assert payload_reader(Node)(b'{"name": "a", "newer": 1}', Encoding.BYTES) == Node("a")


class Model:
    """The part of a pydantic model that the package uses."""

    def __init__(self, n: int) -> None:
        self.n = n

    @classmethod
    def model_validate_json(cls, raw: bytes) -> Model:
        return cls.model_validate(json.loads(raw))

    @classmethod
    def model_validate(cls, value: Any) -> Model:
        if not isinstance(value.get("n"), int):
            raise ValueError("n: a number is wanted")  # noqa: TRY004
        return cls(value["n"])

    def model_dump(self, mode: str) -> dict[str, int]:
        assert mode == "json"
        return {"n": self.n}


def test_pydantic_models_and_decoders() -> None:
    assert read(Model, Model(3)).n == 3
    assert [one.n for one in read(list[Model], [Model(3)])] == [3]
    with pytest.raises(PayloadError, match="payload is no Model: n: a number is wanted"):
        read(Model, {"n": "x"})
    worker = Worker(queue="q")

    @worker.handler(decode=lambda raw: raw.decode().split(","))
    async def split(task: Task[Any]) -> int:
        return len(task.payload)

    source = MockSource()
    source.insert("q", "good", payload="a,b,c")
    source.insert("q", "bad", payload=b"\xff")
    source.run(worker)
    assert source.result("good") == 3
    assert source.task("bad").reasons[0].startswith("the payload cannot be decoded: ")


def test_log_lines_name_their_task(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(queue="q")
    log = logging.getLogger("app")
    fields = TaskFields()
    caplog.handler.addFilter(fields)

    @worker.handler
    def work(task: Task[Any]) -> None:
        log.warning("at work on %s", "it", extra={"colour": "red"})
        raise ValueError("boom")

    source = MockSource(max_attempts=1)
    source.insert("q", "k")
    source.run(worker)
    caplog.handler.removeFilter(fields)
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    task_id = source.task("k").id
    mine = next(line for line in lines if line["logger"] == "app")
    assert (mine["message"], mine["task_id"], mine["key"], mine["colour"]) == ("at work on it", task_id, "k", "red")
    failure = next(line for line in lines if line["message"].startswith("the handler failed: ValueError: boom"))
    assert (failure["task_id"], failure["level"]) == (task_id, "ERROR")
    assert "ValueError: boom" in failure["exception"]


class Wordless(Exception):
    def __str__(self) -> str:
        raise SystemExit("even its text is an error")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Reject(ValueError("no page")), "ValueError: no page"),  # type: ignore[arg-type]
        (Reject(404), "404"),  # type: ignore[arg-type]
        (Retry({"why": 1}), "{'why': 1}"),  # type: ignore[arg-type]
        (Wordless(), "Wordless"),
        (GeneratorExit(), "the worker failed: GeneratorExit"),
    ],
)
def test_whatever_a_handler_raises_ends_its_task(error: BaseException, said: str) -> None:
    """A task without a report would keep its lease for ever."""
    worker = Worker(queue="q")

    @worker.handler
    async def work(task: Task[Any]) -> None:
        if task.key == "odd":
            raise error

    source = MockSource(max_attempts=1)
    source.insert("q", "odd")
    source.insert("q", "other")
    source.run(worker)
    assert (source.task("odd").status, source.task("odd").reasons) == ("DEAD", [said])
    assert source.task("other").status == "COMPLETED"


def test_an_error_of_the_logs_does_not_keep_a_task() -> None:
    worker = Worker(queue="q")

    @worker.handler
    async def work(task: Task[Any]) -> None:
        raise ValueError("no")

    def refuse(record: logging.LogRecord) -> bool:
        if "the handler failed" in record.getMessage():
            raise OSError("the disk is full")
        return True

    source = MockSource(max_attempts=1)
    source.insert("q", "k")
    logger = logging.getLogger("taskd.worker")
    logger.addFilter(refuse)
    try:
        source.run(worker)
    finally:
        logger.removeFilter(refuse)
    assert source.task("k").reasons == ["the worker failed: OSError: the disk is full"]


@pytest.mark.parametrize("is_async", [True, False])
def test_hooks_run_around_the_handler(is_async: bool) -> None:
    source = MockSource()
    source.insert("q", "a")
    source.insert("q", "fails")
    said: list[str] = []
    worker = Worker(queue="q", concurrency=1)

    async def outer(task: Task[Any], call: Callable[[], Awaitable[Any]]) -> Any:
        said.append(f"outer before {task.key}")
        try:
            return f"<{await call()}>"
        except ValueError as error:
            return f"mended: {error}"

    async def inner(task: Task[Any], call: Callable[[], Awaitable[Any]]) -> Any:
        said.append(f"inner before {task.key}")
        try:
            return await call()
        finally:
            said.append("inner after")

    worker.around(outer)
    worker.around(inner)

    def work(task: Task[Any]) -> str:
        said.append("the handler")
        if task.key == "fails":
            raise ValueError("no such page")
        return "done"

    async def work_async(task: Task[Any]) -> str:
        return work(task)

    worker.handler(work_async if is_async else work)
    source.run(worker)
    assert said[:4] == ["outer before a", "inner before a", "the handler", "inner after"]
    assert (source.result("a"), source.result("fails")) == ("<done>", "mended: no such page")


def test_hooks_have_rules() -> None:
    worker = Worker(queue="q", processes=1)
    with pytest.raises(TypeError, match="a hook is an async function"):
        worker.around(lambda task, call: None)

    @worker.around
    async def hook(task: Task[Any], call: Callable[[], Awaitable[Any]]) -> Any:
        return await call()

    worker.handler(math.sqrt)
    with pytest.raises(InvalidRequest, match="a worker with `processes` has no hooks"):
        MockSource().run(worker)
