"""Text for the console: columns that stay straight whatever is in them."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from unicodedata import combining, east_asian_width

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def print_lines(text: str) -> None:
    """Print to standard output; its reader, such as `head`, may have closed the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # or Python would flush what is left when it exits
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


def width(text: str) -> int:
    """Columns of a console that a text takes: accents none, Chinese letters two."""
    return sum((not combining(c)) * (2 if east_asian_width(c) in "WF" else 1) for c in text)


def fitted(text: str, most: int) -> str:
    """A text in one line of at most `most` columns; of a longer one the middle is left out."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    if width(line) <= most:
        return line
    head, tail = line, line
    while width(head) > most // 2:
        head = head[:-1]
    while width(tail) > most - 1 - width(head):
        tail = tail[1:]
    return f"{head}…{tail}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows of a table as lines: columns `left` begin, the others end, below each other."""
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for k, (cell, wide) in enumerate(zip(row, widths, strict=True)):
            space = " " * (wide - width(cell))
            cells.append(cell + space if k in left else space + cell)
        lines.append("  ".join(cells).rstrip())
    return lines


def counted(number: int, what: str) -> str:
    """ "1 tile", "2,000 tiles"."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def readable_bytes(count: int) -> str:
    """ "999 bytes", "1.5 kB", "23.0 GB"; a kB is 1000 bytes."""
    size, unit = float(count), 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else counted(count, "byte")


def without_passwords(value: Any) -> Any:
    """A text, or texts in lists and mappings, in which addresses have neither user nor password."""
    if isinstance(value, Mapping):
        return {key: without_passwords(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_passwords(inner) for inner in value]
    return re.sub(r"(\w://)[^/?#\s]*@", r"\1***@", value) if isinstance(value, str) else value


def size_in_bytes(text: str) -> int:
    """The size that an option says: "256M" is 256 x 2**20.

    Raises:
        ArgumentTypeError: it says none.
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or int(match[1]) < 1:
        raise ArgumentTypeError(f"{text!r} is not a size such as 256M or 1G")
    return int(match[1]) * _SIZES[match[2].upper()]


def positive_int(text: str) -> int:
    """A whole number of at least 1, as a type of options.

    Raises:
        ArgumentTypeError: the text is none.
    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
