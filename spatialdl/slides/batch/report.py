"""Report of a tiling run, slide by slide: table, warnings, CSV file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any, Self

from spatialdl.common.files import save_table
from spatialdl.common.text import aligned, counted, fitted
from spatialdl.slides.cutting.filters import FILTERS

STATUSES = ("processed", "no tiles", "damaged", "failed")
"""Of a slide: tiles written; none written; some tiles unreadable; the slide unusable."""
COUNTS = ("in_grid", "with_tissue", "unannotated", *FILTERS, "unreadable", "written")
_LONGEST_NAME = 64  # characters; DICOM UIDs have up to 64
_TYPES: dict[str, tuple[type, ...]] = {
    **{"int": (int,), "str": (str,), "bool": (bool,)},
    **{"float": (int, float), "float | None": (int, float, type(None))},
}


@dataclass
class TilingReport:
    """Results of one slide.

    Attributes:
        slide: its name in the data set.
        in_grid: tiles of the grid over the slide.
        with_tissue: tiles with enough tissue; each of these is counted in exactly one of the next.
        unannotated: outside of the annotations.
        black, white, pen, blur: dropped by this filter, the first that matched.
        unreadable: could not be read.
        written: to the data set.
        failed: the slide or some tiles could not be read.
        note: why there are no tiles, or the error.
        mpp: micrometres per level-0 pixel as used.
        remark: irregularities of the slide.
        file: path of the slide as given.
        seconds: duration of the work on it.
        tissue_percent: part of the slide that is tissue.
        outside_percent: part of the tissue in no tile of the grid.
    """

    slide: str
    in_grid: int = 0
    with_tissue: int = 0
    unannotated: int = 0
    black: int = 0
    white: int = 0
    pen: int = 0
    blur: int = 0
    unreadable: int = 0
    written: int = 0
    failed: bool = False
    note: str = ""
    mpp: float | None = None
    remark: str = ""
    file: str = ""
    seconds: float = 0.0
    tissue_percent: float = 0.0
    outside_percent: float = 0.0

    @property
    def dropped(self) -> int:
        """Number of tiles dropped by filters."""
        return sum(getattr(self, name) for name in FILTERS)

    def numbers(self) -> str:
        """Format the counts of tiles with tissue and of dropped tiles."""
        counts = {name: getattr(self, name) for name in ("unannotated", *FILTERS, "unreadable")}
        dropped = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        tissue = f"{self.with_tissue} of {self.in_grid} tiles have enough tissue"
        return f"{tissue}; of those {dropped}" if dropped else tissue

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.failed:
            return "damaged" if self.written else "failed"
        return "processed" if self.written else "no tiles"

    @property
    def reason(self) -> str:
        """Why tiles with tissue are missing; empty if all of them were written."""
        if self.failed and self.unreadable:
            left_out = f"{self.unreadable} of {self.with_tissue} tiles could not be read"
            return f"{left_out}; the last: {self.note}"
        if self.failed or self.written:
            return self.note
        return f"{self.note} ({self.numbers()})" if self.in_grid else self.note

    def to_json(self) -> dict[str, Any]:
        """Return its fields for `json.dumps`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Create a report from the output of `to_json`.

        Raises:
            ValueError: fields are missing, unknown or of another type.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            different = ", ".join(sorted(map(str, names.symmetric_difference(values))))
            raise ValueError(f"slide report has other fields than in this version: {different}")
        for field in fields(cls):
            if type(values[field.name]) not in _TYPES[str(field.type)]:
                raise ValueError(f"slide report: {field.name} is not {field.type}")
        return cls(**values)


def table(reports: Sequence[TilingReport]) -> str:
    """Format the reports as a text table, one line per slide."""
    heads = ["grid", "tissue", "outside, %", "unannotated", "dropped", "unreadable", "written"]
    counts = [
        (
            *(r.in_grid, r.with_tissue, round(r.outside_percent)),
            *(r.unannotated, r.dropped, r.unreadable, r.written),
        )
        for r in reports
    ]
    # optional columns only if some slide has a value
    shown = [
        k
        for k, head in enumerate(heads)
        if head[:2] not in ("ou", "un", "dr")
        or head == "unreadable"
        or any(row[k] for row in counts)
    ]
    rows = [("slide", *(heads[k] for k in shown), "")]
    for r, row in zip(reports, counts, strict=True):
        rows.append((fitted(r.slide, _LONGEST_NAME), *(str(row[k]) for k in shown), r.status))
    return "\n".join(aligned(rows, left=(0, len(shown) + 1)))


def by_status(reports: Sequence[TilingReport]) -> dict[str, int]:
    """Count the slides of each status that occurs, in the order of `STATUSES`."""
    occurring = [report.status for report in reports]
    return {status: occurring.count(status) for status in STATUSES if status in occurring}


def totals(reports: Sequence[TilingReport]) -> str:
    """Format the totals: "5 slides: 3 processed, 1 no tiles, 1 failed; 1,234 tiles"."""
    counts = ", ".join(f"{count:,} {status}" for status, count in by_status(reports).items())
    tiles = counted(sum(report.written for report in reports), "tile")
    return f"{counted(len(reports), 'slide')}{': ' if counts else ''}{counts}; {tiles}"


def warnings(reports: Sequence[TilingReport]) -> list[str]:
    """List a warning for every slide with missing tiles or a remark."""
    lines = []
    for report in reports:
        if report.failed and report.unreadable:
            lines.append(f"{report.slide}: {report.reason}")
        elif report.failed:
            lines.append(f"skipped: {report.note}")
        elif not report.written:
            lines.append(f"{report.slide} has no tiles: {report.reason}")
        if report.remark:
            lines.append(f"{report.slide}: {report.remark}")
    return lines


def why_nothing(reports: Sequence[TilingReport]) -> str:
    """Explain why no slide has a tile."""
    failed = sum(report.failed for report in reports)
    if failed == len(reports):
        return f"none of {failed} slides could be read; nothing was written (see above)"
    cause = "" if any(report.with_tissue for report in reports) else "no tissue: "
    return (
        f"{cause}none of {len(reports)} slides has a tile ({failed} could not be read); "
        "nothing was written (see above)"
    )


def save_reports(path: Path, reports: Sequence[TilingReport]) -> None:
    """Write the reports as a CSV, atomically.

    The first column, `slide_id`, is the file name with its suffix, which CLAM's feature
    extraction reads.
    """
    heads = ("slide", "status", "reason", *COUNTS, "tissue_percent", "outside_percent", "mpp")
    heads = (*heads, "seconds", "remark", "file")
    rows = []
    for report in reports:
        cells = {name: getattr(report, name) for name in heads}
        cells["seconds"] = f"{report.seconds:.2f}"
        rows.append((PurePath(report.file).name or report.slide, *cells.values()))
    # file names may not be valid Unicode
    save_table(path, ("slide_id", *heads), rows, errors="backslashreplace")
