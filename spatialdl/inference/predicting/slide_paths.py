"""Paths of a command's slides and volumes, found before ranks start, without PyTorch."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from spatialdl.data.importing.volume_file import SUFFIXES, is_volume, volume_name, volumes_in
from spatialdl.data.importing.volume_files.dicom import find_series
from spatialdl.slides.batch.finding_slides import find_slides, slide_names
from spatialdl.slides.reading.paths import series_at


def slide_paths(given: Any) -> list[Path]:
    """Expand files, folders and patterns to the slides they contain.

    Raises:
        ValueError: one of them does not exist, or matches nothing.
    """
    paths = _paths(given, "slides", is_there)
    try:
        return find_slides(paths)
    except ValueError as error:
        nested = "those in folders of folders by a pattern such as 'FOLDER/**/*.svs'"
        text = str(error).replace("search subfolders with --recursive", nested)
        raise ValueError(text) from error


def volume_paths(given: Any) -> list[Path]:
    """Expand files, folders and patterns to volumes: files, OME-Zarr stores, DICOM series.

    A series of several files is represented by its folder.

    Raises:
        ValueError: one of them does not exist, or its name is not that of a volume.
    """
    files: dict[Path, None] = {}
    for path in _paths(given, "volumes", Path.exists):
        found = [path] if is_volume(path) else _inside(path)
        if not found:
            what = "contains no files" if path.is_dir() else "is not a file"
            raise ValueError(f"volumes={path} {what} of {', '.join(SUFFIXES)} or DICOM")
        files |= dict.fromkeys(found)
    return list(files)


def _inside(path: Path) -> list[Path]:
    if path.is_dir():
        files, dicom = volumes_in(path)
    else:
        files, dicom = [], find_series(path.parent, [path])
    return files + sorted({one.path for one in dicom.series.values()})


def volume_names(volumes: Sequence[Path]) -> dict[Path, str]:
    """Names without suffix; with parent folders where several are the same."""
    return slide_names(volumes, volume_name)


def _paths(given: Any, key: str, exists: Callable[[Path], bool]) -> list[Path]:
    """Existing files and folders as given, and those that match patterns."""
    paths: list[Path] = []
    for one in given if isinstance(given, list | ListConfig) else [given]:
        path = Path(str(one)).expanduser()
        found = matching(path, exists)
        if not found:
            raise ValueError(f"{key}={one} matches no file or folder")
        paths += found
    if not paths:
        raise ValueError(f"{key}=[] names no {key.removesuffix('s')}")
    return paths


def is_there(path: Path) -> bool:
    """Whether a path is a file, a folder, or a folder's DICOM series of a UID."""
    return path.exists() or series_at(path) is not None


def matching(path: Path, exists: Callable[[Path], bool] = is_there) -> list[Path]:
    """A path, or the paths that match it as a pattern; ``**`` matches any number of folders."""
    if exists(path):
        return [path]
    return [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]
