"""Detection of duplicate slides; in different splits they would invalidate the evaluation."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from spatialdl.errors import SlideError
from spatialdl.slides.batch.finding_slides import slide_names
from spatialdl.slides.batch.identity import slide_content
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.record import SlideRecord
from spatialdl.slides.batch.resume import names_in, slide_sources
from spatialdl.slides.reading.paths import slide_bytes, slide_files
from spatialdl.slides.reading.reader import Slide


def check_duplicates(
    slides: Sequence[Path],
    labels: Mapping[Path, SlideLabel],
    before: Path | None,
    *,
    allowed: bool = False,
) -> list[str]:
    """Search for slides with equal contents, within a run and between it and an earlier batch.

    Only slides of the same length are read.

    Args:
        slides: of this run.
        labels: of the slides, may be empty.
        before: the data set that they are added to.
        allowed: accept duplicates in different splits.

    Returns:
        A warning for each pair of duplicates.

    Raises:
        ValueError: duplicates are in different splits.
    """
    splits = {slide: label.split for slide, label in labels.items()}
    pairs = []
    for first, second in twins(slides):
        pairs.append((str(first), splits.get(first), str(second), splits.get(second)))
    for slide, name, split in _known(slides, before):
        pairs.append((f"slide {name} of the data set", split, str(slide), splits.get(slide)))
    leaks = [
        f"{first} ({split}) and {second} ({second_split})"
        for first, split, second, second_split in pairs
        if split != second_split
    ]
    if leaks and not allowed:
        raise ValueError(
            f"the same slide is in different splits: {'; '.join(leaks)}; remove one of the two, "
            "assign both to the same split, or pass --allow-leaks"
        )
    return [
        f"{first} and {second} are the same slide; its tiles count twice"
        for first, _, second, _ in pairs
    ]


def twins(slides: Sequence[Path]) -> list[tuple[Path, Path]]:
    """List pairs of slides with equal bytes; only slides of the same length are read."""
    lengths: dict[int, list[Path]] = {}
    for slide in slides:
        lengths.setdefault(slide_bytes(slide), []).append(slide)
    contents: dict[str, list[Path]] = {}
    for group in lengths.values():
        for slide in group if len(group) > 1 else []:
            contents.setdefault(slide_content(slide), []).append(slide)
    return [pair for group in contents.values() for pair in pairwise(group) if _same(*pair)]


def _same(first: Path, second: Path) -> bool:
    """Whether all bytes are equal, those of OpenSlide's companion files included."""
    files = zip(slide_files(first), slide_files(second), strict=True)
    if not all(filecmp.cmp(*pair, shallow=False) for pair in files):
        return False
    try:
        with Slide(first) as slide, Slide(second) as other:
            return slide.quickhash == other.quickhash
    except SlideError:
        return False  # the report has the error


def _known(slides: Sequence[Path], before: Path | None) -> list[tuple[Path, str, str | None]]:
    """Slides that an earlier batch has under another path and another name."""
    if before is None:
        return []
    names = slide_names(slides)
    lengths: dict[str, list[Path]] = {}
    for slide in slides:
        lengths.setdefault(str(slide_bytes(slide)), []).append(slide)
    sources = {source for slide in slides for source in slide_sources(slide)}
    matches = []
    for name in names_in(before):
        record = SlideRecord.load(before, name)
        if record is None or record.source in sources:
            continue
        for slide in lengths.get(record.content.partition("-")[0], []):
            if names[slide] != name and slide_content(slide) == record.content:
                matches.append((slide, name, record.split))
    return matches
