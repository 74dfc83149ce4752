"""Look-up of companion files of a slide by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spatialdl.errors import SlideError
from spatialdl.slides.reading.paths import slide_aliases, slide_files


def find_beside(folder: Path, slide: Path, suffixes: Sequence[str], what: str) -> Path:
    """Find the file in `folder` named like a slide: `a.png` or `a.svs.png` for `a.svs`.

    For a DICOM series, the name is that of its folder, if it has no other slide, or its UID.

    Args:
        folder: may be the slide's own; the slide itself does not match.
        slide: the slide.
        suffixes: of the file, in lower or upper case.
        what: kind of file for messages, such as "mask".

    Raises:
        SlideError: no file matches, or more than one.
    """
    matches: list[Path] = []
    names, own = slide_aliases(slide), slide_files(slide)
    for name in names:
        for suffix in suffixes:
            for path in (folder / f"{name}{suffix}", folder / f"{name}{suffix.upper()}"):
                # on case-insensitive file systems both paths are the same file
                if path.is_file() and not any(path.samefile(k) for k in (*own, *matches)):
                    matches.append(path)
    if not matches:
        raise SlideError(
            f"slide {slide} has no {what}: there is no {names[0]}{suffixes[0]} in {folder} "
            f"(nor {', '.join(suffixes[1:])})"
        )
    if len(matches) > 1:
        names = " and ".join(path.name for path in matches)
        raise SlideError(f"slide {slide} has more than one {what} in {folder}: {names}; keep one")
    return matches[0]
