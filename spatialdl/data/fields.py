"""JSON that anybody may have written, read field by field: each is of its type, or is named.

`int(1.7)`, `bool("no")` and `str([])` succeed, and what they make of a damaged file is noticed much
later, or never. So nothing is converted here.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeVar

T = TypeVar("T")
_INT64 = 2**63


def shown(value: object) -> str:
    """A value in a message; a damaged one may be of any length."""
    return reprlib.repr(value)


def parse(text: str) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is no JSON, has a key twice in one object, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{shown(twice)} is there twice")
    return found


def whole(row: Mapping[str, Any], key: str, least: int = 0) -> int:
    """A whole number of 64 bits.

    Raises:
        KeyError: there is no such key.
        ValueError: it is none, or less than `least`.
    """
    value = row[key]
    # a bool is an int of Python's
    if type(value) is not int or not least <= value < _INT64:
        at_least = f" of at least {least}" if least > -_INT64 else ""
        raise ValueError(f"{key} is {shown(value)}, expected a whole number{at_least}")
    return value


def place(row: Mapping[str, Any], key: str) -> int:
    """A whole number of 64 bits, of any sign; raises as `whole`."""
    return whole(row, key, -_INT64)


def positive(row: Mapping[str, Any], key: str) -> float:
    """A finite number above 0; raises as `whole`."""
    value = row[key]
    if type(value) not in (int, float) or not (0 < value < _INT64 and isfinite(value)):
        raise ValueError(f"{key} is {shown(value)}, expected a number above 0")
    return float(value)


def _typed(row: Mapping[str, Any], key: str, kind: type[T], expected: str) -> T:
    value = row[key]
    if type(value) is not kind:
        raise ValueError(f"{key} is {shown(value)}, expected {expected}")
    return value


def text(row: Mapping[str, Any], key: str) -> str:
    """A string; raises as `whole`."""
    return _typed(row, key, str, "a string")


def flag(row: Mapping[str, Any], key: str) -> bool:
    """True or false; raises as `whole`."""
    return _typed(row, key, bool, "true or false")


def table(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object; raises as `whole`."""
    return _typed(row, key, dict, "an object")


def tables(row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """A list of objects; raises as `whole`."""
    value = _typed(row, key, list, "a list")
    for number, one in enumerate(value):
        if type(one) is not dict:
            raise ValueError(f"{key} {number} is {shown(one)}, expected an object")
    return value


def texts(row: Mapping[str, Any], key: str) -> list[str]:
    """A list of strings; raises as `whole`."""
    value = row[key]
    if type(value) is not list or not all(type(one) is str for one in value):
        raise ValueError(f"{key} is {shown(value)}, expected a list of strings")
    return value


def missing(error: Exception) -> str:
    """What an error that reading fields has met says; a `KeyError` has the bare key."""
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)
