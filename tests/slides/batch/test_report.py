from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from spatialdl.slides.batch.report import (
    TilingReport,
    by_status,
    save_reports,
    table,
    totals,
    warnings,
    why_nothing,
)
from spatialdl.text import width

GOOD = TilingReport("good", 100, 40, written=40)
GLASS = TilingReport("glass", 7, note="no tissue found")
PARTLY = TilingReport(
    "partly",
    9,
    8,
    unreadable=3,
    written=5,
    failed=True,
    note="cannot read slide partly.svs at x=1, y=2",
)
INKED = TilingReport("inked", 64, 20, unannotated=12, pen=5, blur=2, unreadable=1, note="filters")
BAD = TilingReport("bad", failed=True, note="cannot open slide bad.svs: it is empty")


def test_the_table_has_a_line_for_every_slide() -> None:
    assert table([GOOD, GLASS, PARTLY, BAD]).splitlines() == [
        "slide   grid  tissue  unreadable  written",
        "good     100      40           0       40  processed",
        "glass      7       0           0        0  no tiles",
        "partly     9       8           3        5  damaged",
        "bad        0       0           0        0  failed",
    ]


def test_columns_appear_when_they_say_something() -> None:
    assert table([GOOD, INKED]).splitlines() == [
        "slide  grid  tissue  unannotated  dropped  unreadable  written",
        "good    100      40            0        0           0       40  processed",
        "inked    64      20           12        7           1        0  no tiles",
    ]


def test_tissue_outside_of_the_grid_has_a_column() -> None:
    small = TilingReport("small", 4, 4, written=4, outside_percent=20.96)
    assert table([GOOD, small]).splitlines()[::2] == [
        "slide  grid  tissue  outside, %  unreadable  written",
        "small     4       4          21           0        4  processed",
    ]


def test_a_slide_without_tiles_says_where_they_went() -> None:
    (line,) = warnings([GOOD, INKED])
    assert line == (
        "inked has no tiles: filters (20 of 64 tiles have enough tissue; of those 12 "
        "unannotated, 5 pen, 2 blur, 1 unreadable)"
    )
    assert why_nothing([INKED]).startswith("none of 1 slides has a tile")


def test_warnings_name_slide_and_reason() -> None:
    assert warnings([GOOD, GLASS, PARTLY, BAD]) == [
        "glass has no tiles: no tissue found (0 of 7 tiles have enough tissue)",
        "partly: 3 of 8 tiles could not be read; the last: "
        "cannot read slide partly.svs at x=1, y=2",
        "skipped: cannot open slide bad.svs: it is empty",
    ]


def test_why_nothing_was_written() -> None:
    assert "no tissue: none of 2 slides has a tile (1 could not be read)" in why_nothing(
        [GLASS, BAD]
    )
    assert "none of 1 slides could be read" in why_nothing([BAD])


def test_totals_in_a_line() -> None:
    reports = [GOOD, GLASS, PARTLY, GOOD, BAD]
    assert by_status(reports) == {"processed": 2, "no tiles": 1, "damaged": 1, "failed": 1}
    assert totals(reports) == ("5 slides: 2 processed, 1 no tiles, 1 damaged, 1 failed; 85 tiles")
    assert totals([TilingReport("a", written=1)]) == "1 slide: 1 processed; 1 tile"
    assert totals([]) == "0 slides; 0 tiles"


def test_long_names_do_not_break_columns() -> None:
    names = ["x" * 300, "two\nlines", "切片" * 50, "e\u0301"]
    lines = table([TilingReport(name, 1, 1, written=1) for name in names]).splitlines()
    assert len(lines) == len(names) + 1
    assert {width(line) for line in lines[1:]} == {
        64 + len("  grid  tissue  unreadable  written  ") + len("processed")
    }


def test_reports_survive_json() -> None:
    report = TilingReport(
        "é", 9, 8, 1, 2, 3, 4, 5, 6, 7, True, "no", 0.25, "odd", "/a/\udcff.svs", 1.5, 9.5
    )
    assert TilingReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    known = GOOD.to_json()
    for other in ({**known, "new": 1}, {k: v for k, v in known.items() if k != "file"}, {}):
        with pytest.raises(ValueError, match="slide report has other fields"):
            TilingReport.from_json(other)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_reports_are_saved_as_csv(tmp_path: Path) -> None:
    path = tmp_path / "process_list.csv"
    good = TilingReport(
        "a, b", 100, 40, pen=3, written=37, mpp=0.499, file="in/a, b.svs", seconds=1.234
    )
    save_reports(path, [good, BAD, INKED, PARTLY])
    assert path.read_text().startswith("slide_id,slide,status,reason,in_grid,with_tissue,")
    rows = rows_of(path)
    assert rows[0] == {
        **{"slide_id": "a, b.svs", "slide": "a, b", "status": "processed", "reason": ""},
        **{"in_grid": "100", "with_tissue": "40", "unannotated": "0", "black": "0", "white": "0"},
        **{"pen": "3", "blur": "0", "unreadable": "0", "written": "37", "mpp": "0.499"},
        **{
            "tissue_percent": "0.0",
            "outside_percent": "0.0",
            "seconds": "1.23",
            "remark": "",
            "file": "in/a, b.svs",
        },
    }
    assert (rows[1]["status"], rows[1]["reason"], rows[1]["mpp"]) == ("failed", BAD.note, "")
    assert rows[1]["slide_id"] == "bad"
    assert (rows[2]["status"], rows[2]["reason"]) == ("no tiles", INKED.reason)
    assert "5 pen" in rows[2]["reason"]
    assert (rows[3]["status"], rows[3]["written"]) == ("damaged", "5")
    assert rows[3]["reason"].startswith("3 of 8 tiles could not be read")
    save_reports(path, [])
    assert rows_of(path) == []
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_written_is_never_processed() -> None:
    for failed in (False, True):
        for tiles in (0, 7):
            report = TilingReport("a", 9, 8, unreadable=tiles, failed=failed)
            assert report.status in ("no tiles", "failed")


def test_a_name_that_is_not_unicode_is_saved(tmp_path: Path) -> None:
    odd = os.fsdecode(b"a\xff.svs")
    save_reports(tmp_path / "a.csv", [TilingReport(odd[:-4], file=odd), GOOD])
    assert [row["slide"] for row in rows_of(tmp_path / "a.csv")] == ["a\\udcff", "good"]
