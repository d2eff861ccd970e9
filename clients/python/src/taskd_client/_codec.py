"""Values to bytes and back: payloads and results."""

from __future__ import annotations

import dataclasses
import enum
import json
from datetime import date, datetime
from pathlib import PurePath
from typing import Any
from uuid import UUID

from taskd_client.errors import PayloadError, Unserialisable
from taskd_client.v1 import taskd_pb2 as pb


class Encoding(enum.IntEnum):
    """The kind of a payload or of a result."""

    UNSPECIFIED = pb.ENCODING_UNSPECIFIED
    BYTES = pb.ENCODING_BYTES
    TEXT = pb.ENCODING_TEXT
    JSON = pb.ENCODING_JSON


def encode(value: object) -> tuple[bytes, Encoding]:
    """Bytes stay bytes, a str is text, None is empty, and anything else becomes JSON."""
    try:
        match value:
            case None:
                return b"", Encoding.UNSPECIFIED
            case bytes() | bytearray() | memoryview():
                return bytes(value), Encoding.BYTES
            case str() if not isinstance(value, enum.Enum):
                return value.encode(), Encoding.TEXT
            case _:
                text = json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
                return text.encode(), Encoding.JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise Unserialisable(f"a {type(value).__name__} cannot be sent: {error}") from error


def _plain(value: object) -> object:
    """A value that JSON lacks, in terms of JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    match value:
        case enum.Enum():
            return value.value
        case datetime() | date():
            return value.isoformat()
        case UUID() | PurePath():
            return str(value)
        case set() | frozenset():
            return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def decode(raw: bytes, encoding: int) -> Any:
    """The value that was sent: JSON as its value, text as a str, bytes as bytes, and nothing as None."""
    if not raw:
        return None
    match encoding:
        case Encoding.JSON:
            return parse(raw)
        case Encoding.TEXT:
            return raw.decode()
        case _:
            return raw


def parse(raw: bytes) -> Any:
    """A JSON value."""
    try:
        return json.loads(raw)
    except ValueError as error:
        raise PayloadError(f"the payload is no JSON: {error}") from error
