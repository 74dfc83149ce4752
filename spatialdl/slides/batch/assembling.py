"""Assembling a data set from finished slides: shard names, manifest, settings."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from spatialdl.common.files import TEMPORARY, fsync_folder, link, load_json, save_json
from spatialdl.data.folder import COORDS, SETTINGS
from spatialdl.data.format import MANIFEST, Manifest, shard_name
from spatialdl.data.samples import Sample, ShardInfo, TileSample
from spatialdl.slides.batch.parts import stored_codec
from spatialdl.slides.batch.picture import preview_name
from spatialdl.slides.batch.record import PARTS, RECORDS, SlideRecord
from spatialdl.slides.batch.resume import PICTURES

PROCESS_LIST, PAGE = "process_list.csv", "report.html"


def load_settings(folder: Path) -> object:
    """Read the settings of an earlier batch; None if there is none."""
    return load_json(folder / SETTINGS)


def assemble(
    folder: Path,
    names: Sequence[str],
    classes: list[str],
    options: argparse.Namespace,
    settings: dict[str, object],
) -> int:
    """Turn the records of a batch into a data set.

    Can be repeated after an interruption: the parts are deleted last.

    Args:
        folder: where the batch was built.
        names: of the finished slides, in the order of the data set; all other slides are removed.
        classes: class names; labels are indices into them.
        options: of the command.
        settings: written beside the manifest, so that later runs can extend the data set.

    Returns:
        The number of samples of the data set.
    """
    records = [(name, record) for name in names if (record := SlideRecord.load(folder, name))]
    infos = _numbered(folder, records)
    (folder / MANIFEST).unlink(missing_ok=True)
    if infos:
        side = options.tile_size
        manifest = Manifest(
            kind="regions" if options.whole else "tiles",
            classes=classes,
            channels=3,
            codec=stored_codec(options.codec),
            tile_size=None if options.whole else (side, side),
            mpp=options.mpp,
            masks=options.whole and options.annotations is not None,
            shards=infos,
            samples=[*_samples(records)],
            made_with=settings,
        )
        manifest.save(folder)
    save_json(folder / SETTINGS, settings)
    for name, record in records:
        record.save(folder, name)
    _tidy(folder, records, {info.file for info in infos})
    return sum(len(part.taken) for _, record in records for part in record.parts)


def _numbered(folder: Path, records: Sequence[tuple[str, SlideRecord]]) -> list[ShardInfo]:
    """Link the shards of all parts to their names in the data set."""
    infos: list[ShardInfo] = []
    for _, record in records:
        for part in record.parts:
            if part.shard is not None:
                info = replace(part.shard, file=shard_name(len(infos)))
                # after an interruption, the final name may belong to a shard not yet renumbered
                link(folder / part.shard.file, folder / f"{info.file}.new")
                part.shard = info
                infos.append(info)
    for info in infos:
        (folder / f"{info.file}.new").rename(folder / info.file)
    fsync_folder(folder)
    return infos


def _samples(records: Sequence[tuple[str, SlideRecord]]) -> Iterator[Sample]:
    shard = 0
    for name, record in records:
        if record.region is not None:
            bands = tuple(replace(b, shard=shard + b.shard) for b in record.region.bands)
            yield replace(record.region, bands=bands)
            shard += len(bands)
            continue
        for part in record.parts:
            if part.shard is not None:
                for index, (x, y, label) in enumerate(part.taken):
                    yield TileSample(shard, index, label, record.split, name, x, y)
                shard += 1


def _tidy(folder: Path, records: Sequence[tuple[str, SlideRecord]], shards: set[str]) -> None:
    """Remove files that are not part of the data set: parts, and leftovers of earlier runs."""
    names = [name for name, _ in records]
    kept = {
        **{RECORDS: {f"{name}.json" for name in names}, "": shards},
        PICTURES: {k for name in names for k in (f"{name}.png", preview_name(name))},
    }
    for inside, files in kept.items():
        for path in (folder / inside).glob("*" if inside else "shard-*"):
            if path.name not in files:
                path.unlink()
    coords = {file.file for _, record in records for file in record.files}
    for path in (folder / COORDS).rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in coords:
            path.unlink()
    for path in folder.glob(TEMPORARY):
        path.unlink()
    shutil.rmtree(folder / PARTS, ignore_errors=True)
