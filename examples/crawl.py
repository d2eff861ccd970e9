"""Crawls a site from one URL: a task is a page, its key the page's URL, and it discovers the pages that it links to.

    taskd --pipelines all &
    python3 -m venv venv && venv/bin/pip install ./clients/python
    venv/bin/python3 examples/crawl.py http://127.0.0.1:8000/

Each run has a queue of its own, because a key counts once in a queue, for ever. Start it on as many machines as you
like, with the same --queue: each takes pages until none is left. taskd knows which URLs were seen, tries again what
failed, and counts; so nothing of that is here.

It asks no page that robots.txt forbids. If the queue has limits per host, as in

    [queues.default]
    limit_by = "host"
    limit_at_a_time = 2

all crawlers together keep the Crawl-delay of robots.txt, and the Retry-After of an answer 429 or 503.
"""

import argparse
import asyncio
import contextlib
import functools
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from html.parser import HTMLParser
from http.client import HTTPResponse
from typing import TypedDict
from urllib.parse import urldefrag, urljoin, urlsplit
from urllib.robotparser import RobotFileParser

from taskd_client import AsyncClient, PutOff, Reject, Retry, Task, Worker

AGENT = "taskd-crawl"
# How often a line says how far the crawl is, in seconds.
PROGRESS = 5.0


class Page(TypedDict):
    """The result of a task."""

    status: int
    title: str
    bytes: int
    links: int


class Links(HTMLParser):
    """The title and the links of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.title, self.found, self._in_title = "", set[str](), False
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in_title = tag == "title"
        if tag == "a" and (href := dict(attributes).get("href")):
            self.found.add(href)

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data.strip()


def inside(site: str, url: str) -> bool:
    """Whether the URL is in the folder where the crawl began."""
    folder = site[: site.rindex("/") + 1] if urlsplit(site).path else f"{site}/"
    return url.startswith(folder)


def ask(url: str) -> HTTPResponse:
    """The answer of a site. One that is away or in trouble is worth another attempt."""
    request = urllib.request.Request(url, headers={"user-agent": AGENT})
    try:
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=20)
    except urllib.error.HTTPError as error:
        why, after = f"the site answers {error.code}", wait_of(error)
        if error.code in (429, 503) and after is not None:
            raise PutOff(why, after=after) from error
        if error.code >= 500:
            raise Retry(why) from error
        raise Reject(why) from error
    except OSError as error:
        raise Retry(str(error)) from error
    return answer


def wait_of(error: urllib.error.HTTPError) -> float | None:
    """The Retry-After of an answer, in seconds, up to an hour."""
    text = error.headers.get("retry-after", "")
    if text.isascii() and text.isdecimal():
        return min(float(text), 3600.0)
    with contextlib.suppress(ValueError, TypeError):
        wait = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        return min(max(wait, 0.0), 3600.0)
    return None


@functools.lru_cache(maxsize=1000)
def robots(url: str) -> RobotFileParser:
    """A robots.txt, read once in this process."""
    rules = RobotFileParser()
    try:
        with ask(url) as answer:
            rules.parse(answer.read().decode(errors="replace").splitlines())
    except Reject:
        # There is none.
        rules.parse([])
    return rules


def fetch(url: str) -> tuple[Page, list[str]]:
    """The page and the URLs that it links to."""
    try:
        with ask(url) as answer:
            body, base, kind = answer.read(), answer.url, answer.headers.get_content_type()
            status = answer.status
    except OSError as error:
        raise Retry(str(error)) from error
    if kind != "text/html":
        return {"status": status, "title": "", "bytes": len(body), "links": 0}, []
    page = Links(body.decode(errors="replace"))
    # One name for one page: the fragment is a place inside it.
    urls = {urldefrag(urljoin(base, link)).url for link in page.found}
    return {"status": status, "title": page.title, "bytes": len(body), "links": len(page.found)}, sorted(urls)


def make_worker(address: str, queue: str, site: str) -> Worker:
    """The worker. taskd sends it pages on a stream as they are found, eight at a time."""
    worker = Worker(address, queue=queue, concurrency=8, timeout=60)

    @worker.handler
    def visit(task: Task[None]) -> Page:
        try:
            rules = robots(urljoin(task.key, "/robots.txt"))
            if task.limit_key and (delay := rules.crawl_delay(AGENT)):
                task.pace(float(delay))
            if not rules.can_fetch(AGENT, task.key):
                raise Reject("robots.txt forbids it")
            page, urls = fetch(task.key)
        except PutOff as busy:
            if task.limit_key and busy.after:
                task.hold(busy.after)
            raise
        for url in urls:
            if inside(site, url):
                task.discover(url)
        return page

    return worker


async def show_progress(worker: Worker) -> None:
    while True:
        await asyncio.sleep(PROGRESS)
        print(f"{worker.stats.completed} pages, {worker.stats.rejected} failed attempts", file=sys.stderr)


async def crawl(address: str, queue: str, site: str) -> None:
    worker = make_worker(address, queue, site)
    print(f"crawling {site} in the queue {queue}", file=sys.stderr)
    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
        await client.insert(queue, site)
        tasks.create_task(worker.serve())
        progress = tasks.create_task(show_progress(worker))
        await client.wait_drained(queue)
        progress.cancel()
        worker.stop()
    print(f"{worker.stats.completed} pages, {worker.stats.rejected} failed attempts, by {worker.name}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("site", help="where to begin; only what is in this folder is crawled")
    arguments.add_argument("--address", default="127.0.0.1:7601", help="taskd's gRPC")
    arguments.add_argument("--queue", default=f"crawl-{int(time.time())}", help="by default one of this run")
    given = arguments.parse_args()
    asyncio.run(crawl(given.address, given.queue, urldefrag(given.site).url))
