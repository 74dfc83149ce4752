"""The slides that a command names. No PyTorch here: it is asked before there are ranks."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from spatialdl.slides.batch.finding_slides import find_slides
from spatialdl.slides.reading.paths import series_at


def given_slides(given: Any) -> list[Path]:
    """Files, folders and patterns as files.

    Raises:
        ValueError: one of them is not there, or matches nothing.
    """
    paths: list[Path] = []
    for one in given if isinstance(given, list | ListConfig) else [given]:
        path = Path(str(one)).expanduser()
        there = path.exists() or series_at(path) is not None
        found = [path] if there else _matching(str(path))
        if not found:
            raise ValueError(f"slides={one} matches no file or folder")
        paths += found
    if not paths:
        raise ValueError("slides=[] names no slide")
    try:
        return find_slides(paths)
    except ValueError as error:
        nested = "those in folders of folders by a pattern such as 'FOLDER/**/*.svs'"
        text = str(error).replace("folders in it are looked into with --recursive", nested)
        raise ValueError(text) from error


def _matching(pattern: str) -> list[Path]:
    """``**`` stands for any folders."""
    return [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
