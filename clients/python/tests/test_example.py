"""examples/crawl.py on a site made for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


@pytest.fixture
def site() -> Iterator[tuple[str, Counter[str]]]:
    """A site whose page `busy` fails at its first visit, and the visits of each page."""
    visits: Counter[str] = Counter()

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            visits[self.path] += 1
            body = PAGES.get(self.path, "").encode()
            is_busy = self.path.endswith("busy.html") and visits[self.path] == 1
            self.send_response(503 if is_busy else 200 if body else 404)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/site/", visits
    server.shutdown()
    thread.join()
    server.server_close()


def test_two_crawlers_fetch_each_page_once(taskd: Taskd, queue: str, site: tuple[str, Counter[str]]) -> None:
    url, visits = site
    command = [sys.executable, str(ROOT / "examples" / "crawl.py"), url, "--address", taskd.address, "--queue", queue]
    names = [{**os.environ, "TASKD_WORKER": f"{queue}-{n}"} for n in range(2)]
    crawlers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for env in names]
    said = [crawler.communicate(timeout=90)[0] for crawler in crawlers]
    assert [crawler.returncode for crawler in crawlers] == [0, 0], said
    assert sum(int(line.split(" pages")[0]) for line in said) == len(PAGES)
    assert visits == {path: 2 if "busy" in path else 1 for path in [*PAGES, "/site/missing.html"]}
    with Client(taskd.address) as client:
        ids = {task.key.removeprefix(url): task.id for task in client.list_tasks(queue)}
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


def test_each_run_crawls_the_site_again(taskd: Taskd, site: tuple[str, Counter[str]]) -> None:
    url, visits = site
    command = [sys.executable, str(ROOT / "examples" / "crawl.py"), url, "--address", taskd.address]
    for _ in range(2):
        crawler = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
        assert crawler.stdout.startswith(f"{len(PAGES)} pages, "), crawler
        # A site that is in trouble is no mistake of the program.
        assert "Traceback" not in crawler.stderr
        assert f"crawling {url} in the queue crawl-" in crawler.stderr
    assert visits["/site/"] == 2
