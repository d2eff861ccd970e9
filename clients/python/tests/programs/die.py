"""die.py ADDRESS QUEUE: the handler of the task "poison" kills the process in its first line."""

import os
import sys
from typing import Any

from taskd_client import Task, Worker

worker = Worker(sys.argv[1], queue=sys.argv[2], concurrency=1, prefetch=5, name=f"die-{sys.argv[2]}")


@worker.handler
async def work(task: Task[Any]) -> str:
    if task.key == "poison":
        os._exit(3)
    return "done"


worker.run()
