"""Logs: lines of JSON in which each record of a handler names its task. Use it or not; a worker changes no logging."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from taskd_client.task import current_task

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object for each record: time, level, logger, message, the fields of `extra`, and those of the task."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # A key that is no UTF-8 has surrogates, which no stream takes.
        return json.dumps(line, default=str, ensure_ascii=False).encode(errors="replace").decode()


class TaskFields(logging.Filter):
    """Adds task_id, queue, key and attempt to the records of a handler, and of what it calls."""

    def filter(self, record: logging.LogRecord) -> bool:
        task = current_task()
        if task is not None and not hasattr(record, "task_id"):
            record.task_id, record.queue, record.key, record.attempt = task.id, task.queue, task.key, task.attempt
        return True


def configure(level: int | str = logging.INFO) -> None:
    """Logs of the whole program to stderr: as JSON, or as plain lines on a terminal. For programs without a setup."""
    handler = logging.StreamHandler()
    handler.addFilter(TaskFields())
    if sys.stderr.isatty():
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])
