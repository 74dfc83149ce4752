"""How slides are cut: as the training set was, and what is asked for otherwise."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from spatialdl.data.fields import shown
from spatialdl.data.image_source import Size
from spatialdl.predicting.records import key_of
from spatialdl.predicting.trained import Trained
from spatialdl.slides.cutting.filters import FILTERS
from spatialdl.slides.cutting.grid import EDGES, Edge
from spatialdl.slides.cutting.stains import METHODS
from spatialdl.slides.finding.tissue import BACKGROUNDS
from spatialdl.slides.reading.resolution import MPP_AT_1X, PLAUSIBLE_MPP
from spatialdl.slides.reading.wanted import Wanted

_SIDE_OF_WHOLE = 512
"""Of the tiles by which the tissue of a whole region is found."""


@dataclass(frozen=True)
class BatchCutting:
    """Of all slides of a batch.

    Attributes:
        tile_size: rows and columns of a tile.
        view: rows and columns that the network sees, in the middle of a tile.
        wanted: resolution of the images.
        whole: whether a slide's tissue is one image.
        edge: what tiles there are at the edges of a slide, see `slides.cutting.tiling`.
        filters: names and limits of those that drop tiles, see `slides.cutting.filters`.
        slide_mpp: micrometres per level-0 pixel in place of what slides say.
    """

    tile_size: int
    view: Size
    wanted: Wanted
    whole: bool
    overlap: int = 0
    edge: Edge = "drop"
    min_tissue: float = 0.5
    background: str = "auto"
    filters: Mapping[str, float] | None = None
    stain_normalise: str | None = None
    stain_reference: str | None = None
    slide_mpp: float | None = None

    def options(self) -> Namespace:
        """The same as options of the tiling command."""
        reference = None if self.stain_reference is None else Path(self.stain_reference)
        return Namespace(
            tile_size=self.tile_size,
            overlap=self.overlap,
            edge=self.edge,
            background=self.background,
            filter=dict(self.filters or {}),
            stain_normalise=self.stain_normalise,
            stain_reference=reference,
            whole=self.whole,
            mask_dir=None,
            annotations=None,
        )

    def key(self) -> dict[str, Any]:
        """What decides on the images of a slide.

        Raises:
            OSError: the stain reference is not there.
        """
        found = asdict(self)
        if self.stain_reference is not None:
            found["stain_reference"] = key_of(None, Path(self.stain_reference))
        return found


def cutting_of(config: DictConfig, trained: Trained) -> BatchCutting:
    """How slides are cut for a network.

    Raises:
        ValueError: if nobody says at which resolution, or the settings do not fit.
    """
    before = trained.made_with
    _check(before)
    whole = config.whole
    if whole is None:
        whole = trained.task == "segmentation" or trained.kind == "regions"
    if trained.task == "segmentation" and not whole:
        raise ValueError(
            "whole=false cuts tiles, but the checkpoint's network tells a class for every pixel, "
            "which has no seams on the whole tissue: leave it out"
        )
    tile_size = _tile_size(config, trained, whole)
    as_trained = config.tile_size is None and not whole
    found = BatchCutting(
        tile_size,
        trained.image_size if as_trained else (tile_size, tile_size),
        _resolution(config, before),
        whole,
        overlap=int(_either(config.overlap, before.get("overlap"), 0)),
        edge="drop" if whole else _edge(_either(config.edge, before.get("edge"), "drop")),
        min_tissue=float(_either(config.min_tissue, before.get("min_tissue"), 0.5)),
        background=str(before.get("background", "auto")),
        filters={} if whole else before.get("filter"),
        stain_normalise=before.get("stain_normalise"),
        stain_reference=config.stain_reference,
        slide_mpp=_either(config.slide_mpp, before.get("slide_mpp"), None),
    )
    _check_fits(found, config, before)
    return found


def _edge(value: object) -> Edge:
    for edge in EDGES:
        if value == edge:
            return edge
    raise ValueError(f"edge={value} must be one of {', '.join(EDGES)}")


def _check_fits(found: BatchCutting, config: DictConfig, before: Mapping[str, Any]) -> None:
    if not 0 <= found.overlap < found.tile_size:
        raise ValueError(f"overlap={found.overlap} must be less than a tile, {found.tile_size}")
    if before.get("stain_reference") and config.stain_reference is None:
        raise ValueError(
            "the training set was brought to the stains of an image of its own: name that image "
            "by stain_reference=..."
        )
    if config.stain_reference is not None and not found.stain_normalise:
        raise ValueError(
            f"stain_reference={config.stain_reference} is given, but the stains of the training "
            "set were left as they are: leave it out"
        )


def _check(before: Mapping[str, Any]) -> None:
    """Whether what is said of the training images can be: anybody may have written it."""
    for key, can_be in _CAN_BE.items():
        value = before.get(key)
        if value is not None and not can_be(value):
            raise ValueError(
                f"the checkpoint says {key}={shown(value)} of its training images, which cannot "
                "be: name a checkpoint of spatialdl.train"
            )


def _whole(value: Any, least: int, most: int = 2**20) -> bool:
    return type(value) is int and least <= value <= most


def _number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


_CAN_BE: Mapping[str, Callable[[Any], bool]] = {
    "tile_size": lambda value: _whole(value, 1),
    "overlap": lambda value: _whole(value, 0),
    "level": lambda value: _whole(value, 0),
    "mpp": lambda value: _number(value, *PLAUSIBLE_MPP),
    "slide_mpp": lambda value: _number(value, *PLAUSIBLE_MPP),
    "mag": lambda value: _number(value, *(MPP_AT_1X / mpp for mpp in reversed(PLAUSIBLE_MPP))),
    "min_tissue": lambda value: _number(value, 0, 1),
    "edge": lambda value: isinstance(value, str) and value in EDGES,
    "background": lambda value: isinstance(value, str) and value in BACKGROUNDS,
    "stain_normalise": lambda value: isinstance(value, str) and value in METHODS,
    "filter": lambda value: (
        isinstance(value, dict)
        and all(name in FILTERS and _number(most, 0, 1) for name, most in value.items())
    ),
}


def _tile_size(config: DictConfig, trained: Trained, whole: bool) -> int:
    if whole:
        return _SIDE_OF_WHOLE
    size = _either(config.tile_size, trained.made_with.get("tile_size"), None)
    if size is not None:
        return int(size)
    rows, cols = trained.image_size
    if rows != cols:
        raise ValueError(
            f"the network was trained on images of {rows}x{cols}, tiles are squares: add "
            "tile_size=..."
        )
    return rows


def _resolution(config: DictConfig, before: Mapping[str, Any]) -> Wanted:
    if config.mpp is not None or config.level is not None:
        return Wanted(config.mpp, None, config.level)
    said = Wanted(before.get("mpp"), before.get("mag"), before.get("level"))
    if said == Wanted():
        raise ValueError(
            "the checkpoint does not say at which resolution its training images were cut: add "
            "mpp=... (micrometres per pixel), or level=0"
        )
    return said


def _either(*choices: Any) -> Any:
    return next((one for one in choices if one is not None), None)
