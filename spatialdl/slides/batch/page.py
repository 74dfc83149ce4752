"""HTML report of a batch: one self-contained file."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from PIL import Image
from tqdm import tqdm

from spatialdl.common.pages import save_page
from spatialdl.common.text import counted
from spatialdl.slides.batch.picture import LEGEND, preview_name
from spatialdl.slides.batch.report import STATUSES, TilingReport, by_status, totals
from spatialdl.slides.cutting.filters import FILTERS

_WIDTH, _HEIGHT, _QUALITY = 240, 240, 75  # of a thumbnail; sizes are limits
_ALWAYS = ("written", "with_tissue", "in_grid")
_HEADS = {
    "written": ("tiles", "tiles written to the data set"),
    "with_tissue": ("tissue", "tiles with enough tissue"),
    "in_grid": ("grid", "tiles of the grid over the slide"),
    "tissue_percent": ("tissue, %", "tissue in percent of the slide"),
    "outside_percent": ("outside, %", "tissue in no tile of the grid, in percent of the tissue"),
    "unannotated": ("unannotated", "tiles outside of the annotations"),
    **{name: (name, f"tiles dropped by the filter {name}") for name in FILTERS},
    "unreadable": ("unreadable", "unreadable tiles"),
    "mpp": ("mpp", "micrometres per level-0 pixel"),
    "seconds": ("seconds", "processing time of the slide"),
}


class _Cell(NamedTuple):
    """A number of the table: its sort key and its text."""

    key: str
    text: str


class _Thumbnail(NamedTuple):
    data: str
    size: tuple[int, int]


def save_batch(
    path: Path,
    reports: Sequence[TilingReport],
    pictures: Path,
    settings: Mapping[str, object],
) -> None:
    """Write the page, atomically.

    Args:
        path: the HTML file.
        reports: of the slides, the rows of the table in this order.
        pictures: folder with `NAME.png` and `NAME.stitched.jpg` of slides, which may be missing;
            the page embeds thumbnails and links to these files by relative paths.
        settings: of the run; None values are omitted.
    """
    numbers = _columns(reports)
    reasons = any(report.reason or report.remark for report in reports)
    pictured = any(picture.is_file() for r in reports for picture in _pictures(pictures, r))
    tiles = sum(report.written for report in reports)
    save_page(
        path,
        __package__,
        totals=totals(reports),
        heading=counted(len(reports), "slide"),
        statuses=by_status(reports),
        facts=[counted(tiles, "tile")],
        settings={name: value for name, value in settings.items() if value is not None},
        count=len(reports),
        columns=_heads(numbers, pictured, reasons),
        rows=_rows(path, reports, pictures, numbers),
        pictured=pictured,
        legend=LEGEND if pictured else (),
        reasons=reasons,
    )


def _columns(reports: Sequence[TilingReport]) -> list[str]:
    """Columns that are always shown or have a value for some slide."""
    return [name for name in _HEADS if name in _ALWAYS or any(getattr(r, name) for r in reports)]


def _heads(numbers: Sequence[str], pictured: bool, reasons: bool) -> list[dict[str, Any]]:
    def head(text: str, title: str, *, number: bool = False) -> dict[str, Any]:
        return {"head": text, "title": f"sort by {title}", "number": number, "sortable": True}

    return [
        *([{"head": "picture", "number": False, "sortable": False}] if pictured else []),
        head("slide", "name"),
        head("status", "status, failed ones first"),
        *([head("reason", "reason")] if reasons else []),
        *(head(*_HEADS[name], number=True) for name in numbers),
    ]


def _rows(
    path: Path, reports: Sequence[TilingReport], pictures: Path, numbers: Sequence[str]
) -> Iterator[dict[str, Any]]:
    folder = os.path.relpath(pictures, path.parent)
    bar = tqdm(reports, "report", unit="slide", disable=None, leave=False)
    with ThreadPoolExecutor() as pool:  # Pillow releases the GIL while it decodes
        thumbnails = pool.map(_thumbnail, (_pictures(pictures, r)[0] for r in reports))
        for report, thumbnail in zip(bar, thumbnails, strict=True):
            picture, stitched = _pictures(pictures, report)
            yield {
                "slide": report.slide,
                "file": report.file if Path(report.file).name != report.slide else "",
                "status": report.status,
                "rank": STATUSES[::-1].index(report.status),
                "numbers": [_cell(name, getattr(report, name)) for name in numbers],
                "why": [line for line in (report.reason, report.remark) if line],
                "thumbnail": thumbnail.data if thumbnail else "",
                "size": thumbnail.size if thumbnail else (0, 0),
                "picture": _link(folder, picture.name),
                "stitched": _link(folder, stitched.name) if stitched.is_file() else "",
            }


def _cell(name: str, value: float | None) -> _Cell:
    if value is None or (name == "seconds" and not value):
        return _Cell("", "")
    shown = {
        "mpp": ".4g",
        **dict.fromkeys(("seconds", "tissue_percent", "outside_percent"), ",.1f"),
    }
    return _Cell(repr(value), format(value, shown.get(name, ",")))


def _pictures(folder: Path, report: TilingReport) -> tuple[Path, Path]:
    """Paths of the picture and the preview of a slide, which may not exist."""
    return folder / f"{report.slide}.png", folder / preview_name(report.slide)


def _thumbnail(picture: Path) -> _Thumbnail | None:
    """A small JPEG in base64; None if the picture is missing or damaged."""
    out = io.BytesIO()
    try:
        with Image.open(picture) as image:
            image.thumbnail((_WIDTH, _HEIGHT), reducing_gap=2.0)
            small = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    small.save(out, "JPEG", quality=_QUALITY)
    return _Thumbnail(base64.b64encode(out.getvalue()).decode(), small.size)


def _link(folder: str, name: str) -> str:
    """A relative URL; names may hold any bytes, also invalid Unicode."""
    parts = ("." if folder == "." else folder, name)
    return quote(os.fsencode("/".join(parts)))
