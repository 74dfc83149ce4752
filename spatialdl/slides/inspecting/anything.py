"""Description of slides, data sets, shards, coordinate files and folders of them."""

from __future__ import annotations

import os
from pathlib import Path

from tqdm import tqdm

from spatialdl.data.format import MANIFEST
from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.inspecting.apart import describe_apart
from spatialdl.slides.inspecting.dataset import describe_dataset
from spatialdl.slides.inspecting.hdf5 import HDF5_START, hdf5_in_a_line
from spatialdl.slides.inspecting.slide import HEADS, describe_slide, slide_in_a_line
from spatialdl.slides.reading.opening import PLAIN_SUFFIXES
from spatialdl.slides.reading.paths import SLIDE_SUFFIXES, series_at, slides_among
from spatialdl.text import aligned, fitted

_HDF5_SUFFIXES = (".h5", ".hdf5")
_CLAM = "coords/clam/patches"  # TRIDENT's files have the same coordinates
_LONGEST_NAME = 64  # characters; DICOM UIDs have up to 64


def inspect(path: str | os.PathLike[str]) -> str:
    """Describe a slide, a data set folder, one of its shards, or a file of coordinates.

    For a folder of slides, of folders with one DICOM series each, or of HDF5 files, the result has
    one line for each, with the error if it cannot be read.

    Raises:
        SlideError: there is no such file, or it cannot be read as a slide.
        ShardError: a data set or an HDF5 file is damaged, or a folder has no such files.
    """
    path = Path(path)
    if path.is_dir():
        if (path / MANIFEST).exists():
            return describe_dataset(path)
        if series_at(path) is not None:
            return describe_slide(path)
        return _folder(path / _CLAM if (path / _CLAM).is_dir() else path)
    return describe_apart(path) if _is_hdf5(path) else describe_slide(path)


def _is_hdf5(path: Path) -> bool:
    if path.suffix.lower() in _HDF5_SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(HDF5_START)) == HDF5_START
    except OSError:
        return False  # opening it as a slide raises the error


def _folder(path: Path) -> str:
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise ShardError(f"cannot read folder {path}: {error.strerror}") from error
    files = [entry for entry in inside if entry.is_file()]
    folders = [entry for entry in inside if entry.is_dir()]
    series = [folder for folder in folders if series_at(folder) is not None]
    plain = [file for file in files if file.suffix.lower() in PLAIN_SUFFIXES]
    slides = sorted([*slides_among(path, files), *plain, *series])
    stored = [f for f in files if f.suffix.lower() in _HDF5_SUFFIXES]
    if not slides and not stored:
        other = f"one of the folders in it, such as {folders[0].name}" if folders else "another"
        raise ShardError(
            f"folder {path} has no {MANIFEST}, no slides ({' '.join(SLIDE_SUFFIXES)}), no folders "
            f"of one DICOM series and no HDF5 files in it; give {other}"
        )
    rows: list[tuple[str, ...]] = [HEADS]
    notes = [""]
    for file in tqdm(slides, "slides", unit="slide", disable=None, leave=False):
        cells, note = _line(file)
        rows.append((fitted(file.name, _LONGEST_NAME), *cells))
        notes.append(note)
    lines = []
    if slides:
        # notes after the table: a long note would widen a column for all rows
        table = aligned(rows, left=(0, 1))
        lines = [f"{line}  {note}".rstrip() for line, note in zip(table, notes, strict=True)]
    for file in stored:
        name = fitted(file.name, _LONGEST_NAME)
        try:
            lines.append(f"{name}  {hdf5_in_a_line(file)}")
        except ShardError as error:
            lines.append(f"{name}  {_one_line(error)}")
    return "\n".join(lines)


def _line(file: Path) -> tuple[tuple[str, ...], str]:
    try:
        return slide_in_a_line(file)
    except SlideError as error:
        # the line begins with the name
        why = _one_line(error).removeprefix(f"cannot open slide {file}: ")
        return ("",) * (len(HEADS) - 1), why


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
