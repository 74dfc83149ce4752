"""Detection of leaks between splits: slides of one patient, or with the same image."""

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
    """Check that no patient is in two splits, if a table has a column patient.

    Raises:
        ValueError: a patient is in two splits, or the table cannot be read.
    """
    labels = read_table(table)
    if PATIENT not in labels.columns:
        return
    for patient, splits in in_two_splits(labels.column(PATIENT), labels.column(SPLIT)).items():
        raise ValueError(
            f"{table}: patient {patient} is in {' and '.join(splits)}, which invalidates the "
            "evaluation; split by patient (spatialdl-split --by patient), or pass --allow-leaks"
        )


def check_pictures(
    labels: Mapping[Path, SlideLabel], before: Path | None = None, *, jobs: int = 1
) -> None:
    """Check that no two slides of different splits have the same image, re-encoded or rescanned.

    Args:
        labels: of the slides to cut.
        before: the data set that they are added to; its other slides are compared, too, if
            their files still exist.
        jobs: threads that read slides.

    Raises:
        ValueError: such slides exist.
    """
    splits = {slide: label.split for slide, label in labels.items()}
    splits |= _splits_before(before, splits)
    slides = list(splits)
    pairs = same_pictures(slides, list(splits.values()), jobs=jobs)
    leaks = [" and ".join(f"{slides[k]} ({splits[slides[k]]})" for k in pair) for pair in pairs]
    if leaks:
        raise ValueError(
            f"slides in different splits have the same image: {'; '.join(leaks)}; assign both to "
            "the same split (spatialdl-split --slides does), remove one of the two, or pass "
            "--allow-leaks"
        )


def _splits_before(before: Path | None, splits: Mapping[Path, str]) -> dict[Path, str]:
    """Splits of slides of an earlier batch that are not in `splits`."""
    if before is None:
        return {}
    sources = {source for slide in splits for source in slide_sources(slide)}
    records = [SlideRecord.load(before, name) for name in names_in(before)]
    return {
        Path(record.source): record.split
        for record in records
        if record is not None and record.split is not None
        if record.source not in sources and Path(record.source).exists()
    }
