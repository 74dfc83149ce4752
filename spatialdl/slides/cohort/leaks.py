"""Slides that would spoil what is measured: of one patient, or alike, in two splits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spatialdl.data.slide_table import PATIENT, SPLIT, read_table
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.record import SlideRecord
from spatialdl.slides.batch.resume import names_in, slide_sources
from spatialdl.slides.cohort.likeness import same_pictures
from spatialdl.slides.cohort.splitting import in_two_splits


def check_patients(table: Path) -> None:
    """Refuse the same patient in two splits, where a table has a column of patients.

    Raises:
        ValueError: there is one, or the table cannot be read.
    """
    labels = read_table(table)
    if PATIENT not in labels.columns:
        return
    for patient, splits in in_two_splits(labels.column(PATIENT), labels.column(SPLIT)).items():
        raise ValueError(
            f"{table}: patient {patient} is in {' and '.join(splits)}, which spoils "
            "what is measured; divide by patient (spatialdl-split --by patient), or pass "
            "--allow-leaks"
        )


def check_pictures(
    labels: Mapping[Path, SlideLabel], before: Path | None = None, *, jobs: int = 1
) -> None:
    """Refuse slides in two splits that show the same picture, stored or scanned again.

    Args:
        labels: of the slides to be cut.
        before: the data set that they are added to; its other slides are compared, too, where
            their files are where they were.
        jobs: threads that read slides.

    Raises:
        ValueError: there are some.
    """
    splits = {slide: label.split for slide, label in labels.items()}
    splits |= _splits_before(before, splits)
    slides = list(splits)
    pairs = same_pictures(slides, list(splits.values()), jobs=jobs)
    apart = [" and ".join(f"{slides[k]} ({splits[slides[k]]})" for k in pair) for pair in pairs]
    if apart:
        raise ValueError(
            f"slides in different splits show the same: {'; '.join(apart)}; give both the same "
            "split (spatialdl-split --slides does), leave one of the two out, or pass --allow-leaks"
        )


def _splits_before(before: Path | None, given: Mapping[Path, str]) -> dict[Path, str]:
    """Splits of the slides of an earlier batch that are not given now."""
    if before is None:
        return {}
    sources = {source for slide in given for source in slide_sources(slide)}
    records = [SlideRecord.load(before, name) for name in names_in(before)]
    return {
        Path(record.source): record.split
        for record in records
        if record is not None and record.split is not None
        if record.source not in sources and Path(record.source).exists()
    }
