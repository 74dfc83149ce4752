"""Data sets written in parts by several processes, and joined at the end.

A part is a separate data set folder, in a hidden sibling of the target. Joining renumbers the
shards, hard-links the files instead of copying, and writes the manifest.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from spatialdl.common.files import link
from spatialdl.data.folder import FolderInProgress
from spatialdl.data.format import Manifest, shard_name, shard_problem
from spatialdl.data.samples import Sample, ShardInfo, with_shards
from spatialdl.errors import ShardError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_OWN = ("shards", "samples", "made_with")  # fields in which parts may differ


def parts_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of the parts of a data set, until they are joined."""
    target = Path(path).resolve()
    return target.with_name(f".{target.name}.parts")


def part_folder(path: str | os.PathLike[str], part: str) -> Path:
    """The folder of one part of a data set.

    Raises:
        ValueError: the name is invalid.
    """
    if not _NAME.fullmatch(part):
        raise ValueError(
            f"part is {part!r}, expected a name of 1 to 64 letters, digits, '-' and '_'"
        )
    return parts_folder(path) / part


def join_parts(
    path: str | os.PathLike[str], parts: Sequence[str], *, overwrite: bool = False
) -> None:
    """Join parts that `ShardWriter(path, part=...)` wrote into a data set.

    Samples are in the order of the parts, and within each in the order in which they were added.
    Parts that are not listed are removed. On an error all parts are kept.

    Args:
        path: the folder to create.
        parts: names of all parts.
        overwrite: replace an existing data set of that name.

    Raises:
        ShardError: a part is missing, unfinished or damaged, parts differ, all are empty, or the
            folder exists and `overwrite` is false.
        ValueError: an invalid or duplicate name.
    """
    if isinstance(parts, str) or len(set(parts)) != len(parts):
        raise ValueError(f"parts is {parts!r}, expected a list of distinct names")
    folders = [part_folder(path, part) for part in parts]
    manifests = [_loaded(folder) for folder in folders]
    filled = [
        (folder, made) for folder, made in zip(folders, manifests, strict=True) if made.samples
    ]
    if not filled:
        raise ShardError(f"no samples were added, so the data set {path} was not written")
    _check_alike(filled)
    target = FolderInProgress(path, overwrite=overwrite)
    try:
        infos = _numbered(filled, target.path)
        samples = list(_samples(made for _, made in filled))
        replace(filled[0][1], shards=infos, samples=samples).save(target.path)
        target.publish()
    except BaseException:
        target.discard()
        raise
    remove_parts(path)


def remove_parts(path: str | os.PathLike[str]) -> None:
    """Remove all parts of a data set."""
    shutil.rmtree(parts_folder(path), ignore_errors=True)


def _loaded(folder: Path) -> Manifest:
    try:
        manifest = Manifest.load(folder)
    except ShardError as error:
        raise ShardError(f"part {folder.name!r} is missing or unfinished: {error}") from None
    for info in manifest.shards:
        if problem := shard_problem(folder, info, contents=False):
            path = folder / info.file
            raise ShardError(f"part {folder.name!r} is damaged: {path} {problem}; write it again")
    return manifest


def _check_alike(parts: Sequence[tuple[Path, Manifest]]) -> None:
    first, *others = parts
    for folder, manifest in others:
        for name in (field.name for field in fields(Manifest) if field.name not in _OWN):
            mine, theirs = getattr(manifest, name), getattr(first[1], name)
            if mine != theirs:
                raise ShardError(
                    f"parts differ in {name}: {theirs!r} in {first[0].name!r}, {mine!r} in "
                    f"{folder.name!r}; write them with the same settings"
                )


def _numbered(parts: Sequence[tuple[Path, Manifest]], target: Path) -> list[ShardInfo]:
    infos: list[ShardInfo] = []
    for folder, manifest in parts:
        for info in manifest.shards:
            infos.append(replace(info, file=shard_name(len(infos))))
            link(folder / info.file, target / infos[-1].file)
    return infos


def _samples(manifests: Iterable[Manifest]) -> Iterable[Sample]:
    first = 0
    for manifest in manifests:
        for sample in manifest.samples:
            yield with_shards(sample, first.__add__)
        first += len(manifest.shards)
