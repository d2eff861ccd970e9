"""processes.py ADDRESS QUEUE: handlers in two processes; the payload says what they do."""

import os
import signal
import sys
from dataclasses import dataclass

from taskd_client import Reject, Task, Worker


@dataclass
class Work:
    kind: str


worker = Worker(sys.argv[1], queue=sys.argv[2], processes=2)


@worker.handler
def work(task: Task[Work]) -> dict[str, object]:
    match task.payload.kind:
        case "die":
            if task.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        case "reject":
            raise Reject("as the payload says")
        case "discover":
            task.discover("found", payload={"kind": "plain"})
    return {"pid": os.getpid(), "kind": task.payload.kind}


# The processes import this file. There, `run` does nothing.
print("at", os.getpid())
worker.run()
