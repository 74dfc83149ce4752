"""Copy of a data set folder: `spatialdl-stage`, `tools/stage_shards.py`.

Every shard is verified, and the manifest is written last.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from spatialdl.common.files import apply_umask, fsync_folder, replacing
from spatialdl.common.text import counted, positive_int, readable_bytes, size_in_bytes
from spatialdl.data.format import MANIFEST, Manifest, shard_status
from spatialdl.data.outcomes import FAILED, OK, run_command
from spatialdl.data.staging.cache import NodeCache, local_name
from spatialdl.data.staging.copying import BusyError, StoppedError, WriteError, fetch, is_whole
from spatialdl.data.staging.local_disk import DiskSpace
from spatialdl.errors import ShardError

_NAMED = 3  # faults reported in full


@dataclass(frozen=True)
class CopyResult:
    """Shards and bytes of a copied folder, and bytes of these that already existed."""

    shards: int
    bytes: int
    there: int


def copy_folder(
    source: Path,
    target: Path,
    splits: Sequence[str] = (),
    *,
    at_once: int = 4,
    keep_free: int | None = None,
) -> CopyResult:
    """Copy a data set folder; `target` is a data set once the copy is complete.

    Existing shards are verified; an interrupted copy is resumed.

    Args:
        source: the data set folder.
        target: the folder to create.
        splits: splits to copy; none copies all.
        at_once: files copied in parallel.
        keep_free: bytes of the disk that stay free, see `DiskSpace`.

    Raises:
        ShardError: a shard is missing or damaged, `target` has other contents, the disk has too
            little space, or another process writes it; verified shards stay.
        ValueError: a split does not exist.
        OSError: a file cannot be read or written.
    """
    manifest = Manifest.load(source)
    text = (source / MANIFEST).read_bytes()
    if splits:
        manifest = manifest.of_splits(splits)
    for info in manifest.shards:
        local_name(info)
        with suppress(OSError):  # reported when it is copied
            shard_status(source, info)
    if target.exists() and not target.is_dir():
        raise ShardError(f"{target} is a file; choose a folder")
    if target.exists() and target.samefile(source):
        raise ShardError(f"{target} is the data set itself; choose another folder")
    may_replace = (target / MANIFEST).exists()
    if may_replace and Manifest.load(target) != manifest:
        raise ShardError(
            f"{target} contains another data set, or another state of this one; choose another "
            f"folder or remove it"
        )
    _check_room(manifest, target, keep_free)
    target.mkdir(parents=True, exist_ok=True)
    there = _copy_shards(source, target, manifest, may_replace, at_once)
    if not splits:
        with replacing(target / MANIFEST) as out:
            out.write(text)
    else:
        manifest.save(target)
    return CopyResult(len(manifest.shards), sum(info.bytes for info in manifest.shards), there)


def _copy_shards(
    source: Path, target: Path, manifest: Manifest, may_replace: bool, at_once: int
) -> int:
    """Copy all shards to the target; return the bytes that already existed."""
    stopped, faults = threading.Event(), list[str]()

    def copy(number: int) -> int:
        info = manifest.shards[number]
        path, partial = target / info.file, target / f".{info.file}.part"
        how = {"stopped": stopped.is_set, "progress": bar.update}
        try:
            if path.exists():
                if is_whole(path, info, **how):
                    return info.bytes
                if not may_replace:
                    raise FileExistsError(
                        f"{path} differs from {source / info.file}; remove it, or choose another "
                        "folder"
                    )
            fetch(source / info.file, partial, info, lambda: _rename(partial, path), **how)
        except StoppedError:
            pass
        except BusyError as error:
            raise ShardError(f"{error}; wait for it, or choose another folder") from None
        except WriteError as error:
            text = f"cannot write to {target}: {error.strerror}"
            raise WriteError(error.errno, text) from error
        except (ShardError, OSError) as error:
            faults.append(f"{error}. It contains {manifest.describe_samples(number)}.")
        return 0

    total = sum(info.bytes for info in manifest.shards)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="staging", disable=None) as bar,
        ThreadPoolExecutor(at_once) as threads,
    ):
        tasks = [threads.submit(copy, number) for number in range(len(manifest.shards))]
        try:
            there = sum(task.result() for task in tasks)
        except BaseException:
            stopped.set()  # also on Ctrl-C: the threads end soon
            raise
    if faults:
        more = len(faults) - _NAMED
        text = " ".join(faults[:_NAMED]) + (f" And {more} more." if more > 0 else "")
        raise ShardError(f"{counted(len(faults), 'shard')} cannot be copied: {text}")
    fsync_folder(target)
    return there


def _check_room(manifest: Manifest, target: Path, keep_free: int | None) -> None:
    needed = 0
    for info in manifest.shards:
        there = (target / info.file, target / f".{info.file}.part")
        needed += max(0, info.bytes - sum(p.stat().st_size for p in there if p.exists()))
    disk = next(path for path in (target, *target.parents) if path.exists())
    room = DiskSpace(disk, keep_free).bytes
    if needed > room:
        raise ShardError(
            f"not enough space on the disk of {target}: {readable_bytes(needed)} required, "
            f"{readable_bytes(max(room, 0))} available besides what is kept free; free some, "
            "choose another folder, or copy fewer splits (--split)"
        )


def _rename(partial: Path, path: Path) -> None:
    apply_umask(partial)
    partial.replace(path)


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
    return run_command(lambda: _run(options), misused=FAILED)


def _run(options: argparse.Namespace) -> int:
    if options.clean:
        freed = NodeCache(options.to.absolute()).clean()
        print(f"removed {readable_bytes(freed)} of finished jobs from {options.to}")
        return OK
    done = copy_folder(
        options.source.absolute(),
        options.to.absolute(),
        options.split,
        at_once=options.jobs,
        keep_free=options.keep_free,
    )
    there = f", of which {readable_bytes(done.there)} already existed" if done.there else ""
    print(
        f"{counted(done.shards, 'shard')} ({readable_bytes(done.bytes)}) verified in "
        f"{options.to}{there}"
    )
    return OK


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
