"""Payloads of a type: readers made from annotations.

A reader is made once, when a handler is registered, so an annotation that nobody can read fails there.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from taskd_client._codec import Encoding, decode, parse
from taskd_client.errors import PayloadError

PayloadReader = Callable[[bytes, int], Any]
# Reads a JSON value; the text says where in the payload the value is.
_Fit = Callable[[Any, str], Any]


def payload_reader(annotation: Any) -> PayloadReader:
    """Reads payloads of this type. TypeError if there is no way to read them."""
    if annotation is Any or annotation is object:
        return decode
    if annotation is bytes:
        return lambda raw, encoding: raw
    if annotation is str:
        return _read_text
    if callable(getattr(annotation, "model_validate_json", None)):
        return lambda raw, encoding: _checked(annotation.model_validate_json, raw, "payload", annotation)
    fit = _fit(annotation, {})
    return lambda raw, encoding: fit(_value(raw, encoding), "payload")


def _read_text(raw: bytes, encoding: int) -> str:
    value = decode(raw, encoding) if encoding == Encoding.JSON else raw
    if isinstance(value, bytes):
        return _checked(lambda: value.decode(), None, "payload", str)  # type: ignore[no-any-return]
    if value is None:
        return ""
    return _expect(value, "payload", str)  # type: ignore[no-any-return]


def _value(raw: bytes, encoding: int) -> Any:
    """The JSON value of a payload; a program that knows no encodings sends JSON as bytes."""
    return None if not raw else parse(raw)


def _checked(read: Callable[..., Any], value: Any, where: str, wanted: Any) -> Any:
    try:
        return read() if value is None else read(value)
    except PayloadError:
        raise
    except (ValueError, TypeError) as error:
        name = getattr(wanted, "__name__", wanted)
        raise PayloadError(f"{where} is no {name}: {error}") from error


def _expect(value: Any, where: str, *kinds: type) -> Any:
    # True is an int for Python, and no number for anybody else.
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return value
    wanted = " or ".join(kind.__name__ for kind in kinds)
    raise PayloadError(f"{where} is {_name(value)}; {wanted} is expected")


def _name(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _fit(annotation: Any, known: dict[Any, _Fit]) -> _Fit:
    """The reader of a type. `known` has the classes on the way, because a class may contain itself."""
    if annotation is Any or annotation is object:
        return lambda value, where: value
    if isinstance(annotation, typing.NewType):
        return _fit(annotation.__supertype__, known)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is not None:
        return _fit_generic(annotation, origin, args, known)
    if annotation is None or annotation is types.NoneType:
        return _fit_none
    if annotation is float:
        return _fit_float
    if annotation in (bool, int, str, dict, list):
        return lambda value, where: _expect(value, where, annotation)
    if annotation in (set, frozenset, tuple):
        return lambda value, where: annotation(_expect(value, where, list))
    if annotation in (datetime, date):
        return lambda value, where: _checked(annotation.fromisoformat, _expect(value, where, str), where, annotation)
    if annotation in (UUID, Path):
        return lambda value, where: _checked(annotation, _expect(value, where, str), where, annotation)
    if isinstance(annotation, type):
        return _fit_class(annotation, known)
    raise TypeError(f"{annotation!r} is no type that a payload can be read as; give `decode=` a function of bytes")


def _fit_class(kind: type, known: dict[Any, _Fit]) -> _Fit:
    validate = getattr(kind, "model_validate", None)
    if callable(validate):
        return lambda value, where: _checked(lambda: validate(value), None, where, kind)
    if issubclass(kind, enum.Enum):
        return lambda value, where: _checked(lambda: kind(value), None, where, kind)
    if kind in known:
        return lambda value, where: known[kind](value, where)
    if typing.is_typeddict(kind):
        make = _fit_typed_dict
    elif dataclasses.is_dataclass(kind):
        make = _fit_dataclass
    else:
        raise TypeError(
            f"{kind.__name__} is no type that a payload can be read as: take a dataclass, a TypedDict, a pydantic "
            "model, or types of JSON; or give `decode=` a function of bytes"
        )
    # Replaced before anybody calls it.
    known[kind] = _fit_none
    known[kind] = make(kind, known)
    return known[kind]


def _fit_dataclass(kind: Any, known: dict[Any, _Fit]) -> _Fit:
    hints = get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    fits = {field.name: _fit(hints[field.name], known) for field in fields}
    optional = {
        field.name
        for field in fields
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }

    def fit(value: Any, where: str) -> Any:
        _expect(value, where, dict)
        # Fields that the class does not know belong to a newer sender.
        read = {name: fits[name](value[name], f"{where}.{name}") for name in fits if name in value}
        for name in fits.keys() - read.keys() - optional:
            raise PayloadError(f"{where}.{name} is missing")
        return _checked(lambda: kind(**read), None, where, kind)

    return fit


def _fit_typed_dict(kind: Any, known: dict[Any, _Fit]) -> _Fit:
    fits = {name: _fit(hint, known) for name, hint in get_type_hints(kind).items()}
    # Python overlooks NotRequired in annotations that are strings (`from __future__ import annotations`).
    marks = {name: get_origin(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    required = {name for name in marks if marks[name] is Required or name in kind.__required_keys__}
    required -= {name for name in marks if marks[name] is NotRequired}

    def fit(value: Any, where: str) -> Any:
        _expect(value, where, dict)
        for name in required - value.keys():
            raise PayloadError(f"{where}.{name} is missing")
        return {name: fits[name](one, f"{where}.{name}") if name in fits else one for name, one in value.items()}

    return fit


def _fit_none(value: Any, where: str) -> None:
    if value is not None:
        raise PayloadError(f"{where} is {_name(value)}; null is expected")


def _fit_generic(annotation: Any, origin: Any, args: tuple[Any, ...], known: dict[Any, _Fit]) -> _Fit:
    if origin in (typing.Annotated, Required, NotRequired):
        return _fit(args[0], known)
    if origin in (Union, types.UnionType):
        return _fit_union(args, known)
    if origin is Literal:
        return lambda value, where: _fit_literal(value, where, args)
    if origin in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return _fit_mapping(args, known)
    if origin is tuple and args[-1:] != (Ellipsis,):
        return _fit_tuple(args, known)
    makers: dict[Any, Callable[[list[Any]], Any]] = {
        list: list,
        set: set,
        frozenset: frozenset,
        tuple: tuple,
        collections.abc.Sequence: list,
        collections.abc.Iterable: list,
        collections.abc.Set: set,
    }
    if origin not in makers:
        raise TypeError(f"{annotation!r} is no type that a payload can be read as; give `decode=` a function of bytes")
    # `typing.Sequence` without a type has items of any.
    make, item = makers[origin], _fit(args[0] if args else Any, known)

    def fit(value: Any, where: str) -> Any:
        return make([item(one, f"{where}[{at}]") for at, one in enumerate(_expect(value, where, list))])

    return fit


def _fit_union(args: tuple[Any, ...], known: dict[Any, _Fit]) -> _Fit:
    fits = [_fit(arg, known) for arg in args]

    def fit(value: Any, where: str) -> Any:
        errors = []
        for one in fits:
            try:
                return one(value, where)
            except PayloadError as error:
                errors.append(str(error))
        raise PayloadError("; ".join(dict.fromkeys(errors)))

    return fit


def _fit_mapping(args: tuple[Any, ...], known: dict[Any, _Fit]) -> _Fit:
    key, item = (_fit(arg, known) for arg in args or (Any, Any))
    if args and args[0] is int:
        # The names in an object are texts, also those that were numbers in Python.
        key = _fit_number_name

    def fit(value: Any, where: str) -> Any:
        _expect(value, where, dict)
        return {key(name, f"a key of {where}"): item(one, f"{where}.{name}") for name, one in value.items()}

    return fit


def _fit_tuple(args: tuple[Any, ...], known: dict[Any, _Fit]) -> _Fit:
    fits = [_fit(arg, known) for arg in args]

    def fit(value: Any, where: str) -> Any:
        _expect(value, where, list)
        if len(value) != len(fits):
            raise PayloadError(f"{where} has {len(value)} items; {len(fits)} are expected")
        return tuple(one(value[at], f"{where}[{at}]") for at, one in enumerate(fits))

    return fit


def _fit_float(value: Any, where: str) -> float:
    try:
        number = float(_expect(value, where, int, float))
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise PayloadError(f"{where} is larger than a float")
    return number


def _fit_number_name(name: str, where: str) -> int:
    return _checked(int, name, where, int)  # type: ignore[no-any-return]


def _fit_literal(value: Any, where: str, args: tuple[Any, ...]) -> Any:
    # True and 1.0 are equal to 1 in Python only.
    for arg in args:
        if type(value) is type(arg) and value == arg:
            return value
    raise PayloadError(f"{where} is {value!r}; one of {', '.join(map(repr, args))} is expected")
