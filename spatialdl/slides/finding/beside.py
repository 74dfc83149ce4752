"""Files that belong to a slide by their name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spatialdl.errors import SlideError


def find_beside(folder: Path, slide: Path, suffixes: Sequence[str], what: str) -> Path:
    """The file in `folder` that is named like a slide: `a.png` or `a.svs.png` for `a.svs`.

    Args:
        folder: may be the slide's own; the slide itself is not its own mask.
        slide: the slide.
        suffixes: of the files looked for, in small or in capital letters.
        what: "mask" and the like, for messages.

    Raises:
        SlideError: there is none, or more than one.
    """
    found: list[Path] = []
    for name in dict.fromkeys((slide.stem, slide.name)):
        for suffix in suffixes:
            for path in (folder / f"{name}{suffix}", folder / f"{name}{suffix.upper()}"):
                # a file system may take both spellings for one file
                if path.is_file() and not any(path.samefile(k) for k in (slide, *found)):
                    found.append(path)
    if not found:
        raise SlideError(
            f"slide {slide} has no {what}: there is no {slide.stem}{suffixes[0]} in {folder} "
            f"(nor {', '.join(suffixes[1:])})"
        )
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise SlideError(f"slide {slide} has more than one {what} in {folder}: {names}; keep one")
    return found[0]
