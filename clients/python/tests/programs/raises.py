"""raises.py ADDRESS QUEUE: handlers in two processes, of which some raise what cannot be pickled, or unpickled."""

import sys
import threading
import time

from taskd_client import Task, Worker


class Own(BaseException):
    """Unpickling calls it with one argument."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


class Locked(Exception):
    """Has a part that nobody can pickle."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Silent(BaseException):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


worker = Worker(sys.argv[1], queue=sys.argv[2], processes=2)


@worker.handler
def work(task: Task[None]) -> str:
    match task.key.split("-")[0]:
        case "own":
            raise Own(1, 2)
        case "locked":
            raise Locked
        case "silent":
            raise Silent
        case "exit":
            sys.exit("over")
        case "slow":
            time.sleep(2)
    return "done"


worker.run()
