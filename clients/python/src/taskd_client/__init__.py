"""Workers and clients of taskd.

from taskd_client import Worker

worker = Worker("127.0.0.1:7601", queue="pages")

@worker.handler
async def fetch(task):
    task.discover(task.key + "/next")
    return {"length": len(task.key)}

worker.run()
"""

from taskd_client._codec import Encoding
from taskd_client._connection import TLS
from taskd_client.client import AsyncClient, Explanation, InsertCounts, Inserted, InsertStatus
from taskd_client.errors import (
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
    Throttle,
    Unauthenticated,
    Unavailable,
    Unserialisable,
    Unsupported,
)
from taskd_client.operator import DeadLetter, LetterKind, LettersChanged, QueueCounts
from taskd_client.source import Answer, ItemStatus
from taskd_client.sync import Client
from taskd_client.task import (
    FINAL,
    UNFINISHED,
    Attempt,
    Backoff,
    Gap,
    Limit,
    NewTask,
    NewTree,
    Priority,
    Task,
    TaskEvent,
    TaskInfo,
    TaskResult,
    TaskStatus,
    current_task,
)
from taskd_client.topics import Published, PublishStatus, Record
from taskd_client.worker import Stats, Worker

__all__ = [
    "FINAL",
    "TLS",
    "UNFINISHED",
    "Answer",
    "AsyncClient",
    "Attempt",
    "Backoff",
    "Client",
    "DeadLetter",
    "Encoding",
    "EndOfSource",
    "Explanation",
    "Gap",
    "InsertCounts",
    "InsertStatus",
    "Inserted",
    "InvalidRequest",
    "ItemStatus",
    "LetterKind",
    "LettersChanged",
    "Limit",
    "NewTask",
    "NewTree",
    "NotFound",
    "PayloadError",
    "PermissionDenied",
    "Priority",
    "PublishStatus",
    "Published",
    "PutOff",
    "QueueCounts",
    "Record",
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
    "Throttle",
    "Unauthenticated",
    "Unavailable",
    "Unserialisable",
    "Unsupported",
    "Worker",
    "current_task",
]
