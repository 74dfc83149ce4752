"""Options of commands that write data sets: codec and layout of shards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from spatialdl.data.codec import QUALITY
from spatialdl.data.striping import Striping
from spatialdl.data.writer import DEFAULT_SHARD_SIZE
from spatialdl.text import size_in_bytes


def add_shard_options(parser: argparse.ArgumentParser, codecs: Sequence[str], about: str) -> None:
    """Add ``--codec``, ``--quality``, ``--shard-size``, ``--stripe-count`` and ``--stripe-size``.

    Args:
        codecs: codecs that the command writes, including "raw".
        about: description of the codecs, for the help.
    """
    add = parser.add_argument
    add("--codec", choices=codecs, default="raw", help=f"{about} (default raw)")
    add(
        "--quality",
        type=_quality,
        default=QUALITY,
        metavar="Q",
        help=f"quality for --codec jpeg, 1 to 100 (default {QUALITY})",
    )
    add(
        "--shard-size",
        type=size_in_bytes,
        default=DEFAULT_SHARD_SIZE,
        metavar="SIZE",
        help="approximate size of a shard file, such as 256M or 1G (default 512M)",
    )
    add(
        "--stripe-count",
        type=_stripe_count,
        metavar="N",
        help="on Lustre, number of storage targets per shard file; -1 for all",
    )
    add(
        "--stripe-size",
        type=_stripe_size,
        metavar="SIZE",
        help="on Lustre, bytes per stripe on each storage target, such as 4M",
    )


def _quality(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JPEG quality from 1 to 100")
    return value


def _stripe_count(text: str) -> int:
    try:
        count = int(text)
        Striping(count=count)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 2000, or -1 for all") from None
    return count


def _stripe_size(text: str) -> int:
    size = size_in_bytes(text)
    try:
        Striping(size=size)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of 64K") from None
    return size
