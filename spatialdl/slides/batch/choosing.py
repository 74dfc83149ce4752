"""Options of the tiling command on tissue and tiles, applied to a slide."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.filters import FILTERS, parse_filters, refused_by
from spatialdl.slides.cutting.grid import EDGES
from spatialdl.slides.cutting.normalise import own_colours, reference_colours
from spatialdl.slides.cutting.stains import METHODS, Colours, recoloured
from spatialdl.slides.cutting.tiling import TilePlan
from spatialdl.slides.finding.annotations import (
    counts_from_scanned_part,
    find_annotations,
    read_annotations,
)
from spatialdl.slides.finding.masks import find_mask, read_mask
from spatialdl.slides.finding.regions import BACKGROUND, Region, class_list
from spatialdl.slides.finding.tissue import BACKGROUNDS, Tissue, find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

Bytes = npt.NDArray[np.uint8]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on tissue, annotations, filters and stains."""
    add = parser.add_argument
    add(
        "--background",
        choices=BACKGROUNDS,
        default="auto",
        help="bright: stained tissue on glass; dark: fluorescence; auto: detect (default)",
    )
    add(
        "--mask-dir",
        type=Path,
        metavar="DIR",
        help="tissue masks of other tools: NAME.png or .tif for each slide, of any size, non-zero "
        "where there is tissue",
    )
    add(
        "--annotations",
        type=Path,
        metavar="DIR",
        help="NAME.geojson (QuPath) or NAME.xml (ASAP, Aperio) for each slide: tiles are cut from "
        "these regions and have their classes; with --whole the masks have them; --labels then "
        "gives only the splits",
    )
    add("--overlap", type=int, default=0, metavar="N", help="pixels that neighbouring tiles share")
    add(
        "--edge",
        choices=EDGES,
        default="drop",
        help="right and bottom edge of a slide, where no whole tile fits: drop: no tile; pad: a "
        "tile padded with the slide's background; shift: a tile that ends at the edge and "
        "overlaps its neighbour (default drop)",
    )
    add(
        "--filter",
        type=_filters,
        default={},
        metavar="NAMES",
        help="drop tiles: any of "
        + ", ".join(f"{name}={most:g}" for name, (_, most) in FILTERS.items())
        + ", joined by commas; the number (optional) is the largest accepted fraction of black, "
        "white or inked pixels, or the largest blur, 0 to 1",
    )
    add(
        "--stain-normalise",
        choices=METHODS,
        help="normalise the stains of every slide to those of a reference",
    )
    add(
        "--stain-reference",
        type=Path,
        metavar="IMAGE",
        help="an image of stained tissue (default: built in, hematoxylin and eosin)",
    )


class Choosing:
    """Validated options, applied to each slide; small enough to send to workers.

    Args:
        options: those of `add_options`, and `tile_size`.
        slides: all slides; the classes are collected from their annotations.
        outside: also keep tiles in no region.

    Attributes:
        classes: the classes of all regions, sorted by name; "background", the class of pixels or
            tiles in no region, comes first if there is one. Where regions have classes, samples
            have these, not the labels of slides.
        outside: the class of tiles in no region; None if these are dropped.
        masked: annotations become masks of whole regions and do not limit the tissue.

    Raises:
        ValueError: a folder is missing, the overlap is as large as a tile, the stain reference
            cannot be used, or `outside` is set and no region has a class.
    """

    def __init__(
        self, options: argparse.Namespace, slides: Sequence[Path], *, outside: bool = False
    ) -> None:
        self._options = options
        if not 0 <= options.overlap < options.tile_size:
            raise ValueError(
                f"--overlap is {options.overlap}, expected 0 to {options.tile_size - 1}, less "
                "than a tile"
            )
        for name, folder in (("mask-dir", options.mask_dir), ("annotations", options.annotations)):
            if folder is not None and not folder.is_dir():
                raise ValueError(f"--{name} {folder} is not a folder")
        if options.stain_reference and not options.stain_normalise:
            raise ValueError("--stain-reference requires --stain-normalise; add a method")
        if options.stain_normalise:
            self._reference = reference_colours(options.stain_normalise, options.stain_reference)
        labels: set[str] = set()
        if options.annotations is not None:
            for slide in tqdm(slides, "annotations", unit="slide", disable=None, leave=False):
                with suppress(SlideError):  # reported when the slide is cut
                    regions = read_annotations(find_annotations(options.annotations, slide))
                    labels.update(region.label for region in regions if region.label)
        self.masked = options.whole and options.annotations is not None
        self.outside = BACKGROUND if outside else None
        if outside and not labels:
            raise ValueError(
                f"no region of --annotations {options.annotations} has a class, which "
                f"--unannotated {BACKGROUND} requires; give regions a class"
            )
        self.classes = class_list(labels) if self.masked or outside else sorted(labels)

    def beside(self, slide: Path) -> list[Path]:
        """List the files besides the slide that determine its tiles.

        Raises:
            SlideError: its mask or annotations are missing.
        """
        options, files = self._options, []
        if options.mask_dir is not None:
            files.append(find_mask(options.mask_dir, slide))
        if options.annotations is not None:
            files.append(find_annotations(options.annotations, slide))
        if options.stain_reference is not None:
            files.append(options.stain_reference)
        return files

    def finder(self, slide: Slide) -> Callable[[Thumbnail], Tissue]:
        """Return the function that finds the tissue of a slide in its thumbnail.

        Raises:
            SlideError: its mask is missing.
        """
        if self._options.mask_dir is None:
            return partial(find_tissue, background=self._options.background)
        return partial(read_mask, find_mask(self._options.mask_dir, slide.path), slide)

    def regions(self, slide: Slide) -> list[Region] | None:
        """Read the annotated regions of a slide; None without --annotations.

        Raises:
            SlideError: its annotations are missing or cannot be read.
        """
        if self._options.annotations is None:
            return None
        path = find_annotations(self._options.annotations, slide.path)
        regions = read_annotations(path)
        if counts_from_scanned_part(path):
            regions = [region.moved(slide.scanned_from) for region in regions]
        return regions

    def refused(self, image: Bytes) -> str | None:
        """Return the name of the filter that drops a tile, None if none does."""
        return refused_by(image, self._options.filter)

    def own_colours(self, slide: Slide, plan: TilePlan) -> Colours | str | None:
        """Estimate the colours of a slide for stain normalisation.

        Returns:
            The colours; the error message if they cannot be estimated; None without
            normalisation.

        Raises:
            SlideError: the slide is dark, and filters or stains of bright slides are requested.
        """
        method = self._options.stain_normalise
        if plan.tissue.dark and plan.places:
            bright_only = [f"--filter {name}" for name in self._options.filter if name != "blur"]
            bright_only += [f"--stain-normalise {method}"] if method else []
            if bright_only:
                raise SlideError(
                    f"slide {slide.path} has a dark background, and {', '.join(bright_only)} "
                    "supports only bright backgrounds; remove it, or set --background bright"
                )
        if method is None or not plan.places:
            return None
        try:
            return own_colours(slide, plan, method, self.refused)
        except SlideError as error:
            return str(error)

    def finished(self, image: Bytes, own: Colours | str | None) -> Bytes:
        """Return a tile as it is written, recoloured by the colours of its slide.

        Raises:
            SlideError: the colours could not be estimated.
        """
        if isinstance(own, str):
            raise SlideError(own)
        return image if own is None else recoloured(image, own, self._reference)


def _filters(text: str) -> dict[str, float]:
    try:
        return parse_filters(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
