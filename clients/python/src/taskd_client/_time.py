"""Seconds, and pauses that grow."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

Seconds = float | timedelta


def seconds(value: Seconds) -> float:
    """The number of seconds; an error if it is negative."""
    number = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{value!r} is no time: give seconds, zero or more")
    return number


def to_duration(value: Seconds) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds(value) * 1e9))
    return duration


def to_datetime(at: Timestamp) -> datetime | None:
    """The time with its zone; none if the field is absent."""
    if not at.seconds and not at.nanos:
        return None
    return at.ToDatetime(tzinfo=UTC)


class Pauses:
    """Pauses that double from `first` to `longest`, each at random between its half and its whole."""

    def __init__(self, first: float = 0.05, longest: float = 2.0) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def next(self) -> float:
        pause = self._next
        self._next = min(2 * pause, self._longest)
        return pause * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next = self._first
