"""Files of coordinates that the tools of CLAM and TRIDENT read in place of their own.

Both hold `coords`, int64 (tiles, 2): level-0 x, y of the top-left corners, and describe the tiles
by attributes of it, each in its own terms: CLAM names a level and the side of a tile in its
pixels, TRIDENT powers of the objective and the side at the power that was wanted. ::

    coords/clam/patches/NAME.h5               extract_features_fp.py --data_h5_dir DIR/coords/clam
    coords/trident/patches/NAME_patches.h5    --job_dir DIR --coords_dir coords/trident

Attributes after CLAM (wsi_core/WholeSlideImage.py) and TRIDENT (trident/IO.py).
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from spatialdl.data.folder import COORDS
from spatialdl.data.format import ShardInfo, sha256_of
from spatialdl.data.saving import replacing
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
        target: where they will lie in the end; the attributes tell.
        slide: open.
        name: of the slide.
        plan: of its tiles.
        taken: level-0 x, y of those that are kept.

    Returns:
        The files, by their paths in `folder`.
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
        said = {**attributes, "name": name, "save_path": where, "savetodir": where}
        _write(folder / inside / file, taken, said)
        size = (folder / inside / file).stat().st_size
        digest = sha256_of(folder / inside / file)
        infos.append(ShardInfo(str(inside / file), size, digest, len(taken)))
    return infos


def tile_attributes(slide: Slide, plan: TilePlan) -> dict[str, object]:
    """What `coords` says of the tiles: `patch_size` is TRIDENT's, the side of a tile."""
    return {**_in_levels(slide, plan), **_in_powers(slide, plan)}


def _in_levels(slide: Slide, plan: TilePlan) -> dict[str, object]:
    """As CLAM has it. Between two levels tiles are those of the finer one, with more pixels."""
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
    """As TRIDENT has it; without powers where the slide's resolution is not known."""
    rows, cols = slide.size
    said: dict[str, object] = {
        "patch_size": plan.tile_size,
        "patch_size_level0": round(plan.step),
        "overlap": round((plan.step - plan.stride) / plan.scale),
        "level0_width": cols,
        "level0_height": rows,
    }
    try:
        power = slide.objective_power
    except SlideError:
        return said
    return {**said, "level0_magnification": power, "target_magnification": power / plan.scale}


def _write(path: Path, taken: Sequence[tuple[int, int]], attributes: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    with h5py.File(content, "w") as made:
        coords = made.create_dataset("coords", data=np.array(taken, np.int64).reshape(-1, 2))
        coords.attrs.update(attributes)
    with replacing(path) as file:
        file.write(content.getbuffer())
