"""What became of every slide: tables, warnings, process_list.csv and the page."""

from __future__ import annotations

import base64
import csv
import io
import os
import re
from html import unescape
from urllib.parse import unquote_to_bytes

from PIL import Image

from spatialdl.common.text import width
from spatialdl.slides.batch.report import (
    TilingReport,
    by_status,
    save_reports,
    table,
    totals,
    warnings,
    why_nothing,
)
from spatialdl.slides.batch.report_page import preview_name, save_batch
from tests.slides.batch.batches import inside

GOOD = TilingReport("good", 100, 40, written=40)
GLASS = TilingReport("glass", 7, note="no tissue found")
NOTE = "cannot read slide partly.svs at x=1, y=2"
PARTLY = TilingReport("partly", 9, 8, unreadable=3, written=5, failed=True, note=NOTE)
INKED = TilingReport("inked", 64, 20, unannotated=12, pen=5, blur=2, unreadable=1, note="filters")
BAD = TilingReport("bad", failed=True, note="cannot open slide bad.svs: it is empty")


def test_the_table_has_a_line_for_every_slide_and_columns_that_say_something():
    assert table([GOOD, GLASS, PARTLY, BAD]).splitlines() == [
        "slide   grid  tissue  unreadable  written",
        "good     100      40           0       40  processed",
        "glass      7       0           0        0  no tiles",
        "partly     9       8           3        5  damaged",
        "bad        0       0           0        0  failed",
    ]
    small = TilingReport("small", 4, 4, written=4, outside_percent=20.96)
    assert table([GOOD, INKED, small]).splitlines() == [
        "slide  grid  tissue  outside, %  unannotated  dropped  unreadable  written",
        "good    100      40           0            0        0           0       40  processed",
        "inked    64      20           0           12        7           1        0  no tiles",
        "small     4       4          21            0        0           0        4  processed",
    ]
    # long names do not break it
    names = ["x" * 300, "two\nlines", "切片" * 50]
    lines = table([TilingReport(name, 1, 1, written=1) for name in names]).splitlines()
    assert len(lines) == len(names) + 1
    assert {width(line) for line in lines[1:]} == {
        64 + len("  grid  tissue  unreadable  written  ") + len("processed")
    }


def test_warnings_say_where_tiles_went_and_totals_count():
    assert warnings([GOOD, GLASS, PARTLY, BAD, INKED]) == [
        "glass has no tiles: no tissue found (0 of 7 tiles have enough tissue)",
        f"partly: 3 of 8 tiles could not be read; the last: {NOTE}",
        "skipped: cannot open slide bad.svs: it is empty",
        "inked has no tiles: filters (20 of 64 tiles have enough tissue; of those 12 "
        "unannotated, 5 pen, 2 blur, 1 unreadable)",
    ]
    said = why_nothing([GLASS, BAD])
    assert "no tissue: none of 2 slides has a tile (1 could not be read)" in said
    reports = [GOOD, GLASS, PARTLY, GOOD, BAD]
    assert by_status(reports) == {"processed": 2, "no tiles": 1, "damaged": 1, "failed": 1}
    assert totals(reports) == ("5 slides: 2 processed, 1 no tiles, 1 damaged, 1 failed; 85 tiles")


def test_reports_are_saved_as_csv(tmp_path):
    odd = os.fsdecode(b"a\xff, b.svs")
    good = TilingReport(odd[:-4], 100, 40, pen=3, written=37, mpp=0.499, file=odd, seconds=1.234)
    save_reports(tmp_path / "process_list.csv", [good, BAD])
    rows = list(csv.DictReader((tmp_path / "process_list.csv").open(newline="", encoding="utf-8")))
    assert list(rows[0])[:4] == ["slide_id", "slide", "status", "reason"]
    counts = {"in_grid": "100", "with_tissue": "40", "unannotated": "0", "black": "0", "white": "0"}
    percents = {"tissue_percent": "0.0", "outside_percent": "0.0"}
    assert rows[0] == {
        **{"slide_id": "a\\udcff, b.svs", "slide": "a\\udcff, b", "file": "a\\udcff, b.svs"},
        **{"status": "processed", "reason": "", "remark": "", "mpp": "0.499", "seconds": "1.23"},
        **{"pen": "3", "blur": "0", "unreadable": "0", "written": "37", **counts, **percents},
    }
    assert (rows[1]["status"], rows[1]["reason"], rows[1]["mpp"]) == ("failed", BAD.note, "")
    assert rows[1]["slide_id"] == "bad"
    assert inside(tmp_path) == ["process_list.csv"]


ODD = "a <b>\"q'<i> & é %20#?"


def text_of(html: str) -> str:
    """What is read of it."""
    return unescape(
        " ".join(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", html, flags=re.S).split())
    )


def table_of(page: str) -> list[tuple[list[str], list[str]]]:
    """Of each row the texts of its cells, and by which keys they are sorted."""
    found = []
    for row in re.findall(r"<tr[^>]*data-status=[^>]*>(.*?)</tr>", page, re.S):
        cells = re.findall(r'<td(?:[^>]*data-key="([^"]*)")?[^>]*>(.*?)</td>', row, re.S)
        found.append(([text_of(text) for _, text in cells], [unescape(key) for key, _ in cells]))
    return found


def linked(page: str) -> list[bytes]:
    return [unquote_to_bytes(unescape(link)) for link in re.findall(r'<a[^>]*href="([^"]*)"', page)]


def test_the_page_has_all_slides(tmp_path):
    pictures, path = tmp_path / "pictures", tmp_path / "there" / "report.html"
    pictures.mkdir()
    for name in (ODD, "b"):
        Image.new("RGB", (800, 400), (200, 30, 90)).save(pictures / f"{name}.png")
    Image.new("RGB", (9, 9)).save(pictures / preview_name("b"))
    (pictures / "damaged.png").write_bytes(b"\x89PNG no more")
    counts = {"pen": 200, "written": 1300, "mpp": 0.25, "seconds": 61.04}
    reports = [
        TilingReport(ODD, 2000, 1500, **counts, file=f"x/{ODD}.svs"),
        TilingReport("b", 9, 8, unreadable=3, written=5, failed=True, note="no JPEG", mpp=0.5),
        TilingReport("damaged", 7, note="no tissue found", remark="pixels are not square"),
        TilingReport("c", failed=True, note="it is <empty>", seconds=5),
    ]
    path.parent.mkdir()
    settings = {"tile_size": 256, "mag": None, "labels": "<i>.csv"}
    save_batch(path, reports, pictures, settings)
    assert inside(path.parent) == ["report.html"]
    page = path.read_text(encoding="utf-8")
    texts, keys = zip(*table_of(page), strict=True)
    assert texts[0][1] == f"{ODD} x/{ODD}.svs"
    assert texts[0][4:] == ["1,300", "1,500", "2,000", "200", "0", "0.25", "61.0"]
    assert texts[1][1:4] == ["b", "damaged", "3 of 8 tiles could not be read; the last: no JPEG"]
    assert "no tissue found" in texts[2][3]
    assert "pixels are not square" in texts[2][3]
    assert texts[3][3] == "it is <empty>"
    assert texts[3][-2:] == ["", "5.0"]
    # numbers are sorted as numbers, empty ones go last, failed ones first
    assert [(float(row[4]), row[9], row[2]) for row in keys] == [
        *((1300, "0.25", "3"), (5, "0.5", "1"), (0, "", "2"), (0, "", "0"))
    ]
    said = ("4 slides", "1 processed", "1 no tiles", "1 damaged", "1 failed", "1,305 tiles")
    for what in (*said, "tile_size 256", "labels <i>.csv"):
        assert what in text_of(page)
    assert " mag " not in text_of(page)
    assert not re.findall(r"https?:|<[bi]>", page)
    # thumbnails are in it and lead to the pictures; two slides have none, or a damaged one
    images = re.findall(r'<img [^>]*"data:image/jpeg;base64,([^"]*)"', page)
    assert len(images) == 2
    with Image.open(io.BytesIO(base64.b64decode(images[0]))) as small:
        assert (small.format, small.size) == ("JPEG", (240, 120))
    files = [path.parent / os.fsdecode(link) for link in linked(page)]
    assert [file.name for file in files] == [f"{ODD}.png", "b.png", "b.stitched.jpg"]
    assert all(file.is_file() for file in files)
