"""Assembling a data set from finished slides: shard names, manifest, settings, coordinates.

Coordinates of tiles are stored in the formats of CLAM (wsi_core/WholeSlideImage.py) and TRIDENT
(trident/IO.py). Both hold the data set `coords`, int64 (tiles, 2): level-0 x, y of the top-left
corners. Its attributes describe the tiles: for CLAM a level and the side of a tile in pixels of
that level, for TRIDENT objective powers and the side at the target power. ::

    coords/clam/patches/NAME.h5               extract_features_fp.py --data_h5_dir DIR/coords/clam
    coords/trident/patches/NAME_patches.h5    --job_dir DIR --coords_dir coords/trident
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from spatialdl.common.files import TEMPORARY, fsync_folder, link, load_json, replacing, save_json
from spatialdl.data.folder import COORDS, SETTINGS
from spatialdl.data.format import MANIFEST, Manifest, sha256_of, shard_name
from spatialdl.data.samples import Sample, ShardInfo, TileSample
from spatialdl.errors import SlideError
from spatialdl.slides.batch.parts import stored_codec
from spatialdl.slides.batch.record import PARTS, PICTURES, RECORDS, SlideRecord
from spatialdl.slides.batch.report_page import preview_name
from spatialdl.slides.cutting.tiling import TilePlan
from spatialdl.slides.reading.reader import Slide

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


def save_coords(
    folder: Path,
    target: Path,
    slide: Slide,
    name: str,
    plan: TilePlan,
    taken: Sequence[tuple[int, int]],
) -> list[ShardInfo]:
    """Write the coordinates of a slide for both tools.

    Args:
        folder: where they are written.
        target: the final folder, recorded in the attributes.
        slide: open.
        name: of the slide.
        plan: of its tiles.
        taken: level-0 x, y of the tiles kept.

    Returns:
        The files, with paths relative to `folder`.
    """
    clam = {**_in_powers(slide, plan), **_in_levels(slide, plan)}
    trident = tile_attributes(slide, plan)
    infos = []
    for tool, file, attributes in (
        ("clam", f"{name}.h5", clam),
        ("trident", f"{name}_patches.h5", trident),
    ):
        inside = Path(COORDS, tool, "patches")
        where = os.fsencode(target / inside).decode(errors="backslashreplace")
        attrs = {**attributes, "name": name, "save_path": where, "savetodir": where}
        _write(folder / inside / file, taken, attrs)
        size = (folder / inside / file).stat().st_size
        digest = sha256_of(folder / inside / file)
        infos.append(ShardInfo(str(inside / file), size, digest, len(taken)))
    return infos


def tile_attributes(slide: Slide, plan: TilePlan) -> dict[str, object]:
    """Return the attributes of `coords`; `patch_size` is TRIDENT's, the side of a tile."""
    return {**_in_levels(slide, plan), **_in_powers(slide, plan)}


def _in_levels(slide: Slide, plan: TilePlan) -> dict[str, object]:
    """CLAM's attributes. Tiles between two levels are described in the finer one."""
    level = slide.level(plan.scale)
    down, (rows, cols) = slide.downsamples[level], slide.level_size(level)
    return {
        "patch_size": round(plan.step / down),
        "patch_level": level,
        "downsample": (down, down),
        "downsampled_level_dim": (cols, rows),
        "level_dim": (cols, rows),
    }


def _in_powers(slide: Slide, plan: TilePlan) -> dict[str, object]:
    """TRIDENT's attributes; without powers if the slide's resolution is unknown."""
    rows, cols = slide.size
    attrs: dict[str, object] = {
        "patch_size": plan.tile_size,
        "patch_size_level0": round(plan.step),
        "overlap": round((plan.step - plan.stride) / plan.scale),
        "level0_width": cols,
        "level0_height": rows,
    }
    try:
        power = slide.objective_power
    except SlideError:
        return attrs
    return {**attrs, "level0_magnification": power, "target_magnification": power / plan.scale}


def _write(path: Path, taken: Sequence[tuple[int, int]], attributes: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    with h5py.File(content, "w") as hdf5:
        coords = hdf5.create_dataset("coords", data=np.array(taken, np.int64).reshape(-1, 2))
        coords.attrs.update(attributes)
    with replacing(path) as file:
        file.write(content.getbuffer())
