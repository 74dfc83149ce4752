"""Files that belong to a slide by their name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spatialdl.errors import SlideError
from spatialdl.slides.reading.paths import slide_aliases, slide_files


def find_beside(folder: Path, slide: Path, suffixes: Sequence[str], what: str) -> Path:
    """The file in `folder` that is named like a slide: `a.png` or `a.svs.png` for `a.svs`.

    Of a DICOM series it has the name of its folder, where that has no other slide, or its UID.

    Args:
        folder: may be the slide's own; the slide itself is not its own mask.
        slide: the slide.
        suffixes: of the files looked for, in small or in capital letters.
        what: "mask" and the like, for messages.

    Raises:
        SlideError: there is none, or more than one.
    """
    found: list[Path] = []
    names, own = slide_aliases(slide), slide_files(slide)
    for name in names:
        for suffix in suffixes:
            for path in (folder / f"{name}{suffix}", folder / f"{name}{suffix.upper()}"):
                # a file system may take both spellings for one file
                if path.is_file() and not any(path.samefile(k) for k in (*own, *found)):
                    found.append(path)
    if not found:
        raise SlideError(
            f"slide {slide} has no {what}: there is no {names[0]}{suffixes[0]} in {folder} "
            f"(nor {', '.join(suffixes[1:])})"
        )
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise SlideError(f"slide {slide} has more than one {what} in {folder}: {names}; keep one")
    return found[0]
