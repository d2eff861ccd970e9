"""Records of topics, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from taskd_client._codec import encode
from taskd_client.task import key_bytes
from taskd_client.v1 import taskd_pb2 as pb

# taskd takes so many records in a call, …
MAX_RECORDS = 1000
# … and 32 MiB, unless its settings say less. A call with more bytes than this has one record.
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record to publish to a topic."""

    value: object = None
    """Bytes stay bytes, a str is text, and anything else becomes JSON."""
    key: str | bytes = ""
    """Records with the same key keep their order."""
    attributes: Mapping[str, str | Sequence[str]] | None = None
    """Texts by name; a name may have several."""
    id: str = ""
    """What tells a repeat from another record."""

    def to_message(self) -> pb.NewRecord:
        value, _ = encode(self.value)
        message = pb.NewRecord(value=value, key=key_bytes(self.key), id=self.id)
        for name, values in (self.attributes or {}).items():
            for one in [values] if isinstance(values, str) else values:
                message.attributes.add(name=name, value=one)
        return message


class PublishStatus(Enum):
    """The kinds of answers to a record."""

    STORED = "STORED"
    """The topic has it."""
    REJECTED = "REJECTED"
    """It is wrong; `error` says why."""
    TRY_LATER = "TRY_LATER"
    """It may be stored or not: publish it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What became of a record."""

    status: PublishStatus
    partition: int = 0
    offset: str = ""
    """Empty if it is not stored."""
    error: str = ""


_STATUSES = {
    pb.PUBLISH_STATUS_STORED: PublishStatus.STORED,
    pb.PUBLISH_STATUS_REJECTED: PublishStatus.REJECTED,
}


def first_of(records: Sequence[pb.NewRecord]) -> Sequence[pb.NewRecord]:
    """The first of these records that one call takes, at least one."""
    count = size = 0
    for record in records:
        size += record.ByteSize()
        if count > 0 and size > _MAX_BYTES:
            break
        count += 1
    return records[:count]


def read_published(result: pb.PublishResult) -> Published:
    return Published(
        status=_STATUSES.get(result.status, PublishStatus.TRY_LATER),
        partition=result.partition,
        offset=result.offset,
        error=result.error,
    )
