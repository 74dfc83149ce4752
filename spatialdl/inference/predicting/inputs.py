"""Network inputs from slides and data sets, one slide after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.data.augmentation.pixel_changes import value_range
from spatialdl.data.image_source import Box, ImageSource, Pixels, Size
from spatialdl.data.samples import TileSample
from spatialdl.data.shards import ShardDataset
from spatialdl.errors import ShardError, SlideError
from spatialdl.inference.predicting.cutting import BatchCutting, tiles_are_square
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.cutting.stains import Colours
from spatialdl.slides.cutting.tiling import (
    TilePlan,
    cut_tiles,
    outside_remark,
    plan_tiles,
    plan_whole,
)
from spatialdl.slides.reading.reader import Slide

log = logging.getLogger("spatialdl.predict")

WHITE = 255
LARGE = 2048  # rows or columns; images up to this size are resampled at once
_NEIGHBOURS = 4  # distances needed to estimate the spacing of tiles


@dataclass(frozen=True)
class Input:
    """The images of a slide or a volume, and their positions.

    Attributes:
        name: name of the slide.
        source: the images.
        size: ([slices,] rows, columns) of the network's input, the centre of each image.
        places: level-0 (x, y) of the top-left corners of the images.
        span: level-0 (rows, columns) of an image; None if unknown.
        extent: level-0 (rows, columns) of the slide; None if unknown.
        mpp: micrometres per level-0 pixel, if known.
        slide: the slide's file, if there is one.
        whole: whether a single image covers the slide.
        remark: why the prediction may be wrong.
        labels: true class names of the images, empty where unknown; none for slides.
        region_of: the slide of which the single image is one of several regions.
        samples: indices of the images in their data set.
        read_mask: reads a box of the single image's mask, as the network sees it.
    """

    name: str
    source: ImageSource
    size: Size
    places: Sequence[tuple[int, int]]
    span: tuple[float, float] | None
    extent: tuple[int, int] | None
    mpp: float | None
    slide: Path | None = None
    whole: bool = False
    remark: str = ""
    labels: Sequence[str] = ()
    region_of: str = ""
    samples: Sequence[int] = ()
    read_mask: Callable[[Box], Pixels] | None = None

    @property
    def scale(self) -> float:
        """Level-0 pixels per pixel of the images; `span` must be known."""
        assert self.span is not None
        return float(self.span[0] / self.size[0])


@dataclass
class SlideImages:
    """Images of equal size cut from a slide; an `ImageSource` for `RankLoader`.

    Attributes:
        path: the slide.
        mpp: micrometres per level-0 pixel, overrides the slide's metadata.
        places: level-0 (x, y) of the images.
        size: rows and columns of each.
        scale: level-0 pixels per pixel.
        background: colour beyond the slide's edges.
        choosing, own: stain normalisation and the slide's own colours, if there is a reference.
        unreadable: error by image, where part of it was unreadable in this process; that part is
            white.
    """

    path: Path
    mpp: float | None
    places: Sequence[tuple[int, int]]
    size: tuple[int, int]
    scale: float
    background: tuple[int, int, int] = (WHITE, WHITE, WHITE)
    choosing: Choosing | None = None
    own: Colours | None = None
    channels: int = 3
    has_masks: bool = False
    classes: Sequence[str] = ()
    unreadable: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = np.dtype(np.uint8)
        self.labels = np.zeros(len(self.places), np.int64)  # unknown

    def __len__(self) -> int:
        return len(self.places)

    def image_size(self, sample: int) -> tuple[int, int]:
        return self.size

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        """Read a box, uint8 (rows, columns, 3); unreadable images are recorded and white."""
        row0, row1, col0, col1 = box or (0, self.size[0], 0, self.size[1])
        if row0 == row1 or col0 == col1:
            return np.empty((row1 - row0, col1 - col0, 3), np.uint8)
        x, y = self.places[sample]
        try:
            image = self._box(x, y, (row0, row1, col0, col1))
        except SlideError as error:
            self.unreadable[sample] = str(error)
            return np.full((row1 - row0, col1 - col0, 3), WHITE, np.uint8)
        if self.choosing is None or self.own is None:
            return image
        return self.choosing.finished(image, self.own)

    def _box(self, x: int, y: int, box: Box) -> Pixels:
        """Resample whole blocks, so that pixels do not depend on how an image is split."""
        slide, size = self._slide, self.size
        row0, row1, col0, col1 = box
        if slide.is_exact(self.scale, size):
            return slide.read_box(x, y, size, self.scale, (row0, row1, col0, col1))
        side = max(size) if max(size) <= LARGE else LARGE // 2
        image = np.empty((row1 - row0, col1 - col0, 3), np.uint8)
        for top in range(row0 // side * side, row1, side):
            for left in range(col0 // side * side, col1, side):
                block = (top, min(top + side, size[0]), left, min(left + side, size[1]))
                pixels = slide.read_box(x, y, size, self.scale, block)
                rows = max(top, row0), min(block[1], row1)
                cols = max(left, col0), min(block[3], col1)
                part = pixels[rows[0] - top : rows[1] - top, cols[0] - left : cols[1] - left]
                image[rows[0] - row0 : rows[1] - row0, cols[0] - col0 : cols[1] - col0] = part
        return image

    def normalise(self, slide: Slide, plan: TilePlan, choosing: Choosing) -> None:
        """Normalise the stains of the images to the reference, if there is one.

        Raises:
            SlideError: the slide's own colours are unknown.
        """
        own = choosing.own_colours(slide, plan)
        if isinstance(own, str):
            raise SlideError(own)
        if own is not None:
            self.choosing, self.own = choosing, own

    def read_mask(self, sample: int, box: Box | None = None) -> Pixels:
        raise ValueError("slides have no masks")

    @cached_property
    def _slide(self) -> Slide:
        slide = Slide(self.path, self.mpp)
        slide.background = self.background
        return slide

    def close(self) -> None:
        """Close the slide; the next read opens it again."""
        opened = self.__dict__.pop("_slide", None)
        if opened is not None:
            opened.close()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_slide"}


def slide_input(path: Path, name: str, cutting: BatchCutting) -> Input:
    """Select the images of a slide.

    Raises:
        SlideError: the slide is unusable or has no tissue.
    """
    choosing = Choosing(cutting.options(), [])
    with Slide(path, cutting.slide_mpp) as slide:
        if cutting.as_pictures:
            scale = cutting.wanted.scale(slide)
            rows, cols = (round(side / scale) for side in slide.size)
            if (rows, cols) == cutting.view:
                size, mpp = (rows, cols), cutting.slide_mpp
                source = SlideImages(path, mpp, [(0, 0)], size, scale, slide.background)
                return _input(name, slide, source, size)
            if cutting.view[0] != cutting.view[1]:
                raise SlideError(
                    f"slide {path} is {rows}x{cols} pixels, and {tiles_are_square(cutting.view)}"
                )
        plan = plan_tiles(
            slide,
            cutting.tile_size,
            cutting.wanted,
            0.0 if cutting.whole else cutting.min_tissue,
            overlap=cutting.overlap,
            edge=cutting.edge,
            finder=choosing.finder(slide),
        )
        if cutting.whole:
            region = region_images(slide, plan, choosing, cutting.slide_mpp)
            if region is None:
                raise SlideError(f"slide {path} has no tissue")
            return _input(name, slide, region, region.size, whole=True)
        source = SlideImages(
            path,
            cutting.slide_mpp,
            _places(slide, plan, cutting, choosing),
            (cutting.tile_size, cutting.tile_size),
            plan.scale,
            plan.background,
        )
        if remark := outside_remark(plan):
            log.warning("%s: %s", name, remark.replace("--edge ", "edge="))
        source.normalise(slide, plan, choosing)
        return _input(name, slide, source, cutting.view)


def region_images(
    slide: Slide,
    plan: TilePlan,
    choosing: Choosing,
    mpp: float | None,
    multiple: tuple[int, int] = (1, 1),
) -> SlideImages | None:
    """The tissue of a slide as one image; None without tissue.

    Args:
        mpp: micrometres per level-0 pixel, overrides the slide's metadata.
        multiple: rows and columns are rounded up to multiples of these.

    Raises:
        SlideError: its colours cannot be normalised.
    """
    whole = plan_whole(slide, plan)
    if whole is None:
        return None
    rows, cols = (-(-side // of) * of for side, of in zip(whole.size, multiple, strict=True))
    places = [(whole.x, whole.y)]
    source = SlideImages(slide.path, mpp, places, (rows, cols), whole.scale, plan.background)
    source.normalise(slide, plan, choosing)
    return source


def _input(
    name: str, slide: Slide, source: SlideImages, view: Size, *, whole: bool = False
) -> Input:
    span = source.size[0] * source.scale, source.size[1] * source.scale
    return Input(
        name,
        source,
        view,
        source.places,
        span,
        slide.size,
        slide.known_mpp,
        slide.path,
        whole,
    )


def _places(
    slide: Slide, plan: TilePlan, cutting: BatchCutting, choosing: Choosing
) -> list[tuple[int, int]]:
    """Level-0 (x, y) of the selected tiles; unreadable tiles are reported later."""
    places, problem = [], ""
    readable = False
    for tile in cut_tiles(slide, plan, read=bool(cutting.filters)):
        if tile.bare or (tile.image is not None and choosing.refused(tile.image)):
            continue
        places.append((tile.x, tile.y))
        problem, readable = tile.problem or problem, readable or not tile.problem
    if not readable:
        why = plan.reason or problem or "filters"
        raise SlideError(f"slide {slide.path} has no tiles: {why}")
    return places


@dataclass
class Some:
    """A subset of the samples of a data set.

    Attributes:
        unreadable: error by sample, where part of it was unreadable in this process; that part is
            white.
    """

    dataset: ShardDataset
    numbers: Sequence[int]
    has_masks: bool = False
    unreadable: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.labels = np.zeros(len(self.numbers), np.int64)  # not used
        self.channels, self.classes = self.dataset.channels, self.dataset.classes
        self.dtype: np.dtype[Any] = self.dataset.dtype

    def __len__(self) -> int:
        return len(self.numbers)

    def image_size(self, sample: int) -> Size:
        return self.dataset.image_size(self.numbers[sample])

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        try:
            return self.dataset.read(self.numbers[sample], box)
        except ShardError as error:
            self.unreadable[sample] = str(error)
        rows, cols = self.image_size(sample)
        row0, row1, col0, col1 = box or (0, rows, 0, cols)
        shape = row1 - row0, col1 - col0, self.channels
        return np.full(shape, value_range(self.dtype), self.dtype)

    def read_mask(self, sample: int, box: Box | None = None) -> Pixels:
        return self.dataset.read_mask(self.numbers[sample], box)


def shard_inputs(dataset: ShardDataset, size: Size, *, maps: bool) -> list[Input]:
    """Group the samples of a data set of images by slide.

    Args:
        size: image size of training, to which tiles are cropped or padded.
        maps: whether the network predicts a class per pixel; regions keep their size then.
    """
    if maps or dataset.kind == "regions":
        return [_region_input(dataset, number, name) for number, name in named_samples(dataset)]
    slides = _slides(dataset).items()
    return [_tiles_input(dataset, numbers, name, size) for name, numbers in slides]


def named_samples(dataset: ShardDataset) -> Iterator[tuple[int, str]]:
    """Index and unique name of each sample: its slide's name, numbered if there are several."""
    for name, numbers in _slides(dataset).items():
        for place, number in enumerate(numbers, 1):
            yield number, name if len(numbers) == 1 else f"{name}_{place}"


def _slides(dataset: ShardDataset) -> dict[str, list[int]]:
    """Sample indices by slide; samples without a slide are grouped under the data set's name."""
    slides: dict[str, list[int]] = {}
    for number in range(len(dataset)):
        slides.setdefault(dataset.sample(number).slide or dataset.path.name, []).append(number)
    return slides


def _region_input(dataset: ShardDataset, number: int, name: str) -> Input:
    """Treat a region as a slide whose level 0 it is."""
    sample, (rows, cols) = dataset.sample(number), dataset.image_size(number)
    mpp = dataset.mpp if isinstance(sample, TileSample) else sample.mpp
    size, span = (rows, cols), (float(rows), float(cols))
    return Input(
        name,
        Some(dataset, [number]),
        size,
        [(0, 0)],
        span,
        size,
        mpp,
        whole=True,
        labels=label_names(dataset, [number]),
        region_of=region_of(dataset, number, name),
        samples=dataset.numbers[[number]].tolist(),
        read_mask=partial(dataset.read_mask, number) if dataset.has_masks else None,
    )


def _tiles_input(dataset: ShardDataset, numbers: Sequence[int], name: str, size: Size) -> Input:
    samples = [dataset.sample(number) for number in numbers]
    places = [(sample.x, sample.y) for sample in samples]
    rows, cols = dataset.image_size(numbers[0])
    made_with = dataset.manifest.made_with
    moved = made_with.get("edge") == "shift"
    span = _span(places, (rows, cols), made_with.get("overlap"), moved=moved)
    extent = mpp = None
    if span is not None:
        far = max(y for _, y in places) + span[0], max(x for x, _ in places) + span[1]
        extent = round(far[0]), round(far[1])
        mpp = None if dataset.mpp is None else dataset.mpp * rows / span[0]
    return Input(
        *(name, Some(dataset, numbers), size, places, span, extent, mpp),
        labels=label_names(dataset, numbers),
        samples=dataset.numbers[numbers].tolist(),
    )


def region_of(dataset: ShardDataset, number: int, name: str) -> str:
    """The slide of a sample; empty if the sample has the same name."""
    slide = dataset.sample(number).slide or ""
    return "" if slide == name else slide


def label_names(dataset: ShardDataset, numbers: Sequence[int]) -> list[str]:
    """Class names of samples, empty where unlabelled; an empty list if all are."""
    names = [*dataset.classes, ""]  # unlabelled is -1
    labels = [names[int(dataset.labels[number])] for number in numbers]
    return labels if any(labels) else []


def _span(
    places: Sequence[tuple[int, int]], size: tuple[int, int], overlap: object, *, moved: bool
) -> tuple[float, float] | None:
    """Estimate the level-0 span of a tile from distances; None if there are too few.

    Args:
        moved: whether the last row and column may have been shifted back into the slide.
    """
    if not isinstance(overlap, int) or not 0 <= overlap < size[0]:  # untrusted metadata
        overlap = 0
    steps = [np.diff(np.unique([place[axis] for place in places])) for axis in (0, 1)]
    distances = np.concatenate([step[:-1] if moved else step for step in steps])
    if len(distances) < _NEIGHBOURS or size[0] != size[1]:
        return None
    nearest = distances[distances <= distances.min() + 1]  # places are rounded
    if 2 * len(nearest) < len(distances):
        return None
    span = float(nearest.mean()) * size[0] / (size[0] - overlap)
    return span, span
