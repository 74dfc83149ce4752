"""A folder of NIfTI files and TIFF stacks as a data set of volumes.

Voxels are kept as they are stored. The last dim of NIfTI, which is usually from feet to head, comes
first: (k, j, i) are slices, rows and columns; the affine says where they lie in the patient.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile
from tqdm import tqdm

from spatialdl.data.importing.clam import label_of, read_labels
from spatialdl.data.importing.image_folder import BrokenImagesError
from spatialdl.data.writer import ShardWriter

SUFFIXES = (".nii", ".nii.gz", ".tif", ".tiff")
_MILLIMETRES = {"unknown": 1.0, "mm": 1.0, "meter": 1e3, "micron": 1e-3}
_STACKS = {"ZYX", "QYX", "IYX"}


@dataclass(frozen=True)
class Volume:
    """Pixels (slices, rows, columns), their spacing in millimetres, and the affine to RAS+."""

    pixels: npt.NDArray[Any]
    spacing: tuple[float, ...] | None = None
    affine: npt.NDArray[np.float64] | None = None


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
                made = read_volume(path)
                mask = None if of_masks is None else _mask(name, of_masks)
                writer.add(
                    made.pixels,
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
        suffix = next((end for end in SUFFIXES if path.name.lower().endswith(end)), None)
        if suffix is None or path.name[0] == ".":
            continue
        name = path.name[: -len(suffix)]
        if found.setdefault(name, path) != path:
            raise ValueError(f"{found[name]} and {path} have the same name; rename one")
    if not found:
        raise ValueError(f"{folder} has no files {', '.join(SUFFIXES)} in it")
    return found


def read_volume(path: Path) -> Volume:
    """A NIfTI file, or a TIFF file of several pages, which says nothing of spacing here.

    Raises:
        ValueError: nibabel is missing, or it is no volume of one channel; others if it is damaged.
    """
    if path.suffix.lower() in (".tif", ".tiff"):
        with tifffile.TiffFile(path) as tiff:
            series: Any = tiff.series[0]
            if len(tiff.series) > 1 or series.axes not in _STACKS:
                raise ValueError(f"it has {series.axes} of {series.shape}, expected pages of grey")
            return Volume(_narrowed(series.asarray()))
    return _nifti(path)


def _nifti(path: Path) -> Volume:
    try:
        import nibabel
    except ImportError:
        raise ValueError("NIfTI needs nibabel: pip install 'spatialdl[volumes]'") from None
    image: Any = nibabel.load(path)
    if len(image.shape) < 3 or set(image.shape[3:]) - {1}:
        raise ValueError(f"it has shape {image.shape}, expected one volume; split series of them")
    pixels = np.asanyarray(image.dataobj).reshape(image.shape[:3])
    if pixels.dtype == np.float64 and image.get_data_dtype() != np.float64:
        pixels = pixels.astype(np.float32)  # integers with a slope
    scale = _MILLIMETRES[image.header.get_xyzt_units()[0]]
    if not (image.header["qform_code"] or image.header["sform_code"]):
        zooms = [float(x) * scale for x in image.header.get_zooms()[2::-1]]
        return Volume(_narrowed(pixels.T), tuple(zooms))
    affine = np.asarray(image.affine, np.float64)[:3, [2, 1, 0, 3]] * scale
    spacing = tuple(np.linalg.norm(affine[:, :3], axis=0).tolist())
    return Volume(_narrowed(pixels.T), spacing, affine)


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
    pixels = read_volume(masks[name]).pixels
    if pixels.dtype.kind == "f":  # as some programs save classes
        whole = pixels.astype(np.int64)
        if not (whole == pixels).all():
            raise ValueError(f"mask {masks[name]} has values that are no whole numbers")
        return whole
    return pixels
