"""Quick measures of a slide: size, tissue, stains, focus, scanner."""

from __future__ import annotations

import base64
import io
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from PIL import Image
from tqdm import tqdm

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.filters import blur
from spatialdl.slides.cutting.stains import StainColours, colours_of
from spatialdl.slides.finding.tissue import Tissue, find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

MEASURES: Mapping[str, str] = {
    "mpp": "micrometres per level-0 pixel",
    "tissue_mm2": "area of tissue, square millimetres",
    "tissue_percent": "tissue in percent of the slide",
    "hematoxylin": "hematoxylin, 99th percentile of its optical density",
    "eosin": "eosin, 99th percentile of its optical density",
    "brightness": "mean colour value of the tissue, 0 to 255",
    "blur": "median over places in the tissue, 0 (sharp) to 1",
    "tiles": "number of tiles in the data set",
}
"""Numeric columns of a cohort, with descriptions."""

_SCANNERS = (
    *("aperio.ScanScope ID", "hamamatsu.Product", "leica.device-model", "ventana.ScannerModel"),
    *("mirax.GENERAL.SLIDE_TYPE", "trestle.Model", "DICOM.ManufacturerModelName"),
    *("tiff.Model", "tiff.Make"),
)
_OVERVIEW, _SHOWN, _QUALITY = 1024, 160, 75  # pixels of the longest side, JPEG quality
_PLACES, _PLACE = 12, 256  # squares where the focus is measured, and their side at level 0
_UNITS = 1000.0  # micrometres per millimetre


@dataclass(frozen=True)
class SlideMeasures:
    """Measures of a slide.

    Attributes:
        name: in the cohort.
        file: of the slide; None if there is none.
        numbers: values of the `MEASURES` that could be taken.
        scanner: vendor and model in the file's metadata, or "unknown".
        problem: error, or what could not be read; empty if there is none.
        picture: a JPEG of the slide in base64.
    """

    name: str
    file: Path | None
    numbers: Mapping[str, float] = field(default_factory=dict)
    scanner: str = ""
    problem: str = ""
    picture: str = ""


def measure_slides(
    slides: Mapping[str, Path], *, jobs: int = 1, progress: bool = True
) -> list[SlideMeasures]:
    """Measure slides, in their order.

    Args:
        slides: paths by names in the cohort.
        jobs: worker processes.
    """
    off = None if progress else True
    bar = partial(tqdm, total=len(slides), desc="measuring", unit="slide", disable=off, leave=False)
    if jobs == 1:
        return list(bar(map(measure_slide, slides, slides.values())))
    # not the fork server: a program has one, and readers of batches need theirs to have made ready
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        return list(bar(pool.map(measure_slide, slides, slides.values())))


def measure_slide(name: str, path: Path) -> SlideMeasures:
    """Measure one slide; an unreadable one has a `problem`."""
    try:
        with Slide(path) as slide:
            return _measured(name, path, slide)
    except SlideError as error:
        return SlideMeasures(name, path, problem=str(error))


def _measured(name: str, path: Path, slide: Slide) -> SlideMeasures:
    thumbnail = slide.thumbnail(max(1.0, max(slide.size) / _OVERVIEW))
    tissue = find_tissue(thumbnail)
    part = float(tissue.mask.mean())
    unread = 100 * float(thumbnail.missing.mean())
    problem = f"{unread:.0f} % of it cannot be read" if thumbnail.missing.any() else ""
    numbers = {"tissue_percent": 100 * part}
    mpp = slide.known_mpp
    if mpp is not None:
        rows, cols = (length * mpp / _UNITS for length in slide.size)
        numbers |= {"mpp": mpp, "tissue_mm2": part * rows * cols}
    if part > 0:
        pixels = thumbnail.image[tissue.mask]
        numbers["brightness"] = float(pixels.mean())
        numbers |= {} if tissue.dark else _stains(pixels)
        numbers |= _focus(slide, thumbnail, tissue)
    picture = _picture(tissue.shown(thumbnail.image))
    return SlideMeasures(name, path, numbers, _scanner(slide), problem, picture)


def _stains(pixels: npt.NDArray[np.uint8]) -> dict[str, float]:
    try:
        colours = colours_of(pixels, "macenko")
    except SlideError:  # too few stained pixels
        return {}
    assert isinstance(colours, StainColours)
    return dict(zip(("hematoxylin", "eosin"), map(float, colours.strength), strict=True))


def _focus(slide: Slide, thumbnail: Thumbnail, tissue: Tissue) -> dict[str, float]:
    """Median blur of squares spread evenly over the tissue, at level 0."""
    inside = np.argwhere(tissue.mask)
    chosen = inside[np.linspace(0, len(inside) - 1, min(_PLACES, len(inside))).astype(int)]
    blurs = []
    for row, col in chosen:
        centre = (row + 0.5) * thumbnail.scale, (col + 0.5) * thumbnail.scale
        y, x = (
            max(0, min(ceil(middle - _PLACE / 2), length - _PLACE))
            for middle, length in zip(centre, slide.size, strict=True)
        )
        size = min(_PLACE, slide.size[0]), min(_PLACE, slide.size[1])
        try:
            blurs.append(blur(slide.read_scaled(x, y, size, 1.0)))
        except SlideError:  # damaged here
            continue
    return {"blur": median(blurs)} if blurs else {}


def _scanner(slide: Slide) -> str:
    properties = slide.properties
    model = next(
        (properties[key].strip() for key in _SCANNERS if properties.get(key, "").strip()), ""
    )
    vendor = properties.get("openslide.vendor", "")
    return " ".join(part for part in (vendor, model) if part) or "unknown"


def _picture(image: npt.NDArray[np.uint8]) -> str:
    small = Image.fromarray(image)
    small.thumbnail((_SHOWN, _SHOWN))
    file = io.BytesIO()
    small.save(file, "jpeg", quality=_QUALITY)
    return base64.b64encode(file.getvalue()).decode()
