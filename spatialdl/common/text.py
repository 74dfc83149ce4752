"""Console text: aligned columns, units and sizes."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unicodedata import combining, east_asian_width

if TYPE_CHECKING:
    from tqdm import tqdm

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def print_lines(text: str) -> None:
    """Print to standard output; tolerates a reader, such as `head`, that closed the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # or Python would fail again when it flushes at exit
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


def progress_bar(
    items: Iterable[Any] | None, what: str | None, unit: str, *, shows: bool = True, **more: Any
) -> tqdm[Any]:
    """A progress bar on stderr, if that is a terminal; erased at the end.

    Args:
        items: iterated over with progress; None, with `total`, for a bar that is updated.
        what: in front of the bar.
        unit: what is counted.
        shows: false never shows it.
        more: further arguments of tqdm, which may replace those set here.
    """
    from tqdm import tqdm  # imported here, as it is slow

    how = {"disable": None if shows else True, "leave": False, "dynamic_ncols": True} | more
    return tqdm(items, what, unit=unit, **how)


def width(text: str) -> int:
    """Console columns of a text: 0 for combining accents, 2 for wide characters."""
    return sum((not combining(c)) * (2 if east_asian_width(c) in "WF" else 1) for c in text)


def fitted(text: str, most: int) -> str:
    """Text in one line of at most `most` columns, with the middle elided if necessary."""
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
    """Rows of a table as lines, with columns `left` left-aligned and all others right-aligned."""
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
    """Replace user and password in URLs, in a string or in nested lists and mappings."""
    if isinstance(value, Mapping):
        return {key: without_passwords(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_passwords(inner) for inner in value]
    return re.sub(r"(\w://)[^/?#\s]*@", r"\1***@", value) if isinstance(value, str) else value


def size_in_bytes(text: str) -> int:
    """Parse a size: "256M" is 256 x 2**20.

    Raises:
        ArgumentTypeError: if the text is not a size.
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or int(match[1]) < 1:
        raise ArgumentTypeError(f"{text!r} is not a size such as 256M or 1G")
    return int(match[1]) * _SIZES[match[2].upper()]


def positive_int(text: str) -> int:
    """Parse an integer of at least 1, as an argparse type.

    Raises:
        ArgumentTypeError: if the text is not one.
    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
