"""The name of a worker without one, which one worker of a host and queue has."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
from collections.abc import Sequence

from taskd_client.errors import InvalidRequest


def default_name() -> str:
    """That of the variable TASKD_WORKER, or of the host."""
    if name := os.environ.get("TASKD_WORKER"):
        return name
    return "".join(c if c.isprintable() else "-" for c in socket.gethostname())[:80]


def take_name(stack: contextlib.ExitStack, name: str, queues: Sequence[str]) -> None:
    """Takes the name until `stack` ends; InvalidRequest if another worker has it.

    taskd would take both for one worker. The kernel gives the name back however the process ends. `taskd work` and the
    packages for Go and TypeScript take names in the same way.
    """
    if sys.platform != "linux":
        raise InvalidRequest("give the worker a name (name=): only Linux tells whether another one has the host's")
    for queue in sorted(set(queues)):
        digest = hashlib.sha256(f"{name}\n{queue}".encode()).hexdigest()[:32]
        taken = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            taken.bind(f"\0taskd-worker/{digest}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise InvalidRequest(
                f"a worker {name} of queue {queue} runs on this machine already, and taskd would take both for one: "
                f"give this one a name of its own, as in Worker(…, name={f'{name}-2'!r}) or TASKD_WORKER={name}-2"
            ) from None
