"""The slides of a batch: files and folders as given, and a name for each."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from spatialdl.slides.reading.opening import SLIDE_SUFFIXES

_LONGEST_NAME = 240  # bytes; a file system takes 255, and files have names with more at the end


def find_slides(given: Sequence[Path], *, recursive: bool = False) -> list[Path]:
    """Files as given, folders by the slides in them, in order of their names.

    Args:
        given: files and folders.
        recursive: look in folders of folders, too.

    Raises:
        ValueError: a path is missing, or a folder has no slides.
    """
    slides: list[Path] = []
    for path in given:
        if path.is_dir():
            files = path.rglob("*") if recursive else path.iterdir()
            inside = sorted(p for p in files if p.suffix.lower() in SLIDE_SUFFIXES and p.is_file())
            if not inside:
                raise ValueError(
                    f"folder {path} has no slides in it ({' '.join(SLIDE_SUFFIXES)}); other images "
                    "are named themselves, folders in it are looked into with --recursive"
                )
            slides.extend(inside)
        elif not path.exists():
            raise ValueError(f"cannot find slide {path}: there is no such file or folder")
        else:
            slides.append(path)
    seen: dict[Path, Path] = {}
    for slide in slides:
        seen.setdefault(slide.resolve(), slide)
    return list(seen.values())


def slide_names(slides: Sequence[Path]) -> dict[Path, str]:
    """What slides are called in the data set: as short as tells them from each other.

    The file name without suffix; with it, or with the folders above, where others have the same.
    Bytes that are no UTF-8 are written out, and what is longer than a file system takes is
    shortened and ends with a digest.
    """
    # a stem of dots alone would be a folder
    names = {slide: slide.stem if slide.stem.strip(".") else slide.name for slide in slides}
    for depth in range(1, max(len(slide.resolve().parts) for slide in slides) + 1):
        for slide in _not_alone(names):
            names[slide] = "_".join(slide.resolve().parts[-depth:]).lstrip("/")
    for number, slide in enumerate(_not_alone(names), 1):
        names[slide] += f"_{number}"
    return {slide: storable(name) for slide, name in names.items()}


def storable(name: str) -> str:
    """A name as that of a file: in one folder, and no longer than a file system takes.

    What has to be changed for that ends with a digest, or two names might become one.
    """
    try:
        coded = os.fsencode(name)
    except UnicodeEncodeError:  # half of a pair of UTF-16
        coded = name.encode(errors="backslashreplace")
    whole = coded.decode(errors="backslashreplace")
    plain = re.sub(r"[/\0]", "_", whole)
    if plain == whole and len(whole.encode()) <= _LONGEST_NAME and whole.strip("."):
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return plain.encode()[: _LONGEST_NAME - 13].decode(errors="ignore") + "-" + digest


def _not_alone(names: dict[Path, str]) -> list[Path]:
    # a file system may not tell capitals apart
    times = Counter(name.casefold() for name in names.values())
    return [slide for slide, name in names.items() if times[name.casefold()] > 1]
