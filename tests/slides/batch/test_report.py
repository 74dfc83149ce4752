from __future__ import annotations

import csv
from pathlib import Path

from spatialdl.slides.batch.report import Report, save_reports, table, warnings, why_nothing

GOOD = Report("good", 100, 40, written=40)
GLASS = Report("glass", 7, note="no tissue found")
PARTLY = Report(
    "partly",
    9,
    8,
    unreadable=3,
    written=5,
    failed=True,
    note="cannot read slide partly.svs at x=1, y=2",
)
INKED = Report("inked", 64, 20, unannotated=12, pen=5, blur=2, unreadable=1, note="filters")
BAD = Report("bad", failed=True, note="cannot open slide bad.svs: it is empty")


def test_the_table_has_a_line_for_every_slide() -> None:
    assert table([GOOD, GLASS, PARTLY, BAD]).splitlines() == [
        "slide   grid  tissue  unreadable  written",
        "good     100      40           0       40  ok",
        "glass      7       0           0        0  no tiles",
        "partly     9       8           3        5  damaged",
        "bad        0       0           0        0  failed",
    ]


def test_columns_appear_when_they_say_something() -> None:
    assert table([GOOD, INKED]).splitlines() == [
        "slide  grid  tissue  unannotated  dropped  unreadable  written",
        "good    100      40            0        0           0       40  ok",
        "inked    64      20           12        7           1        0  no tiles",
    ]


def test_a_slide_without_tiles_says_where_they_went() -> None:
    (line,) = warnings([GOOD, INKED])
    assert line == (
        "inked gave no tiles: filters (20 of 64 tiles have enough tissue; of those 12 "
        "unannotated, 5 pen, 2 blur, 1 unreadable)"
    )
    assert why_nothing([INKED]).startswith("none of 1 slides gave a tile")


def test_warnings_name_slide_and_reason() -> None:
    assert warnings([GOOD, GLASS, PARTLY, BAD]) == [
        "glass gave no tiles: no tissue found (0 of 7 tiles have enough tissue)",
        "partly: 3 of 8 tiles could not be read; the last: "
        "cannot read slide partly.svs at x=1, y=2",
        "skipped: cannot open slide bad.svs: it is empty",
    ]


def test_why_nothing_was_written() -> None:
    assert "no tissue: none of 2 slides gave a tile (1 could not be read)" in why_nothing(
        [GLASS, BAD]
    )
    assert "none of 1 slides could be read" in why_nothing([BAD])


def test_reports_are_saved_as_csv(tmp_path: Path) -> None:
    save_reports(tmp_path / "slides.csv", [GOOD, BAD])
    with (tmp_path / "slides.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["slide"] == "good"
    assert rows[0]["written"] == "40"
    assert rows[0]["pen"] == "0"
    assert rows[1]["failed"] == "True"
    assert rows[1]["note"] == BAD.note
