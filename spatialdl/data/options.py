"""Options of commands that write data sets: codec and size of shards, and Lustre stripes."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

from spatialdl.common.text import size_in_bytes
from spatialdl.data.codec import QUALITY
from spatialdl.data.writer import DEFAULT_SHARD_SIZE
from spatialdl.errors import ShardError


def add_shard_options(parser: argparse.ArgumentParser, codecs: Sequence[str], about: str) -> None:
    """Add ``--codec``, ``--quality`` and ``--shard-size``.

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


def _quality(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JPEG quality from 1 to 100")
    return value


def stripe_files(folder: Path, count: int | None, size: int | None) -> str:
    """Stripe the files that will be created in a folder over storage targets of Lustre.

    Args:
        folder: an existing folder; a file keeps the stripes with which it was created.
        count: storage targets per file, -1 for all; None leaves it to the file system.
        size: bytes per stripe.

    Returns:
        A remark where Lustre's program is missing, which costs at most speed; else "".

    Raises:
        ShardError: `lfs setstripe` failed.
    """
    given = (("-c", count), ("-S", size))
    options = [text for name, value in given if value is not None for text in (name, str(value))]
    if not options:
        return ""
    command = ["lfs", "setstripe", *options, str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        return "stripes were not set: lfs, the program of Lustre, was not found"
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        raise ShardError(f"{' '.join(command)} failed: {output}")
    return ""
