"""slow.py ADDRESS QUEUE FOLDER [PREFETCH [LEASE [polls]]]

Each handler says its key, and ends when FOLDER has a file of this name.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from taskd_client import Task, Worker
from taskd_client.logs import configure

address, queue, folder = sys.argv[1:4]
prefetch = int(sys.argv[4]) if len(sys.argv) > 4 else 0
lease = float(sys.argv[5]) if len(sys.argv) > 5 else 2
configure()
worker = Worker(
    address,
    queue=queue,
    lease=lease,
    concurrency=1,
    prefetch=prefetch,
    name=f"slow-{queue}",
    stream="polls" not in sys.argv,
)


@worker.handler
async def wait(task: Task[Any]) -> str:
    print("began", task.key)
    while not (Path(folder) / task.key).exists():
        await asyncio.sleep(0.02)
    return "done"


worker.run()
print("the end", worker.stats)
