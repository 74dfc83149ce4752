"""HTML report and CSV of a cohort: measures by split, outliers first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.data.format import order_splits
from spatialdl.data.saving import save_table
from spatialdl.data.slide_table import PATIENT, SPLIT
from spatialdl.pages.writing import as_svg, save_page
from spatialdl.slides.cohort.measuring import MEASURES, SlideMeasures
from spatialdl.slides.cohort.outliers import outlying
from spatialdl.text import counted

LABEL, SCANNER, PREDICTED = "label", "scanner", "predicted"
_COLOURS = ("#1f5fa8", "#d1701f", "#2f8f5b", "#8a4fa3", "#8a8a8a")
_MOST_VALUES = 12
_AXES = {
    "mpp": "micrometres per pixel",
    "tissue_mm2": "tissue, mm²",
    "tissue_percent": "tissue, % of the slide",
    "hematoxylin": "hematoxylin, optical density",
    "eosin": "eosin, optical density",
    "brightness": "brightness of tissue, 0 to 255",
    "blur": "blur, 0 (sharp) to 1",
    "tiles": "tiles",
}


@dataclass(frozen=True)
class CohortSlide:
    """A slide of a cohort.

    Attributes:
        measures: of the slide.
        facts: cells of its table rows, by column.
        outliers: z-scores of the measures in which it is an outlier, see `outlying`.
    """

    measures: SlideMeasures
    facts: Mapping[str, str]
    outliers: Mapping[str, float]

    @property
    def remarks(self) -> list[str]:
        """Its errors, outliers and a wrong prediction, as text."""
        numbers = self.measures.numbers
        remarks = [self.measures.problem] if self.measures.problem else []
        for name, score in sorted(self.outliers.items(), key=lambda item: -abs(item[1])):
            side = "high" if score > 0 else "low"
            remarks.append(f"{name} is {side}: {numbers[name]:.4g} ({score:+.1f} deviations)")
        if self.is_wrong:
            remarks.append(f"predicted {self.facts[PREDICTED]}, the label is {self.facts[LABEL]}")
        return remarks

    @property
    def is_wrong(self) -> bool:
        """Whether its prediction differs from its label."""
        label, predicted = self.facts.get(LABEL), self.facts.get(PREDICTED)
        return bool(label and predicted and label != predicted)

    @property
    def oddness(self) -> tuple[bool, bool, float]:
        """Sort key of the report, largest first."""
        farthest = max(map(abs, self.outliers.values()), default=0.0)
        return bool(self.measures.problem), self.is_wrong, farthest


def members_of(
    measured: Sequence[SlideMeasures], facts: Mapping[str, Mapping[str, str]]
) -> list[CohortSlide]:
    """Create the slides of a cohort, sorted by `oddness`."""
    members = [
        CohortSlide(measures, facts.get(measures.name, {}), outliers)
        for measures, outliers in zip(measured, outlying(measured), strict=True)
    ]
    return sorted(members, key=lambda member: member.oddness, reverse=True)


def save_cohort(folder: Path, members: Sequence[CohortSlide]) -> None:
    """Write cohort.csv and cohort.html, each atomically."""
    columns = list(dict.fromkeys(name for member in members for name in member.facts))
    numbers = [name for name in MEASURES if any(name in one.measures.numbers for one in members)]
    heads = ["slide", *columns, SCANNER, *numbers, "remarks", "file"]
    rows = (
        (
            member.measures.name,
            *(member.facts.get(name, "") for name in columns),
            member.measures.scanner,
            *(member.measures.numbers.get(name, "") for name in numbers),
            "; ".join(member.remarks),
            member.measures.file or "",
        )
        for member in members
    )
    save_table(folder / "cohort.csv", heads, rows, errors="backslashreplace")
    _save_page(folder / "cohort.html", members, columns, numbers)


def _save_page(
    path: Path, members: Sequence[CohortSlide], columns: Sequence[str], numbers: Sequence[str]
) -> None:
    odd = sum(bool(member.remarks) for member in members)
    save_page(
        path,
        __package__,
        heading=counted(len(members), "slide"),
        odd=odd,
        tables=list(_tables(members)),
        picture=_pictures(members, numbers),
        columns=columns,
        numbers={name: MEASURES[name] for name in numbers},
        members=members,
    )


def _tables(members: Sequence[CohortSlide]) -> Iterator[dict[str, Any]]:
    """Counts of slides, patients, labels, scanners and predictions, by split."""
    splits = [member.facts.get(SPLIT, "") for member in members]
    names = order_splits(splits)
    yield _counted_by(members, splits, names)
    for column in (LABEL, SCANNER, PREDICTED):
        cells = [_cell(member, column) for member in members]
        values = [value for value, _ in Counter(cells).most_common(_MOST_VALUES)]
        if not any(cells):
            continue
        counts = Counter(zip(cells, splits, strict=True))
        rows = [(value or "(none)", *(counts[value, name] for name in names)) for value in values]
        left = len(set(cells)) - len(values)
        more = f"and {counted(left, 'more value')}" if left else ""
        yield {"head": (column, *_shown(names)), "rows": rows, "more": more}


def _counted_by(
    members: Sequence[CohortSlide], splits: Sequence[str], names: Sequence[str]
) -> dict[str, Any]:
    patients = [
        (member.facts.get(PATIENT) or member.measures.name, split)
        for member, split in zip(members, splits, strict=True)
    ]
    known = any(member.facts.get(PATIENT) for member in members)
    rows = [("slides", *(splits.count(name) for name in names))]
    if known:
        unique = Counter(split for _, split in set(patients))
        rows.append(("patients", *(unique[name] for name in names)))
    return {"head": ("", *_shown(names)), "rows": rows, "more": ""}


def _shown(names: Sequence[str]) -> list[str]:
    return ["slides"] if list(names) == [""] else [name or "(no split)" for name in names]


def _cell(member: CohortSlide, column: str) -> str:
    return member.measures.scanner if column == SCANNER else member.facts.get(column, "")


def _pictures(members: Sequence[CohortSlide], numbers: Sequence[str]) -> str:
    """SVG with a panel for each measure; slides are points, in a column for each split."""
    from matplotlib.figure import Figure

    if not numbers:
        return ""
    splits = [member.facts.get(SPLIT, "") for member in members]
    names = order_splits(splits)
    across = min(4, len(numbers))
    down = -(-len(numbers) // across)
    figure = Figure(figsize=(2.9 * across, 2.4 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel, name in zip(panels, numbers, strict=False):
        _draw(panel, members, splits, names, name)
    for panel in panels[len(numbers) :]:
        panel.set_visible(False)
    return as_svg(figure)


def _draw(
    panel: Any,
    members: Sequence[CohortSlide],
    splits: Sequence[str],
    names: Sequence[str],
    what: str,
) -> None:
    rng = np.random.default_rng(0)
    for place, name in enumerate(names):
        inside = [
            member
            for member, split in zip(members, splits, strict=True)
            if split == name and what in member.measures.numbers
        ]
        heights = [member.measures.numbers[what] for member in inside]
        spread = place + rng.uniform(-0.18, 0.18, len(inside))
        colour = _COLOURS[place % len(_COLOURS)]
        edges = ["#b3261e" if what in member.outliers else colour for member in inside]
        panel.scatter(spread, heights, s=16, color=colour, alpha=0.7, edgecolors=edges, lw=1.4)
        if heights:
            panel.hlines(np.median(heights), place - 0.3, place + 0.3, color="0.35", lw=1.2)
    panel.set_title(_AXES[what], fontsize=9, loc="left")
    panel.set_xticks(range(len(names)), _shown(names), fontsize=8)
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.tick_params(axis="y", labelsize=8)
    panel.grid(axis="y", color="0.9")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
