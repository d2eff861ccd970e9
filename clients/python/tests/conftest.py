"""Real taskd processes for the tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from taskd_client import Worker

# taskd refuses variables that it does not know, and a test must not take the settings of its caller.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TASKD_")}
ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def host_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of two processes at a time have workers of the same queues."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{os.getpid()}")


def free_port() -> int:
    """A port below those of outgoing connections: what was killed comes back on the same one."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(condition: Callable[[], Any], what: str, limit: float = 60.0) -> Any:
    """Waits until the condition is true, and returns its value."""
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {limit:g} s: {what}"
        time.sleep(0.02)
    return value


class Taskd:
    """A taskd with a folder and ports of its own."""

    def __init__(self, config: str = "") -> None:
        binary = os.environ.get("TASKD_BIN")
        assert binary, "TASKD_BIN names no taskd; scripts/check-python sets it"
        self.binary = binary
        # A short name: the socket of the embedded Redis is in it.
        self.folder = Path(tempfile.mkdtemp(prefix="taskd-py-"))
        self.http, grpc = free_port(), free_port()
        self.address = f"127.0.0.1:{grpc}"
        self.config = self.folder / "taskd.toml"
        self.config.write_text(config)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Taskd:
        command = [self.binary, "--pipelines", "all", "--config", str(self.config)]
        command += ["--data-dir", str(self.folder / "data")]
        command += ["--http-listen", f"127.0.0.1:{self.http}", "--grpc-listen", self.address]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
        until(self._is_ready, f"taskd is ready; its log is {self.folder / 'log'}")
        return self

    def _is_ready(self) -> bool:
        assert self.process
        code = self.process.poll()
        assert code is None, f"taskd ended with {code}:\n{(self.folder / 'log').read_text()[-2000:]}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.http), 1):
            if "tls_cert_file" in self.config.read_text():
                return self._listens_for_grpc()
            with contextlib.suppress(urllib.error.HTTPError):
                return bool(self.get("/readyz") is not None)
        return False

    def _listens_for_grpc(self) -> bool:
        host, port = self.address.split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return True
        return False

    def get(self, path: str) -> Any:
        """The answer of a route: JSON as its value, else text."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=10) as answer:
            text = answer.read().decode()
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text

    def results(self, task_id: str) -> list[dict[str, Any]]:
        """The results of a completed task: one for each credited worker. SQL has them a moment after Redis."""
        found: list[dict[str, Any]] = until(
            lambda: self.get(f"/v1/tasks/{task_id}/results")["results"], "the results are stored"
        )
        return found

    def command(self, *args: str) -> str:
        command = [self.binary, *args, "--data-dir", str(self.folder / "data")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=ENVIRONMENT)
        return done.stdout.strip()

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def remove(self) -> None:
        self.stop()
        self._end_redis()
        shutil.rmtree(self.folder)

    def _end_redis(self) -> None:
        """A taskd that was killed and not started again leaves its redis-server behind."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder / "data" / "redis.pid").read_text())
            # An old file may name a process that is now somebody else's.
            if Path(f"/proc/{pid}/comm").read_text().strip() == "redis-server":
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def shared_taskd() -> Iterator[Taskd]:
    taskd = Taskd()
    try:
        yield taskd.start()
    finally:
        taskd.remove()


@pytest.fixture
def taskd(shared_taskd: Taskd) -> Taskd:
    """The taskd of all tests that neither kill nor configure it."""
    return shared_taskd


@pytest.fixture
def new_taskd() -> Iterator[Callable[..., Taskd]]:
    """Makes a taskd of one test."""
    made: list[Taskd] = []

    def make(config: str = "") -> Taskd:
        made.append(Taskd(config))
        return made[-1].start()

    yield make
    for one in made:
        one.remove()


@pytest.fixture
def queue() -> str:
    """A name that no other test has."""
    return f"q-{uuid4().hex[:12]}"


class Background:
    """A worker on a thread of its own."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            asyncio.run(self.worker.serve())
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error:
            raise self.error


class Proxy:
    """Forwards connections to taskd until it is cut or frozen."""

    def __init__(self, address: str) -> None:
        self._target = address.split(":")
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self.connections = 0
        self._frozen: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection((self._target[0], int(self._target[1])))
                for one in (near, far):
                    # Small frames would wait for each other.
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [near, far]
                self.connections += 1
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if one not in self._frozen:
                    other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def freeze(self) -> None:
        """Forwards nothing more of the connections that there are. Nobody hears of it."""
        self._frozen.update(self._sockets)

    def cut(self) -> None:
        for one in [self._server, *self._sockets]:
            # A thread that waits in the socket learns it from the shutdown.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class Program:
    """A worker in a process of its own: a file of tests/programs."""

    def __init__(self, name: str, *args: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, str(PROGRAMS / name), *args]
        # A file and no pipe: nobody reads while the test waits.
        self.output = Path(tempfile.mkstemp(prefix="taskd-py-out-")[1])
        with self.output.open("wb") as output:
            # Workers of other tests, whose queues have the same names, run on this machine, too.
            own_name = {"TASKD_WORKER": f"w-{uuid.uuid4()}"}
            environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"} | own_name | (env or {})
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def said(self) -> str:
        return self.output.read_text()

    def says(self, text: str) -> None:
        until(lambda: text in self.said() or self.process.poll() is not None, f"{text!r} in {self.said()!r}")
        assert text in self.said(), self.said()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(60)

    def remove(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.output.unlink()


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(name: str, *args: str, env: dict[str, str] | None = None) -> Program:
        started.append(Program(name, *args, env=env))
        return started[-1]

    yield start
    for one in started:
        one.remove()
