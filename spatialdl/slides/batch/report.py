"""What a tiling run did, slide by slide: as a table, as warnings, as a file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from spatialdl.slides.cutting.filters import FILTERS


@dataclass
class Report:
    """What one slide gave.

    `in_grid` tiles fit into it, `with_tissue` of them have enough tissue; of those some are
    `unannotated`, some dropped by filters (`black`, `white`, `pen`, `blur`: the first that
    refuses), some `unreadable`, and the others `written`. `note` says why there are none, or what
    failed. `mpp` is micrometres per level-0 pixel as used, `remark` what is odd about them.
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

    @property
    def dropped(self) -> int:
        """Tiles that filters dropped."""
        return sum(getattr(self, name) for name in FILTERS)

    def numbers(self) -> str:
        """Where the tiles went, in words."""
        counts = {name: getattr(self, name) for name in ("unannotated", *FILTERS, "unreadable")}
        lost = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        tissue = f"{self.with_tissue} of {self.in_grid} tiles have enough tissue"
        return f"{tissue}; of those {lost}" if lost else tissue

    @property
    def status(self) -> str:
        """In a word or two."""
        if self.failed:
            return "damaged" if self.written else "failed"
        return "ok" if self.written else "no tiles"


def table(reports: Sequence[Report]) -> str:
    """The reports as lines of text, a slide a line."""
    heads = ["grid", "tissue", "unannotated", "dropped", "unreadable", "written"]
    counts = [
        (r.in_grid, r.with_tissue, r.unannotated, r.dropped, r.unreadable, r.written)
        for r in reports
    ]
    # columns that say something
    shown = [
        k
        for k, head in enumerate(heads)
        if head[:2] not in ("un", "dr") or head == "unreadable" or any(row[k] for row in counts)
    ]
    rows = [("slide", *(heads[k] for k in shown), "")]
    for r, row in zip(reports, counts, strict=True):
        rows.append((r.slide, *(str(row[k]) for k in shown), r.status))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, status in rows:
        cells = [f"{n:>{width}}" for n, width in zip(numbers, widths[1:], strict=False)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *cells, status]).rstrip())
    return "\n".join(lines)


def warnings(reports: Sequence[Report]) -> list[str]:
    """A sentence for every slide that gave less than all its tiles with tissue, or none."""
    lines = []
    for report in reports:
        if report.failed and report.unreadable:
            left_out = f"{report.unreadable} of {report.with_tissue} tiles could not be read"
            lines.append(f"{report.slide}: {left_out}; the last: {report.note}")
        elif report.failed:
            lines.append(f"skipped: {report.note}")
        elif not report.written:
            numbers = f" ({report.numbers()})" if report.in_grid else ""
            lines.append(f"{report.slide} gave no tiles: {report.note}{numbers}")
        if report.remark:
            lines.append(f"{report.slide}: {report.remark}")
    return lines


def why_nothing(reports: Sequence[Report]) -> str:
    """Why no slide gave a tile."""
    failed = sum(report.failed for report in reports)
    if failed == len(reports):
        return f"none of {failed} slides could be read, so nothing was written (see above)"
    cause = "" if any(report.with_tissue for report in reports) else "no tissue: "
    return (
        f"{cause}none of {len(reports)} slides gave a tile ({failed} could not be read), so "
        "nothing was written (see above)"
    )


def save_reports(path: Path, reports: Sequence[Report]) -> None:
    """Write the reports as a CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Report))
        writer.writerows(astuple(report) for report in reports)
