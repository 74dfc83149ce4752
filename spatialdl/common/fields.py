"""Strict readers for fields of untrusted JSON.

`int(1.7)`, `bool("no")` and `str([])` succeed, so errors in a damaged file would be detected much
later, or never. These readers check types and never convert.
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
    """A value for a message, abbreviated, because a damaged one may be of any length."""
    return reprlib.repr(value)


def parse(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: not JSON, a duplicate key in one object, or too deep nesting.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"duplicate key {shown(twice)}")
    return found


def whole(row: Mapping[str, Any], key: str, least: int = 0) -> int:
    """A 64-bit integer.

    Raises:
        KeyError: the key is missing.
        ValueError: not an integer, or less than `least`.
    """
    value = row[key]
    # bool is a subclass of int
    if type(value) is not int or not least <= value < _INT64:
        at_least = f" of at least {least}" if least > -_INT64 else ""
        raise ValueError(f"{key} is {shown(value)}, expected a whole number{at_least}")
    return value


def place(row: Mapping[str, Any], key: str) -> int:
    """A 64-bit integer of any sign; raises as `whole`."""
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
    for number, item in enumerate(value):
        if type(item) is not dict:
            raise ValueError(f"{key} {number} is {shown(item)}, expected an object")
    return value


def texts(row: Mapping[str, Any], key: str) -> list[str]:
    """A list of strings; raises as `whole`."""
    value = row[key]
    if type(value) is not list or not all(type(item) is str for item in value):
        raise ValueError(f"{key} is {shown(value)}, expected a list of strings")
    return value


def missing(error: Exception) -> str:
    """The message of an error of these readers; a `KeyError` has only the key."""
    return f"missing key {error}" if isinstance(error, KeyError) else str(error)
