"""Verification of a data set against its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from spatialdl.data.folder import COORDS
from spatialdl.data.format import MANIFEST, Manifest, sha256_of, shard_status
from spatialdl.data.samples import ShardInfo
from spatialdl.errors import ShardError
from spatialdl.slides.batch.record import SlideRecord
from spatialdl.slides.batch.resume import names_in
from spatialdl.text import counted, readable_bytes


@dataclass(frozen=True)
class Verified:
    """Result of a verification.

    Attributes:
        path: the data set.
        shards, bytes: number and total size of its shards, from its manifest.
        problems: a sentence for every missing, damaged or replaced shard, with its damaged
            samples; empty if there are none.
    """

    path: Path
    shards: int
    bytes: int
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        """Return whether all files have their checksums."""
        return not self.problems

    def __str__(self) -> str:
        """Return the result in lines of text."""
        what = f"{counted(self.shards, 'shard')}, {readable_bytes(self.bytes)}"
        if not self.problems:
            return f"{self.path}: {what}, all checksums match"
        head = (
            f"{self.path}: {len(self.problems)} of {counted(self.shards, 'shard')} damaged; "
            "copy or write the data set again"
        )
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


def verify(path: str | os.PathLike[str], progress: bool = True) -> Verified:
    """Compare every file of a data set with its recorded size and checksum.

    These are the shards of the manifest or, for `spatialdl-tile --format coords`, the files of
    coordinates. Verification continues after damaged files.

    Args:
        path: the data set folder.
        progress: show a progress bar on a terminal.

    Raises:
        ShardError: the folder is missing, or its manifest is missing or damaged.
    """
    path = Path(path)
    try:
        coords = (path / COORDS).is_dir() and not (path / MANIFEST).exists()
    except OSError as error:
        raise ShardError(f"cannot read folder {path}: {error.strerror}") from error
    manifest = None if coords else Manifest.load(path)
    shards = _files_of_coords(path) if manifest is None else manifest.shards
    total = sum(shard.bytes for shard in shards)
    problems = []
    off = None if progress else True
    with tqdm(total=total, unit="B", unit_scale=True, disable=off, leave=False) as bar:
        for number, shard in enumerate(shards):
            bar.set_description(shard.file)
            problem = _problem(path, shard, bar.update)
            if problem and manifest is not None and os.path.isfile(path / shard.file):
                problem += f"; it contains {manifest.describe_samples(number)}"
            if problem:
                problems.append(f"{shard.file}: {problem}")
    return Verified(path, len(shards), total, tuple(problems))


def _files_of_coords(path: Path) -> list[ShardInfo]:
    records = [(name, SlideRecord.load(path, name)) for name in names_in(path)]
    damaged = [name for name, record in records if record is None]
    if damaged or not records:
        what = f"the record of {damaged[0]}" if damaged else "every record"
        raise ShardError(f"data set {path}: {what} is missing or damaged; write it again")
    return [file for _, record in records if record is not None for file in record.files]


def _problem(folder: Path, shard: ShardInfo, progress: Callable[[int], object]) -> str:
    try:
        size = shard_status(folder, shard).st_size
        if size != shard.bytes:
            progress(shard.bytes)
            return f"has {size} bytes, expected {shard.bytes}; it was truncated or replaced"
        actual = sha256_of(folder / shard.file, progress)
    except ShardError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if actual != shard.sha256:
        return f"its contents changed (SHA-256 {actual[:12]}..., expected {shard.sha256[:12]}...)"
    return ""
