"""A folder of NIfTI files and TIFF stacks as a data set of volumes.

Voxels are kept as they are stored; the affine says where they lie in the patient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from spatialdl.data.importing.clam import label_of, read_labels
from spatialdl.data.importing.image_folder import BrokenImagesError
from spatialdl.data.importing.volume_file import SUFFIXES, is_volume, open_volume, volume_name
from spatialdl.data.writer import ShardWriter


def import_volumes(
    folder: Path,
    out: Path,
    *,
    masks: Path | None = None,
    labels: Path | None = None,
    skip_broken: bool = False,
    progress: bool = True,
    **settings: Any,
) -> list[str]:
    """Write a data set of a folder of volumes; each is read whole.

    Args:
        folder: of the files; their names without suffix are those of the samples.
        out: the data set to be made.
        masks: folder of a mask for each, of the same name, with classes 0 to 255.
        labels: a table of columns slide_id (the name), label and, if wanted, split.
        skip_broken: leave out what cannot be read or does not fit the volumes before it.
        progress: show a bar, where somebody looks at it.
        settings: of `ShardWriter`.

    Returns:
        What was wrong with the volumes that were left out.

    Raises:
        BrokenImagesError: some cannot be read, and `skip_broken` is false; or all of them.
        ValueError: there are no files, two of one name, or one that has no label.
    """
    files = find_volumes(folder)
    of_masks = None if masks is None else find_volumes(masks)
    known = {} if labels is None else read_labels(labels)
    given = {name: label_of(name, known, labels) for name in files}
    classes = sorted({label.label for label in given.values() if label is not None})
    broken: list[str] = []
    off = None if progress else True
    with ShardWriter(out, classes, kind="volumes", **settings) as writer:
        for name, path in tqdm(files.items(), "volumes", disable=off, leave=False):
            label = given[name]
            try:
                made = open_volume(path)
                mask = None if of_masks is None else _mask(name, of_masks)
                writer.add(
                    _narrowed(made.read()),
                    label.label if label else None,
                    label.split if label else None,
                    slide=name,
                    mask=mask,
                    spacing=made.spacing,
                    affine=made.affine,
                )
            except Exception as error:  # what decoders raise of damaged files is anything
                broken.append(f"{path}: {' '.join(str(error).split()) or type(error).__name__}")
        if broken and (not skip_broken or len(broken) == len(files)):
            raise BrokenImagesError(broken, len(files))
    return broken


def find_volumes(folder: Path) -> dict[str, Path]:
    """The files of a folder by name without suffix.

    Raises:
        ValueError: there is no such folder, none in it, or two of one name.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one of {', '.join(SUFFIXES)} files")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if not is_volume(path):
            continue
        name = volume_name(path)
        if found.setdefault(name, path) != path:
            raise ValueError(f"{found[name]} and {path} have the same name; rename one")
    if not found:
        raise ValueError(f"{folder} has no files {', '.join(SUFFIXES)} in it")
    return found


def _narrowed(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Integers of types that are not stored as int16 or uint16, where all values fit."""
    if pixels.dtype.kind in "iu" and pixels.dtype.name not in ("uint8", "uint16", "int16"):
        for dtype in (np.int16, np.uint16):
            if np.iinfo(dtype).min <= pixels.min() and pixels.max() <= np.iinfo(dtype).max:
                return pixels.astype(dtype)
    return pixels


def _mask(name: str, masks: dict[str, Path]) -> npt.NDArray[Any]:
    if name not in masks:
        raise ValueError(f"there is no mask of the name {name}")
    found = open_volume(masks[name])
    if found.channels > 1:
        raise ValueError(f"mask {masks[name]} has {found.channels} channels, expected one")
    pixels = _narrowed(found.read()[..., 0])
    if pixels.dtype.kind == "f":  # as some programs save classes
        whole = pixels.astype(np.int64)
        if not (whole == pixels).all():
            raise ValueError(f"mask {masks[name]} has values that are no whole numbers")
        return whole
    return pixels
