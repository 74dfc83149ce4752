"""Coordinate files in the formats of CLAM and TRIDENT.

Both hold the data set `coords`, int64 (tiles, 2): level-0 x, y of the top-left corners. Its
attributes describe the tiles: for CLAM a level and the side of a tile in pixels of that level, for
TRIDENT objective powers and the side at the target power. ::

    coords/clam/patches/NAME.h5               extract_features_fp.py --data_h5_dir DIR/coords/clam
    coords/trident/patches/NAME_patches.h5    --job_dir DIR --coords_dir coords/trident

Attributes as in CLAM (wsi_core/WholeSlideImage.py) and TRIDENT (trident/IO.py).
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from spatialdl.common.files import replacing
from spatialdl.data.folder import COORDS
from spatialdl.data.format import sha256_of
from spatialdl.data.samples import ShardInfo
from spatialdl.errors import SlideError
from spatialdl.slides.cutting.tiling import TilePlan
from spatialdl.slides.reading.reader import Slide


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
