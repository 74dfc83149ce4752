"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 256M or 1G.

    Raises:
        ValueError: it is none, or 0.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or int(match[1]) < 1:
        raise ValueError(f"{text!r} is not a size such as 256M or 1G")
    return int(match[1]) * _UNITS[match[2].upper()]
