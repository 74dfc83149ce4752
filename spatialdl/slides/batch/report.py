"""What a tiling run did, slide by slide: as a table, as warnings, as a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any, Self

from spatialdl.data.saving import replacing
from spatialdl.slides.cutting.filters import FILTERS
from spatialdl.text import aligned, counted, fitted

STATUSES = ("processed", "no tiles", "damaged", "failed")
"""Of a slide: tiles were written; none were; some could not be read; nothing could be done."""
COUNTS = ("in_grid", "with_tissue", "unannotated", *FILTERS, "unreadable", "written")
_LONGEST_NAME = 64  # columns of the console; UIDs have up to 64 characters
_TYPES: dict[str, tuple[type, ...]] = {
    **{"int": (int,), "str": (str,), "bool": (bool,)},
    **{"float": (int, float), "float | None": (int, float, type(None))},
}


@dataclass
class TilingReport:
    """What one slide gave.

    It has `in_grid` tiles, `with_tissue` of them have enough tissue; of those some are
    `unannotated`, some dropped by filters (`black`, `white`, `pen`, `blur`: the first that
    refuses), some `unreadable`, and the others `written`. `note` says why there are none, or what
    failed. `mpp` is micrometres per level-0 pixel as used, `remark` what is odd about the slide.
    `tissue_percent` of it is tissue, `outside_percent` of that is in no tile of the grid.
    `file` is the slide as it was given, `slide` its name in the data set, `seconds` how long the
    work on it took.
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
        """One of `STATUSES`."""
        if self.failed:
            return "damaged" if self.written else "failed"
        return "processed" if self.written else "no tiles"

    @property
    def reason(self) -> str:
        """Why it gave less than all its tiles with tissue, or none; empty if it gave them."""
        if self.failed and self.unreadable:
            left_out = f"{self.unreadable} of {self.with_tissue} tiles could not be read"
            return f"{left_out}; the last: {self.note}"
        if self.failed or self.written:
            return self.note
        return f"{self.note} ({self.numbers()})" if self.in_grid else self.note

    def to_json(self) -> dict[str, Any]:
        """Its fields, as `json.dumps` takes them."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """The report that `to_json` gave.

        Raises:
            ValueError: it has other fields; another version wrote it.
        """
        ours = {field.name for field in fields(cls)}
        if set(given) != ours:
            apart = ", ".join(sorted(map(str, ours.symmetric_difference(given))))
            raise ValueError(f"not the report of a slide as this version has it: {apart}")
        for field in fields(cls):
            if type(given[field.name]) not in _TYPES[str(field.type)]:
                raise ValueError(f"{field.name} of the report of a slide is not {field.type}")
        return cls(**given)


def table(reports: Sequence[TilingReport]) -> str:
    """The reports as lines of text, a slide a line."""
    heads = ["grid", "tissue", "outside, %", "unannotated", "dropped", "unreadable", "written"]
    counts = [
        (
            *(r.in_grid, r.with_tissue, round(r.outside_percent)),
            *(r.unannotated, r.dropped, r.unreadable, r.written),
        )
        for r in reports
    ]
    # columns that say something
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
    """How many slides have each status that occurs, in the order of `STATUSES`."""
    found = [report.status for report in reports]
    return {status: found.count(status) for status in STATUSES if status in found}


def totals(reports: Sequence[TilingReport]) -> str:
    """All slides in a line: "5 slides: 3 processed, 1 no tiles, 1 failed; 1,234 tiles"."""
    counts = ", ".join(f"{count:,} {status}" for status, count in by_status(reports).items())
    tiles = counted(sum(report.written for report in reports), "tile")
    return f"{counted(len(reports), 'slide')}{': ' if counts else ''}{counts}; {tiles}"


def warnings(reports: Sequence[TilingReport]) -> list[str]:
    """A sentence for every slide that gave less than all its tiles with tissue, or none."""
    lines = []
    for report in reports:
        if report.failed and report.unreadable:
            lines.append(f"{report.slide}: {report.reason}")
        elif report.failed:
            lines.append(f"skipped: {report.note}")
        elif not report.written:
            lines.append(f"{report.slide} gave no tiles: {report.reason}")
        if report.remark:
            lines.append(f"{report.slide}: {report.remark}")
    return lines


def why_nothing(reports: Sequence[TilingReport]) -> str:
    """Why no slide gave a tile."""
    failed = sum(report.failed for report in reports)
    if failed == len(reports):
        return f"none of {failed} slides could be read, so nothing was written (see above)"
    cause = "" if any(report.with_tissue for report in reports) else "no tissue: "
    return (
        f"{cause}none of {len(reports)} slides gave a tile ({failed} could not be read), so "
        "nothing was written (see above)"
    )


def save_reports(path: Path, reports: Sequence[TilingReport]) -> None:
    """Write the reports as a CSV, whole or not at all.

    Its first column, `slide_id`, is the file name with its suffix, which CLAM's feature
    extraction reads.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    percents = ("tissue_percent", "outside_percent")
    about = ("mpp", "seconds", "remark", "file")
    writer.writerow(("slide_id", "slide", "status", "reason", *COUNTS, *percents, *about))
    for r in reports:
        counts = (getattr(r, name) for name in (*COUNTS, *percents))
        name = PurePath(r.file).name or r.slide
        row = (name, r.slide, r.status, r.reason, *counts, r.mpp, f"{r.seconds:.2f}")
        writer.writerow((*row, r.remark, r.file))
    with replacing(path) as file:
        # names that are not Unicode are no reason to have no file
        file.write(text.getvalue().encode("utf-8", "backslashreplace"))
