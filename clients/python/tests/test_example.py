"""examples/crawl.py on a site made for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
from conftest import ROOT, Taskd, until

from taskd_client import Client, TaskStatus

PAGES = {
    "/site/": '<title>Start</title><a href="a.html">a</a><a href="b.html#top">b</a><a href="/outside">no</a>',
    "/site/a.html": '<title>A</title><a href="b.html">b</a><a href="./">start</a><a href="missing.html">gone</a>',
    "/site/b.html": '<title>B</title><a href="deep/c.html">c</a><a href="busy.html">busy</a>',
    "/site/deep/c.html": '<title>C</title><a href="../a.html">a</a><a href="http://other.test/site/">no</a>',
    "/site/busy.html": "<title>Busy</title>",
}


@dataclass
class Site:
    url: str
    visits: Counter[str] = field(default_factory=Counter)
    """How often each page was asked for."""
    requests: list[tuple[str, float, float]] = field(default_factory=list)
    """Those of pages: the path, when it began, and when it was answered."""


@contextmanager
def made_site(robots: str = "", busy: int = 503, retry_after: str = "") -> Iterator[Site]:
    """A site whose page `busy` fails at its first visit."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            began = time.monotonic()
            is_page = self.path != "/robots.txt"
            if is_page:
                made.visits[self.path] += 1
            body = (PAGES.get(self.path, "") if is_page else robots).encode()
            is_busy = self.path.endswith("busy.html") and made.visits[self.path] == 1
            self.send_response(busy if is_busy else 200 if body else 404)
            if is_busy and retry_after:
                self.send_header("retry-after", retry_after)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if is_page:
                made.requests.append((self.path, began, time.monotonic()))
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Site(f"http://127.0.0.1:{server.server_port}/site/")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    with made_site() as made:
        yield made


def crawl_by_two(taskd: Taskd, queue: str, url: str) -> list[str]:
    """Crawls the site by two programs, and returns what they say."""
    command = [sys.executable, str(ROOT / "examples" / "crawl.py"), url, "--address", taskd.address, "--queue", queue]
    names = [{**os.environ, "TASKD_WORKER": f"{queue}-{n}"} for n in range(2)]
    crawlers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for env in names]
    said = [crawler.communicate(timeout=90)[0] for crawler in crawlers]
    assert [crawler.returncode for crawler in crawlers] == [0, 0], said
    assert sum(int(line.split(" pages")[0]) for line in said) == len(PAGES)
    return said


def test_two_crawlers_fetch_each_page_once(taskd: Taskd, queue: str, site: Site) -> None:
    crawl_by_two(taskd, queue, site.url)
    assert site.visits == {path: 2 if "busy" in path else 1 for path in [*PAGES, "/site/missing.html"]}
    with Client(taskd.address) as client:
        ids = {task.key.removeprefix(site.url): task.id for task in client.list_tasks(queue)}
        until(lambda: client.get_task(ids["missing.html"]).history, "the rejection is stored")
        tasks = {name: client.get_task(one) for name, one in ids.items()}
    assert tasks["missing.html"].status is TaskStatus.DEAD
    assert tasks["missing.html"].history[0].reason == "the site answers 404"
    assert taskd.results(tasks["deep/c.html"].id)[0]["result"] == {
        "status": 200,
        "title": "C",
        "bytes": len(PAGES["/site/deep/c.html"]),
        "links": 2,
    }


def test_two_crawlers_keep_what_the_site_asks_for(new_taskd: Callable[..., Taskd], queue: str) -> None:
    taskd = new_taskd('[queues.default]\nlimit_by = "host"\nlimit_at_a_time = 1\nmax_attempts = 1\n')
    robots = "User-agent: *\nCrawl-delay: 1\nDisallow: /site/missing.html\n"
    with made_site(robots, busy=429, retry_after="3") as made:
        crawl_by_two(taskd, queue, made.url)
    assert made.visits == {path: 2 if "busy" in path else 1 for path in PAGES}
    # One page at a time, so none was under way when `busy` was answered.
    waits = {path: began - answered for (path, _, answered), (_, began, _) in reversed([*pairwise(made.requests)])}
    assert min(waits.values()) >= 0, made.requests
    assert waits["/site/busy.html"] >= 3, made.requests
    with Client(taskd.address) as client:
        ids = [task.id for task in client.list_tasks(queue)]
        until(lambda: all(client.get_task(one).history for one in ids), "the attempts are stored")
        attempts = [attempt for one in ids for attempt in client.get_task(one).history]
    starts = sorted(attempt.started_at for attempt in attempts if attempt.started_at)
    assert len(starts) == len(ids) == len(PAGES) + 1
    # The first page tells of robots.txt.
    assert all((other - one).total_seconds() >= 1 for one, other in pairwise(starts)), starts


def test_each_run_crawls_the_site_again(taskd: Taskd, site: Site) -> None:
    command = [sys.executable, str(ROOT / "examples" / "crawl.py"), site.url, "--address", taskd.address]
    for _ in range(2):
        crawler = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
        assert crawler.stdout.startswith(f"{len(PAGES)} pages, "), crawler
        # A site that is in trouble is no mistake of the program.
        assert "Traceback" not in crawler.stderr
        assert f"crawling {site.url} in the queue crawl-" in crawler.stderr
    assert site.visits["/site/"] == 2
