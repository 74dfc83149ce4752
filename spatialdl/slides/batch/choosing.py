"""What the tiling command is asked about tissue and tiles, and what that means for a slide."""

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
from spatialdl.slides.finding.region_mask import BACKGROUND, class_list
from spatialdl.slides.finding.regions import Region
from spatialdl.slides.finding.tissue import BACKGROUNDS, Tissue, find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

Bytes = npt.NDArray[np.uint8]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options on tissue, annotations, filters and stains."""
    add = parser.add_argument
    add(
        "--background",
        choices=BACKGROUNDS,
        default="auto",
        help="bright: stained tissue on glass; dark: fluorescence (default auto: found out)",
    )
    add(
        "--mask-dir",
        type=Path,
        metavar="DIR",
        help="tissue from other tools: NAME.png or .tif for each slide, of any size, not zero "
        "where tissue is",
    )
    add(
        "--annotations",
        type=Path,
        metavar="DIR",
        help="NAME.geojson (QuPath) or NAME.xml (ASAP, Aperio) for each slide: tiles are taken "
        "in these regions and have their classes, with --whole masks do; --labels then gives the "
        "splits only",
    )
    add("--overlap", type=int, default=0, metavar="N", help="pixels that neighbouring tiles share")
    add(
        "--edge",
        choices=EDGES,
        default="drop",
        help="at the right and bottom of a slide, where no whole tile fits: drop: none; pad: one "
        "filled up with the slide's background; shift: one that ends with the slide and overlaps "
        "its neighbour (default drop)",
    )
    add(
        "--filter",
        type=_filters,
        default={},
        metavar="NAMES",
        help="drop tiles: any of "
        + ", ".join(f"{name}={most:g}" for name, (_, most) in FILTERS.items())
        + ", joined by commas; the number (optional) is the part of black, white or inked pixels, "
        "or the blur from 0 to 1, that still passes",
    )
    add(
        "--stain-normalise",
        choices=METHODS,
        help="bring the stains of every slide to those of a reference",
    )
    add(
        "--stain-reference",
        type=Path,
        metavar="IMAGE",
        help="an image of stained tissue (default: built in, hematoxylin and eosin)",
    )


class Choosing:
    """The options, checked, and what they mean for each slide; small enough to be sent around.

    Args:
        options: as `add_options` has them, and `tile_size`.
        slides: all slides; their annotations are looked at for their classes.
        outside: tiles in no region are taken, too.

    Attributes:
        classes: the classes of all regions, in order of their names; "background", the class of
            pixels or tiles in no region, comes first where there is one. Where regions have
            classes, samples have these, not the labels of slides.
        outside: the class of tiles in no region; None where they are left out.
        masked: regions are masks, of whole regions, and do not say where there is tissue.

    Raises:
        ValueError: a folder is missing, the overlap is as large as a tile, the stain reference
            cannot be used, or tiles are to be told from regions that have no classes.
    """

    def __init__(
        self, options: argparse.Namespace, slides: Sequence[Path], *, outside: bool = False
    ) -> None:
        self._options = options
        if not 0 <= options.overlap < options.tile_size:
            raise ValueError(
                f"--overlap is {options.overlap}, expected 0 to {options.tile_size - 1}: less "
                "than a tile"
            )
        for name, folder in (("mask-dir", options.mask_dir), ("annotations", options.annotations)):
            if folder is not None and not folder.is_dir():
                raise ValueError(f"--{name} {folder} is not a folder")
        if options.stain_reference and not options.stain_normalise:
            raise ValueError("--stain-reference is given without --stain-normalise; add a method")
        if options.stain_normalise:
            self._reference = reference_colours(options.stain_normalise, options.stain_reference)
        found: set[str] = set()
        if options.annotations is not None:
            for slide in tqdm(slides, "annotations", unit="slide", disable=None, leave=False):
                with suppress(SlideError):  # said when the slide is cut
                    regions = read_annotations(find_annotations(options.annotations, slide))
                    found.update(region.label for region in regions if region.label)
        self.masked = options.whole and options.annotations is not None
        self.outside = BACKGROUND if outside else None
        if outside and not found:
            raise ValueError(
                f"no region of --annotations {options.annotations} has a class that tiles of "
                f"--unannotated {BACKGROUND} could be told from; give regions a class"
            )
        self.classes = class_list(found) if self.masked or outside else sorted(found)

    def beside(self, slide: Path) -> list[Path]:
        """The files other than the slide that decide on its tiles.

        Raises:
            SlideError: its mask or annotations are missing.
        """
        options, found = self._options, []
        if options.mask_dir is not None:
            found.append(find_mask(options.mask_dir, slide))
        if options.annotations is not None:
            found.append(find_annotations(options.annotations, slide))
        if options.stain_reference is not None:
            found.append(options.stain_reference)
        return found

    def finder(self, slide: Slide) -> Callable[[Thumbnail], Tissue]:
        """What marks the tissue of a slide.

        Raises:
            SlideError: a mask is wanted and missing.
        """
        if self._options.mask_dir is None:
            return partial(find_tissue, background=self._options.background)
        return partial(read_mask, find_mask(self._options.mask_dir, slide.path), slide)

    def regions(self, slide: Slide) -> list[Region] | None:
        """The annotated regions of a slide, None where there are no annotations.

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
        """The filter that drops a tile, if one does."""
        return refused_by(image, self._options.filter)

    def own_colours(self, slide: Slide, plan: TilePlan) -> Colours | str | None:
        """The colours of a slide whose stains are to be normalised; why not, if there are none.

        Raises:
            SlideError: the slide is dark, and filters or stains of bright ones are asked for.
        """
        method = self._options.stain_normalise
        if plan.tissue.dark and plan.places:
            of_bright = [f"--filter {name}" for name in self._options.filter if name != "blur"]
            of_bright += [f"--stain-normalise {method}"] if method else []
            if of_bright:
                raise SlideError(
                    f"slide {slide.path} has a dark background, and {', '.join(of_bright)} suits "
                    "bright ones only; leave it out, or say --background bright"
                )
        if method is None or not plan.places:
            return None
        try:
            return own_colours(slide, plan, method, self.refused)
        except SlideError as error:
            return str(error)

    def finished(self, image: Bytes, own: Colours | str | None) -> Bytes:
        """A tile as it is written, by the colours of its slide.

        Raises:
            SlideError: these could not be told.
        """
        if isinstance(own, str):
            raise SlideError(own)
        return image if own is None else recoloured(image, own, self._reference)


def _filters(text: str) -> dict[str, float]:
    try:
        return parse_filters(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
