"""What can be measured of a slide at a glance: size, tissue, stains, focus, scanner."""

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
    "tissue_percent": "part of the slide that is tissue",
    "hematoxylin": "strength of the hematoxylin, 99th percentile of its optical density",
    "eosin": "strength of the eosin, likewise",
    "brightness": "mean of the tissue's colours, 0 to 255",
    "blur": "median over places of tissue, 0 (sharp) to 1",
    "tiles": "of the data set",
}
"""Columns of numbers of a cohort, with what they are."""

_SCANNERS = (
    *("aperio.ScanScope ID", "hamamatsu.Product", "leica.device-model", "ventana.ScannerModel"),
    *("mirax.GENERAL.SLIDE_TYPE", "trestle.Model", "DICOM.ManufacturerModelName"),
    *("tiff.Model", "tiff.Make"),
)
_OVERVIEW, _SHOWN, _QUALITY = 1024, 160, 75  # pixels of the longest side, JPEG quality
_PLACES, _PLACE = 12, 256  # where the focus is measured, pixels of level 0 at each
_UNITS = 1000.0  # micrometres of a millimetre


@dataclass(frozen=True)
class SlideMeasures:
    """What was found of a slide.

    Attributes:
        name: in the cohort.
        file: of the slide; None where there is none.
        numbers: of `MEASURES` those that could be measured.
        scanner: as the file names it, or its format.
        problem: why nothing could be measured, or what could not; empty if all could.
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
        slides: by their names in the cohort.
        jobs: processes that work.
    """
    off = None if progress else True
    bar = partial(tqdm, total=len(slides), desc="measuring", unit="slide", disable=off, leave=False)
    if jobs == 1:
        return list(bar(map(measure_slide, slides, slides.values())))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("forkserver")) as pool:
        return list(bar(pool.map(measure_slide, slides, slides.values())))


def measure_slide(name: str, path: Path) -> SlideMeasures:
    """Measure one slide; one that cannot be read has a `problem`."""
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
        found = colours_of(pixels, "macenko")
    except SlideError:  # too little is stained
        return {}
    assert isinstance(found, StainColours)
    return dict(zip(("hematoxylin", "eosin"), map(float, found.strength), strict=True))


def _focus(slide: Slide, thumbnail: Thumbnail, tissue: Tissue) -> dict[str, float]:
    """The blur of places spread evenly over the tissue, at level 0."""
    inside = np.argwhere(tissue.mask)
    chosen = inside[np.linspace(0, len(inside) - 1, min(_PLACES, len(inside))).astype(int)]
    found = []
    for row, col in chosen:
        centre = (row + 0.5) * thumbnail.scale, (col + 0.5) * thumbnail.scale
        y, x = (
            max(0, min(ceil(middle - _PLACE / 2), length - _PLACE))
            for middle, length in zip(centre, slide.size, strict=True)
        )
        size = min(_PLACE, slide.size[0]), min(_PLACE, slide.size[1])
        try:
            found.append(blur(slide.read_scaled(x, y, size, 1.0)))
        except SlideError:  # this place is damaged
            continue
    return {"blur": median(found)} if found else {}


def _scanner(slide: Slide) -> str:
    says = slide.properties
    named = next((says[key].strip() for key in _SCANNERS if says.get(key, "").strip()), "")
    vendor = says.get("openslide.vendor", "")
    return " ".join(part for part in (vendor, named) if part) or "unknown"


def _picture(image: npt.NDArray[np.uint8]) -> str:
    small = Image.fromarray(image)
    small.thumbnail((_SHOWN, _SHOWN))
    file = io.BytesIO()
    small.save(file, "jpeg", quality=_QUALITY)
    return base64.b64encode(file.getvalue()).decode()
