"""Slides that are the same, under two names: in two splits they would spoil what is measured."""

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
    """Look for slides with the same contents, among those given and those of an earlier batch.

    Only slides of the same length are read.

    Args:
        slides: as given.
        labels: of them, if there are any.
        before: the data set that they are added to.
        allowed: whether they may be in different splits.

    Returns:
        A sentence for each two that are the same.

    Raises:
        ValueError: two that are the same are in different splits.
    """
    splits = {slide: label.split for slide, label in labels.items()}
    found = []
    for one, other in twins(slides):
        found.append((str(one), splits.get(one), str(other), splits.get(other)))
    for slide, name, split in _known(slides, before):
        found.append((f"slide {name} of the data set", split, str(slide), splits.get(slide)))
    apart = [
        f"{one} ({split}) and {other} ({other_split})"
        for one, split, other, other_split in found
        if split != other_split
    ]
    if apart and not allowed:
        raise ValueError(
            f"the same slide is in different splits: {'; '.join(apart)}; leave one of the two out, "
            "give both the same split, or pass --allow-leaks"
        )
    return [
        f"{one} and {other} are the same slide; its tiles count twice" for one, _, other, _ in found
    ]


def twins(slides: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Pairs of slides whose bytes are the same; only those of one length are read."""
    lengths: dict[int, list[Path]] = {}
    for slide in slides:
        lengths.setdefault(slide_bytes(slide), []).append(slide)
    contents: dict[str, list[Path]] = {}
    for alike in lengths.values():
        for slide in alike if len(alike) > 1 else []:
            contents.setdefault(slide_content(slide), []).append(slide)
    return [two for alike in contents.values() for two in pairwise(alike) if _same(*two)]


def _same(one: Path, other: Path) -> bool:
    """Whether all bytes are the same, also of what OpenSlide reads beside a file."""
    files = zip(slide_files(one), slide_files(other), strict=True)
    if not all(filecmp.cmp(mine, theirs, shallow=False) for mine, theirs in files):
        return False
    try:
        with Slide(one) as mine, Slide(other) as theirs:
            return mine.quickhash == theirs.quickhash
    except SlideError:
        return False  # the report says why


def _known(slides: Sequence[Path], before: Path | None) -> list[tuple[Path, str, str | None]]:
    """Slides that an earlier batch has from another place, and by another name."""
    if before is None:
        return []
    names = slide_names(slides)
    lengths: dict[str, list[Path]] = {}
    for slide in slides:
        lengths.setdefault(str(slide_bytes(slide)), []).append(slide)
    sources = {source for slide in slides for source in slide_sources(slide)}
    found = []
    for name in names_in(before):
        record = SlideRecord.load(before, name)
        if record is None or record.source in sources:
            continue
        for slide in lengths.get(record.content.partition("-")[0], []):
            if names[slide] != name and slide_content(slide) == record.content:
                found.append((slide, name, record.split))
    return found
