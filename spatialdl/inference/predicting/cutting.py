"""How slides are cut: as the training set was, unless the command overrides it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from spatialdl.common.fields import shown
from spatialdl.data.image_source import Size
from spatialdl.inference.predicting.records import key_of
from spatialdl.inference.predicting.trained import Trained
from spatialdl.slides.cutting.filters import FILTERS
from spatialdl.slides.cutting.grid import EDGES, Edge, Wanted
from spatialdl.slides.cutting.stains import METHODS
from spatialdl.slides.finding.tissue import BACKGROUNDS
from spatialdl.slides.reading.resolution import MPP_AT_1X, PLAUSIBLE_MPP

_SIDE_OF_WHOLE = 512
"""Side of the tiles used to find the tissue of a whole region."""


@dataclass(frozen=True)
class BatchCutting:
    """Cutting settings of all slides of a batch.

    Attributes:
        tile_size: rows and columns of a tile.
        view: rows and columns of the network's input, the centre of a tile.
        wanted: resolution of the images.
        whole: whether a slide's tissue is one image.
        edge: treatment of tiles at a slide's edges, see `slides.cutting.tiling`.
        filters: names and limits of the filters that drop tiles, see `slides.cutting.filters`.
        slide_mpp: micrometres per level-0 pixel, overrides the slides' metadata.
        as_pictures: whether the training images were not cut from slides, as far as is known: a
            slide as large as they are is one image then, with or without tissue.
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
    as_pictures: bool = False

    def options(self) -> Namespace:
        """These settings as options of the tiling command."""
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
        """All settings that determine a slide's images, for the key of its record."""
        found = asdict(self)
        if self.stain_reference is not None:
            found["stain_reference"] = key_of(None, Path(self.stain_reference))
        return found


def cutting_of(config: DictConfig, trained: Trained) -> BatchCutting:
    """Choose how slides are cut for a network.

    Raises:
        ValueError: the resolution is unknown, or the settings conflict.
    """
    recorded = trained.made_with
    _check(recorded)
    whole = config.whole
    if whole is None:
        whole = trained.task == "segmentation" or trained.kind == "regions"
    if trained.task == "segmentation" and not whole:
        raise ValueError(
            "whole=false cuts tiles, but the checkpoint's network predicts a class per pixel, "
            "which has seams between tiles: leave it out"
        )
    asked = any(config[key] is not None for key in ("tile_size", "overlap", "edge", "min_tissue"))
    as_pictures = not (whole or asked or recorded.get("tile_size"))
    tile_size = _tile_size(config, trained, whole, as_pictures)
    as_trained = config.tile_size is None and not whole
    found = BatchCutting(
        tile_size,
        trained.image_size if as_trained else (tile_size, tile_size),
        _resolution(config, recorded),
        whole,
        overlap=int(_either(config.overlap, recorded.get("overlap"), 0)),
        edge="drop" if whole else _edge(_either(config.edge, recorded.get("edge"), "drop")),
        min_tissue=float(_either(config.min_tissue, recorded.get("min_tissue"), 0.5)),
        background=str(recorded.get("background", "auto")),
        filters={} if whole else recorded.get("filter"),
        stain_normalise=recorded.get("stain_normalise"),
        stain_reference=config.stain_reference,
        slide_mpp=_either(config.slide_mpp, recorded.get("slide_mpp"), None),
        as_pictures=as_pictures,
    )
    _check_fits(found, config, recorded)
    return found


def _edge(value: object) -> Edge:
    for edge in EDGES:
        if value == edge:
            return edge
    raise ValueError(f"edge={value} must be one of {', '.join(EDGES)}")


def _check_fits(found: BatchCutting, config: DictConfig, recorded: Mapping[str, Any]) -> None:
    if not 0 <= found.overlap < found.tile_size:
        raise ValueError(f"overlap={found.overlap} must be less than tile_size={found.tile_size}")
    if recorded.get("stain_reference") and config.stain_reference is None:
        raise ValueError(
            "the training set's stains were normalised to a reference image: give that image "
            "by stain_reference=..."
        )
    if config.stain_reference is not None and not found.stain_normalise:
        raise ValueError(
            f"stain_reference={config.stain_reference} is given, but the stains of the training "
            "set were not normalised: leave it out"
        )


def _check(recorded: Mapping[str, Any]) -> None:
    """Validate the settings recorded in the checkpoint, which is untrusted."""
    for key, is_valid in _VALID.items():
        value = recorded.get(key)
        if value is not None and not is_valid(value):
            raise ValueError(
                f"the checkpoint has an invalid {key}={shown(value)} of its training images: give "
                "a checkpoint of spatialdl.train"
            )


def _whole(value: Any, least: int, most: int = 2**20) -> bool:
    return type(value) is int and least <= value <= most


def _number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


_VALID: Mapping[str, Callable[[Any], bool]] = {
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


def _tile_size(config: DictConfig, trained: Trained, whole: bool, as_pictures: bool) -> int:
    if whole:
        return _SIDE_OF_WHOLE
    size = _either(config.tile_size, trained.made_with.get("tile_size"), None)
    if size is not None:
        return int(size)
    rows, cols = trained.image_size
    if rows != cols and not as_pictures:
        raise ValueError(tiles_are_square(trained.image_size))
    return rows


def tiles_are_square(size: Size) -> str:
    """Message for slides that would be cut for a network of rectangular images."""
    rows, cols = size
    return (
        f"the network was trained on images of {rows}x{cols}, but tiles are square: add "
        "tile_size=..."
    )


def _resolution(config: DictConfig, recorded: Mapping[str, Any]) -> Wanted:
    if config.mpp is not None or config.level is not None:
        return Wanted(config.mpp, None, config.level)
    known = Wanted(recorded.get("mpp"), recorded.get("mag"), recorded.get("level"))
    if known == Wanted():
        raise ValueError(
            "the checkpoint does not record the resolution of its training images: add "
            "mpp=... (micrometres per pixel), or level=0"
        )
    return known


def _either(*choices: Any) -> Any:
    return next((one for one in choices if one is not None), None)
