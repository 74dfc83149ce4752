"""Inputs that are almost valid: real ones with some bytes, words or values changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

_MOST_CHANGES = 5
_LENGTHS = (1, 2, 4, 8)
_INTEGERS = (0, 1, 2, 7, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, -1)
_DEEP, _HUGE = "@deep@", "@huge@"
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), _HUGE, _DEEP),
    *(0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "0", "nan", "../../etc/passwd", "/etc/passwd", "..", "\0", "\ud800", "a" * 5000, "${x}"),
    *([], [[]], [None], {}, {"": None}, [1, 2, 3], {"_target_": "os.getcwd"}),
)
ODD_WORDS = (
    *(b"", b"\0", b'"', b"'", b",", b";", b"\r", b"\n", b"\r\n", b"\\", b"\xff", b"\xef\xbb\xbf"),
    *(b"nan", b"-1", b"1e999", b"9" * 400, b"../../x", b"/", b"\xe2\x80\xae", b"\xc2\xb2", b"x,y"),
    *(b"[", b"]", b"{", b"}", b"<", b">", b"&", b"<!DOCTYPE a>", b"%", b"- ", b": "),
    b"a" * 200_000,
)


@st.composite
def changed_bytes(draw: st.DrawFn, valid: bytes, head: int | None = None) -> bytes:
    """A file with some of its bytes changed.

    Args:
        valid: the file as it should be.
        head: changes are in so many of its first bytes, if it is given.
    """
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, _MOST_CHANGES))):
        _change(draw, data, min(len(data), head or len(data)))
    return bytes(data)


def _change(draw: st.DrawFn, data: bytearray, until: int) -> None:
    begin = draw(st.integers(0, max(0, until - 1)))
    what = draw(st.sampled_from(("flip", "integer", "word", "cut", "remove", "repeat", "move")))
    count = draw(st.integers(1, 64)) if what in ("remove", "repeat", "move") else 1
    end = begin + count
    if what == "flip" and data:
        data[begin] ^= 1 << draw(st.integers(0, 7))
    elif what == "integer":
        length = draw(st.sampled_from(_LENGTHS))
        number = draw(st.sampled_from(_INTEGERS)) % 256**length
        order = draw(st.sampled_from(("little", "big")))
        data[begin : begin + length] = number.to_bytes(length, order)  # type: ignore[arg-type]
    elif what == "word":
        data[begin : begin + draw(st.integers(0, 3))] = draw(st.sampled_from(ODD_WORDS))
    elif what == "cut":
        del data[begin:]
    elif what == "remove":
        del data[begin:end]
    elif what == "repeat":
        data[begin:begin] = data[begin:end] * draw(st.integers(1, 3))
    elif what == "move":
        target = draw(st.integers(0, len(data)))
        data[target : target + count] = data[begin:end]


@st.composite
def changed_json(draw: st.DrawFn, valid: Any) -> bytes:
    """A JSON document with some of its values changed, and sometimes of its bytes.

    Args:
        valid: the document as it should be.
    """
    document = [deepcopy(valid)]
    for _ in range(draw(st.integers(1, _MOST_CHANGES))):
        _change_value(draw, document)
    text = json.dumps(document[0])
    text = text.replace(
        f'"{_HUGE}"', draw(st.sampled_from(("1" + "0" * 400, "-1e999", "9" * 5000)))
    )
    deep = draw(st.sampled_from((3, 900, 100_000)))
    text = text.replace(f'"{_DEEP}"', "[" * deep + "]" * deep)
    if draw(st.integers(0, 3)) == 0 and "{" in text:  # a key twice
        first = text.index("{") + 1
        name = draw(st.sampled_from(sorted(valid) if isinstance(valid, dict) else ["a"]))
        text = f"{text[:first]}{json.dumps(name)}: 0, {text[first:]}"
    data = text.encode()
    if draw(st.integers(0, 7)) == 0:
        data = draw(changed_bytes(data))
    return data


@st.composite
def changed_safetensors(draw: st.DrawFn, valid: bytes) -> bytes:
    """A file of tensors whose header says something else of them, or in another order.

    Args:
        valid: the file as it should be.
    """
    end = 8 + int.from_bytes(valid[:8], "little")
    header = draw(changed_json(json.loads(valid[8:end])))
    return len(header).to_bytes(8, "little") + header + valid[end:]


def _change_value(draw: st.DrawFn, document: list[Any]) -> None:
    """Change one value somewhere; the document is the only item of a list, and so may be it."""
    parent: Any = document
    while True:
        keys: Sequence[Any] = sorted(parent) if isinstance(parent, dict) else range(len(parent))
        if not keys:
            return
        key = keys[draw(st.integers(0, len(keys) - 1))]
        inner = parent[key]
        if not (isinstance(inner, dict | list) and inner) or draw(st.integers(0, 9)) == 0:
            break
        parent = inner
    what = draw(st.sampled_from(("odd", "odd", "odd", "remove", "near", "repeat", "swap", "wrap")))
    if what == "odd":
        parent[key] = deepcopy(draw(st.sampled_from(ODD_VALUES)))
    elif what == "remove" and parent is not document:
        del parent[key]
    elif what == "near" and isinstance(parent[key], int):
        parent[key] += draw(st.sampled_from((-1, 1, 2, 1000)))
    elif what == "repeat" and isinstance(parent, list) and parent is not document:
        parent.insert(key, deepcopy(parent[key]))
    elif what == "swap":
        other = keys[draw(st.integers(0, len(keys) - 1))]
        parent[key], parent[other] = parent[other], parent[key]
    elif what == "wrap":
        parent[key] = draw(st.sampled_from(([parent[key]], {"a": parent[key]}, str(parent[key]))))
