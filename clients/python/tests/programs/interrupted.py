"""interrupted.py ADDRESS QUEUE: watches a task, then inserts from a source that blocks. SIGINT ends each."""

import sys
import time
from collections.abc import Iterator

from taskd_client import Client, NewTask

address, queue = sys.argv[1:]


def tasks() -> Iterator[NewTask]:
    yield NewTask(queue=queue, key="b")
    print("the source blocks")
    time.sleep(600)


with Client(address) as client:
    task = client.insert(queue, "a")
    try:
        for _ in client.watch(task.id):
            print("it watches")
    except KeyboardInterrupt:
        print("the watch has ended")
    try:
        client.insert_many(tasks())
    except KeyboardInterrupt:
        print("the insert has ended")
