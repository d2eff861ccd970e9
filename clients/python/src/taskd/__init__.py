"""Workers and clients of taskd.

from taskd import Worker

worker = Worker("127.0.0.1:7601", queue="pages")

@worker.handler
async def fetch(task):
    task.discover(task.key + "/next")
    return {"length": len(task.key)}

worker.run()
"""

from taskd._codec import Encoding
from taskd._connection import TLS
from taskd.client import AsyncClient, Explanation, InsertCounts, Inserted, InsertStatus
from taskd.errors import (
    EndOfSource,
    InvalidRequest,
    NotFound,
    PayloadError,
    PermissionDenied,
    PutOff,
    Reject,
    Retry,
    TaskdError,
    TaskRejected,
    Unauthenticated,
    Unavailable,
    Unserialisable,
    Unsupported,
)
from taskd.source import Answer, ItemStatus
from taskd.sync import Client
from taskd.task import (
    FINAL,
    UNFINISHED,
    Attempt,
    Backoff,
    Gap,
    NewTask,
    Priority,
    Task,
    TaskEvent,
    TaskInfo,
    TaskResult,
    TaskStatus,
    current_task,
)
from taskd.worker import Stats, Worker

__all__ = [
    "FINAL",
    "TLS",
    "UNFINISHED",
    "Answer",
    "AsyncClient",
    "Attempt",
    "Backoff",
    "Client",
    "Encoding",
    "EndOfSource",
    "Explanation",
    "Gap",
    "InsertCounts",
    "InsertStatus",
    "Inserted",
    "InvalidRequest",
    "ItemStatus",
    "NewTask",
    "NotFound",
    "PayloadError",
    "PermissionDenied",
    "Priority",
    "PutOff",
    "Reject",
    "Retry",
    "Stats",
    "Task",
    "TaskEvent",
    "TaskInfo",
    "TaskRejected",
    "TaskResult",
    "TaskStatus",
    "TaskdError",
    "Unauthenticated",
    "Unavailable",
    "Unserialisable",
    "Unsupported",
    "Worker",
    "current_task",
]
