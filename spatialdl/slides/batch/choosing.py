"""The options of the tiling command on tissue and tiles, applied to a slide."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.common.text import progress_bar
from spatialdl.errors import SlideError
from spatialdl.slides.cutting.filters import refused_by
from spatialdl.slides.cutting.grid import Wanted
from spatialdl.slides.cutting.stains import Colours, own_colours, recoloured, reference_colours
from spatialdl.slides.cutting.tiling import TilePlan, plan_tiles
from spatialdl.slides.finding.annotations import (
    BACKGROUND,
    Region,
    class_list,
    counts_from_scanned_part,
    find_annotations,
    read_annotations,
)
from spatialdl.slides.finding.tissue import Tissue, find_mask, find_tissue, read_mask
from spatialdl.slides.reading.reader import Slide, Thumbnail

Bytes = npt.NDArray[np.uint8]


NATIVE = "jpeg-native"
"""The codec of a batch that copies the JPEG tiles of slides without re-encoding."""


class Choosing:
    """Validated options, applied to each slide; small enough to send to workers.

    Args:
        options: those of `tile_options.add_cutting_options`, and `tile_size`.
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
            for slide in progress_bar(slides, "annotations", "slide"):
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
            regions = [region.moved(slide.scanned[:2]) for region in regions]
        return regions

    def plan(
        self, slide: Slide, regions: list[Region] | None, min_tissue: float | None = None
    ) -> TilePlan:
        """Select the tiles of a slide.

        Args:
            slide: open.
            regions: from `regions`.
            min_tissue: replaces that of the options.

        Raises:
            SlideError: the slide has no resolution, or too coarse a one.
        """
        options = self._options
        return plan_tiles(
            slide,
            options.tile_size,
            Wanted(options.mpp, options.mag, options.level),
            options.min_tissue if min_tissue is None else min_tissue,
            overlap=options.overlap,
            edge="drop" if options.whole else options.edge,
            finder=self.finder(slide),
            regions=None if self.masked else regions,
            outside_class=self.outside,
            beyond=getattr(options, "codec", None) != NATIVE,
        )

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
