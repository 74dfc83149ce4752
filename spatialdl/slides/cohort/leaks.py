"""Detection of leaks between splits: slides of one patient, or with the same image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spatialdl.data.tables import read_table
from spatialdl.slides.batch.finding_slides import slide_names
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.record import SlideRecord, slide_content
from spatialdl.slides.batch.resume import names_in, slide_sources
from spatialdl.slides.cohort.likeness import same_pictures, twins
from spatialdl.slides.reading.paths import slide_bytes


def check_patients(table: Path) -> None:
    """Check that no patient is in two splits, if a table has a column patient.

    Raises:
        ValueError: a patient is in two splits, or the table cannot be read.
    """
    read_table(table).check_patients(", or pass --allow-leaks")


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
    pairs = [(str(k), splits.get(k), str(other), splits.get(other)) for k, other in twins(slides)]
    names = slide_names(slides)
    lengths: dict[str, list[Path]] = {}
    for slide in slides:
        lengths.setdefault(str(slide_bytes(slide)), []).append(slide)
    for name, record in _other_records(before, slides).items():
        for slide in lengths.get(record.content.partition("-")[0], []):
            if names[slide] != name and slide_content(slide) == record.content:
                known = f"slide {name} of the data set"
                pairs.append((known, record.split, str(slide), splits.get(slide)))
    leaks = [f"{k} ({split}) and {other} ({its})" for k, split, other, its in pairs if split != its]
    if leaks and not allowed:
        raise ValueError(
            f"the same slide is in different splits: {'; '.join(leaks)}; remove one of the two, "
            "assign both to the same split, or pass --allow-leaks"
        )
    return [
        f"{k} and {other} are the same slide; its tiles count twice" for k, _, other, _ in pairs
    ]


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
    for record in _other_records(before, [*labels]).values():
        if record.split is not None and Path(record.source).exists():
            splits[Path(record.source)] = record.split
    slides = list(splits)
    pairs = same_pictures(slides, list(splits.values()), jobs=jobs)
    leaks = [" and ".join(f"{slides[k]} ({splits[slides[k]]})" for k in pair) for pair in pairs]
    if leaks:
        raise ValueError(
            f"slides in different splits have the same image: {'; '.join(leaks)}; assign both to "
            "the same split (spatialdl-split --slides does), remove one of the two, or pass "
            "--allow-leaks"
        )


def _other_records(before: Path | None, slides: Sequence[Path]) -> dict[str, SlideRecord]:
    """Records of an earlier batch, by name, without those of some slides."""
    if before is None:
        return {}
    sources = {source for slide in slides for source in slide_sources(slide)}
    records = {name: SlideRecord.load(before, name) for name in names_in(before)}
    return {name: k for name, k in records.items() if k is not None and k.source not in sources}
