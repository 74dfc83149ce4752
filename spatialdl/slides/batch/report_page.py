"""HTML report of a batch, one self-contained file, and the pictures of tilings that it links."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import floor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage

from spatialdl.common.files import replacing
from spatialdl.common.pages import save_page
from spatialdl.common.text import counted, progress_bar
from spatialdl.slides.batch.report import STATUSES, TilingReport, by_status, totals
from spatialdl.slides.cutting.filters import FILTERS
from spatialdl.slides.finding.annotations import Region
from spatialdl.slides.finding.tissue import Tissue
from spatialdl.slides.reading.reader import Thumbnail

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
    bar = progress_bar(reports, "report", "slide")
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
                **thumbnail,
                "picture": _link(folder, picture.name),
                "stitched": _link(folder, stitched.name) if stitched.is_file() else "",
            }


def _cell(name: str, value: float | None) -> tuple[str, str]:
    """A number of the table: its sort key and its text."""
    if value is None or (name == "seconds" and not value):
        return "", ""
    shown = {
        "mpp": ".4g",
        **dict.fromkeys(("seconds", "tissue_percent", "outside_percent"), ",.1f"),
    }
    return repr(value), format(value, shown.get(name, ","))


def _pictures(folder: Path, report: TilingReport) -> tuple[Path, Path]:
    """Paths of the picture and the preview of a slide, which may not exist."""
    return folder / f"{report.slide}.png", folder / preview_name(report.slide)


def _thumbnail(picture: Path) -> dict[str, Any]:
    """A small JPEG in base64 and its size; empty if the picture is missing or damaged."""
    out = io.BytesIO()
    try:
        with Image.open(picture) as image:
            image.thumbnail((_WIDTH, _HEIGHT), reducing_gap=2.0)
            small = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return {"thumbnail": "", "size": (0, 0)}
    small.save(out, "JPEG", quality=_QUALITY)
    return {"thumbnail": base64.b64encode(out.getvalue()).decode(), "size": small.size}


def _link(folder: str, name: str) -> str:
    """A relative URL; names may hold any bytes, also invalid Unicode."""
    parts = ("." if folder == "." else folder, name)
    return quote(os.fsencode("/".join(parts)))


_LONGEST, _SHORTEST = 1600, 800  # limits of the longer side; thumbnails of small slides are tiny
_OUTLINE, _REGION, _MISSING = (0, 150, 60), (140, 0, 200), (160, 160, 160)
PREVIEW = 2048
"""Largest number of rows or columns of a preview."""
_NOTHING = 208  # grey, to distinguish missing tiles from white glass
_PREVIEW_QUALITY = 85
_TAKEN, _UNREADABLE, _DROPPED = (30, 80, 220), (220, 30, 30), (240, 150, 0)
LEGEND = (
    (_OUTLINE, "tissue"),
    (_TAKEN, "tile"),
    (_DROPPED, "tile dropped by a filter"),
    (_UNREADABLE, "tile that cannot be read"),
    (_REGION, "annotation"),
    (_MISSING, "slide that cannot be read"),
)
"""Colours (red, green, blue) of outlines, 0 to 255, and what they surround."""


def save_overview(
    path: Path, thumbnail: Thumbnail, tissue: Tissue, regions: Iterable[Region] = ()
) -> float:
    """Draw the tissue and the regions that tiles are selected by.

    Args:
        path: the picture to write.
        thumbnail: of the slide, contrast-stretched if that is dark; unreadable parts are grey.
        tissue: its outline is drawn green.
        regions: annotated; their outlines and holes are drawn purple.

    Returns:
        Pixels of the picture per level-0 pixel.
    """
    height, width = thumbnail.missing.shape
    longest = min(_LONGEST, max(_SHORTEST, height, width))
    zoom = longest / max(height, width)
    size = max(1, round(width * zoom)), max(1, round(height * zoom))
    image = Image.fromarray(tissue.shown(thumbnail.image))
    pixels = np.array(image.resize(size, Image.Resampling.BICUBIC))
    pixels[_resized(thumbnail.missing, size)] = _MISSING
    mask = _resized(tissue.mask, size)
    thick = _thickness(size)
    pixels[mask & ~ndimage.binary_erosion(mask, iterations=thick, border_value=1)] = _OUTLINE
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    zoom /= thumbnail.scale
    for region in regions:
        for ring in (region.outline, *region.holes):
            corners = [(x, y) for x, y in (np.vstack([ring, ring[:1]]) * zoom).tolist()]
            draw.line(corners, fill=_REGION, width=thick)
    picture.save(path)
    return float(zoom)


def save_picture(
    path: Path,
    overview: Path,
    zoom: float,
    span: tuple[float, float],
    taken: Iterable[tuple[int, int]],
    unreadable: Iterable[tuple[int, int]] = (),
    dropped: Iterable[tuple[int, int]] = (),
) -> None:
    """Draw tiles on an overview.

    Args:
        path: the PNG to write.
        overview: written by `save_overview`.
        zoom: returned by `save_overview`.
        span: level-0 rows and columns of a tile.
        taken: level-0 (x, y) of written tiles, drawn blue.
        unreadable: of tiles that could not be read, drawn red.
        dropped: of tiles dropped by a filter, drawn orange.
    """
    with Image.open(overview) as opened:
        picture = opened.convert("RGB")
    draw = ImageDraw.Draw(picture)
    thick = _thickness(picture.size)
    for places, colour in ((taken, _TAKEN), (dropped, _DROPPED), (unreadable, _UNREADABLE)):
        for x, y in places:
            # frames of neighbours do not overlap, and those at the edge are inside the picture
            left, top = round(x * zoom), round(y * zoom)
            right = min(round((x + span[1]) * zoom), picture.size[0]) - 1
            bottom = min(round((y + span[0]) * zoom), picture.size[1]) - 1
            corners = [left, top, max(left, right), max(top, bottom)]
            draw.rectangle(corners, outline=colour, width=thick)
    picture.save(path, compress_level=1)


def preview_name(slide: str) -> str:
    """File name of the preview of a slide, beside its picture."""
    return f"{slide}.stitched.jpg"


def save_preview(
    path: Path,
    image: npt.NDArray[np.uint8],
    zoom: float,
    span: tuple[float, float],
    taken: Iterable[tuple[float, float]],
) -> None:
    """Write a JPEG of the tiles of a slide, each at its place, atomically.

    Args:
        path: the picture to write.
        image: the whole slide, uint8 (rows, cols, 3).
        zoom: pixels of the picture per level-0 pixel.
        span: level-0 rows and columns of a tile.
        taken: level-0 (x, y) of the tiles.
    """
    canvas = np.full_like(image, _NOTHING)
    for x, y in taken:
        # the end of a tile is rounded like the start of its neighbour, so that there are no gaps
        (top, bottom), (left, right) = (
            (_half_up(start * zoom), _half_up((start + length) * zoom))
            for start, length in zip((y, x), span, strict=True)
        )
        place = slice(top, max(top + 1, bottom)), slice(left, max(left + 1, right))
        canvas[place] = image[place]
    with replacing(path) as file:
        Image.fromarray(canvas).save(file, "JPEG", quality=_PREVIEW_QUALITY)


def _half_up(number: float) -> int:
    return floor(number + 0.5)  # rounding half to even would leave gaps


def _thickness(size: tuple[int, int]) -> int:
    return max(2, max(size) // 400)  # visible in thumbnails, too


def _resized(mask: npt.NDArray[np.bool_], size: tuple[int, int]) -> npt.NDArray[np.bool_]:
    image = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image) >= 128
