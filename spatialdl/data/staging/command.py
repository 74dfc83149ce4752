"""The command that copies a data set: `spatialdl-stage`, `tools/stage_shards.py`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spatialdl.data.staging.cache import NodeCache
from spatialdl.data.staging.whole import copy_folder
from spatialdl.text import counted, positive_int, readable_bytes, size_in_bytes

_OK, _FAILED, _MISUSED, _INTERRUPTED, _TERMINATED = 0, 1, 2, 130, 143


class _TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Copy a data set folder, or remove copies of finished training jobs from a disk.

    Args:
        argv: arguments of the command; those of the process if None.

    Returns:
        The exit code: 0 if the copy is complete, 1 if a file cannot be read or written or is
        damaged, 2 for invalid arguments, 130 or 143 if interrupted or terminated.
    """
    options = _parser().parse_args(argv)
    if (options.source is None) != options.clean:
        _parser().error("give either a data set folder to copy, or --clean")
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        if options.clean:
            freed = NodeCache(options.to.absolute()).clean()
            print(f"removed {readable_bytes(freed)} of finished jobs from {options.to}")
            return _OK
        done = copy_folder(
            options.source.absolute(),
            options.to.absolute(),
            options.split,
            at_once=options.jobs,
            keep_free=options.keep_free,
        )
    except (ValueError, OSError) as error:
        text = error.strerror if isinstance(error, OSError) and not error.filename else error
        print(f"error: {text}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt as error:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return _TERMINATED if isinstance(error, _TerminatedError) else _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    there = f", of which {readable_bytes(done.there)} already existed" if done.there else ""
    print(
        f"{counted(done.shards, 'shard')} ({readable_bytes(done.bytes)}) verified in "
        f"{options.to}{there}"
    )
    return _OK


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="spatialdl-stage",
        description="Copy a data set (manifest and shards) to another disk: several files in "
        "parallel, with verified checksums; an interrupted copy resumes when run again.",
    )
    add = made.add_argument
    add("source", type=Path, nargs="?", metavar="DIR", help="the data set folder")
    add("--to", type=Path, required=True, metavar="DIR", help="the folder to copy it to")
    add(
        "--split",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="copy only samples of these splits, and their shards",
    )
    add("--jobs", type=positive_int, default=4, metavar="N", help="parallel copies (default 4)")
    add(
        "--keep-free",
        type=size_in_bytes,
        metavar="SIZE",
        help="space to keep free, such as 10G (default 1G, or 5 %% of a small disk)",
    )
    add(
        "--clean",
        action="store_true",
        help="remove copies that training (data.stage) left in --to and no job uses",
    )
    return made


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError
