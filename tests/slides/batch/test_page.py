from __future__ import annotations

import base64
import io
import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote_to_bytes

from PIL import Image

from spatialdl.slides.batch.page import save_batch
from spatialdl.slides.batch.preview import preview_name
from spatialdl.slides.batch.report import TilingReport

ODD = "a <b>\"q'<i> & é %20#?"


class Page(HTMLParser):
    """What a browser would see: the table's cells, their keys, links, pictures, all text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.heads: list[str] = []
        self.rows: list[list[str]] = []
        self.keys: list[list[str | None]] = []
        self.statuses: list[str | None] = []
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.sources: list[str | None] = []
        self.words: list[str] = []
        self._into: list[str] | None = None
        self._quiet = False
        self.raw = path.read_text(encoding="utf-8")
        self.feed(self.raw)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.sources += [given[name] for name in ("src", "srcset", "data") if name in given]
        self._quiet = tag in ("style", "script") or given.get("class") == "printed"
        if tag == "th":
            self.heads.append("")
            self._into = self.heads
        elif tag == "tr" and "data-status" in given:
            self.rows.append([])
            self.keys.append([])
            self.statuses.append(given["data-status"])
        elif tag == "td":
            self.rows[-1].append("")
            self.keys[-1].append(given.get("data-key"))
            self._into = self.rows[-1]
        elif tag == "img":
            self.images.append(given)
        elif tag == "a":
            self.links.append(str(given["href"]))

    def handle_endtag(self, tag: str) -> None:
        self._quiet = False
        if tag in ("th", "td"):
            self._into = None

    def handle_data(self, data: str) -> None:
        if not self._quiet:
            self.words.append(data)
            if self._into is not None:
                self._into[-1] += data


def batch(folder: Path) -> tuple[list[TilingReport], Path]:
    pictures = folder / "pictures"
    pictures.mkdir()
    for name in (ODD, "b"):
        Image.new("RGB", (800, 400), (200, 30, 90)).save(pictures / f"{name}.png")
    Image.new("RGB", (9, 9)).save(pictures / preview_name("b"))
    (pictures / "damaged.png").write_bytes(b"\x89PNG no more")
    return [
        TilingReport(
            ODD, 2000, 1500, pen=200, written=1300, mpp=0.25, file=f"x/{ODD}.svs", seconds=61.04
        ),
        TilingReport("b", 9, 8, unreadable=3, written=5, failed=True, note="no JPEG", mpp=0.5),
        TilingReport("damaged", 7, note="no tissue found", remark="pixels are not square"),
        TilingReport("c", failed=True, note="it is <empty>", seconds=5),
    ], pictures


def test_the_table_has_all_slides(tmp_path: Path) -> None:
    reports, pictures = batch(tmp_path)
    settings = {"tile_size": 256, "mag": None, "labels": "<i>.csv"}
    save_batch(tmp_path / "report.html", reports, pictures, settings, stored=1_500_000)
    page = Page(tmp_path / "report.html")
    numbers = ["tiles", "tissue", "grid", "pen", "unreadable", "mpp", "seconds"]
    assert page.heads == ["picture", "slide", "status", "reason", *numbers]
    assert [len(row) for row in page.rows] == [len(page.heads)] * 4
    assert page.statuses == [report.status for report in reports]
    assert [row[1:3] for row in page.rows[1:]] == [
        ["b", "damaged"],
        ["damaged", "no tiles"],
        ["c", "failed"],
    ]
    assert page.rows[0][1] == f"{ODD}x/{ODD}.svs"
    assert page.rows[0][4:] == ["1,300", "1,500", "2,000", "200", "0", "0.25", "61.0"]
    assert page.rows[1][3] == "3 of 8 tiles could not be read; the last: no JPEG"
    assert "no tissue found" in page.rows[2][3]
    assert "pixels are not square" in page.rows[2][3]
    assert page.rows[3][3] == "it is <empty>"
    assert page.rows[3][-2:] == ["", "5.0"]
    text = " ".join(" ".join(page.words).split())
    said = ("4 slides", "1 processed", "1 no tiles", "1 damaged", "1 failed", "1,305 tiles")
    for what in (*said, "1.5 MB", "tile_size 256", "labels <i>.csv"):
        assert what in text
    assert " mag " not in text
    assert list(tmp_path.glob(".*")) == []


def test_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    reports, pictures = batch(tmp_path)
    save_batch(tmp_path / "report.html", reports, pictures, {})
    keys = Page(tmp_path / "report.html").keys
    assert [float(str(row[4])) for row in keys] == [1300, 5, 0, 0]
    assert [row[9] for row in keys] == ["0.25", "0.5", "", ""]  # empty ones go last
    assert [row[1] for row in keys] == [ODD, "b", "damaged", "c"]
    assert [row[2] for row in keys] == ["3", "1", "2", "0"]  # failed ones first


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    reports, pictures = batch(tmp_path)
    save_batch(tmp_path / "report.html", reports, pictures, {})
    page = Page(tmp_path / "report.html")
    assert "default-src 'none'; img-src data:;" in page.raw
    assert not page.tags & {"link", "iframe", "object", "b", "i"}  # names are no markup
    assert "http:" not in page.raw
    assert "https:" not in page.raw
    assert all(str(source).startswith("data:") for source in page.sources)


def test_thumbnails_are_inside_and_lead_to_the_pictures(tmp_path: Path) -> None:
    reports, pictures = batch(tmp_path)
    (tmp_path / "there").mkdir()
    save_batch(tmp_path / "there" / "report.html", reports, pictures, {})
    page = Page(tmp_path / "there" / "report.html")
    assert len(page.images) == 2  # the others have none, or a damaged one
    for image in page.images:
        assert (image["loading"], image["width"], image["height"]) == ("lazy", "240", "120")
        data = base64.b64decode(str(image["src"]).removeprefix("data:image/jpeg;base64,"))
        with Image.open(io.BytesIO(data)) as small:
            assert (small.format, small.size) == ("JPEG", (240, 120))
    files = [tmp_path / "there" / os.fsdecode(unquote_to_bytes(link)) for link in page.links]
    assert [file.name for file in files] == [f"{ODD}.png", "b.png", "b.stitched.jpg"]
    assert all(file.is_file() for file in files)


def test_columns_without_anything_are_left_out(tmp_path: Path) -> None:
    save_batch(tmp_path / "a.html", [TilingReport("a", 1, 1, written=1)], tmp_path / "none", {})
    page = Page(tmp_path / "a.html")
    assert page.heads == ["slide", "status", "tiles", "tissue", "grid"]
    assert "Settings" not in page.raw.partition("<body>")[2].partition("<script>")[0]
    save_batch(tmp_path / "a.html", [], tmp_path / "none", {})
    page = Page(tmp_path / "a.html")
    assert "There are no slides." in " ".join(page.words)
    assert "table" not in page.tags


def test_a_thousand_slides(tmp_path: Path) -> None:
    reports = [TilingReport(f"s{k}", k, k, written=k, seconds=k) for k in range(1000)]
    save_batch(tmp_path / "a.html", reports, tmp_path, {})
    page = Page(tmp_path / "a.html")
    assert len(page.rows) == 1000
    assert "499,500 tiles" in page.raw


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xff")
    Image.new("L", (10, 10)).save(tmp_path / f"{name}.png")
    save_batch(tmp_path / "a.html", [TilingReport(name, 1, 1, written=1)], tmp_path, {})
    page = Page(tmp_path / "a.html")
    assert page.rows[0][1] == "a\\udcff"
    assert unquote_to_bytes(page.links[0]) == b"./a\xff.png"
