"""Worst predicted tiles, slides and images, with their positions and pictures."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from PIL import Image

from spatialdl.common.configuring.values import literal
from spatialdl.common.files import save_table
from spatialdl.data.shards import ShardDataset
from spatialdl.errors import ShardError, SlideError
from spatialdl.inference.evaluating.levels import Level
from spatialdl.inference.evaluating.pictures import image_errors
from spatialdl.inference.evaluating.predicted import Predicted
from spatialdl.inference.predicting.inputs import named_samples
from spatialdl.inference.predicting.slide_paths import slide_paths
from spatialdl.slides.batch.finding_slides import slide_names
from spatialdl.slides.reading.reader import Slide

log = logging.getLogger("spatialdl.evaluate")

_SIDE = 180  # longer side of a thumbnail, in pixels
_DIGITS = 12  # errors that differ by rounding are ties, so the order is the same in all layouts
_HEADS = ("level", "name", "x", "y", "width", "height", "label", "predicted", "error")


@dataclass(frozen=True)
class Case:
    """A sample and the error of its prediction.

    Attributes:
        level: name of the `Level`, such as "tile".
        name: name of the sample; for a tile that of its slide.
        place: level-0 x, y, width and height; NaN where unknown.
        label, predicted: as text.
        error: 1 - the probability of the true class, the mean absolute error, or 1 - Dice.
        picture: JPEG in base64; empty if the pixels are not available.
    """

    level: str
    name: str
    place: tuple[float, float, float, float]
    label: str
    predicted: str
    error: float
    picture: str = ""


def worst_cases(
    levels: Sequence[Level], predicted: Predicted, most: int, pixels: CasePictures
) -> list[Case]:
    """The `most` samples with the largest errors of each level, worst first."""
    found = []
    for level in levels:
        errors = _errors(level)
        known = np.flatnonzero(np.isfinite(errors))
        order = known[np.argsort(-errors[known].round(_DIGITS), kind="stable")]
        for n in order[:most].tolist():
            place = np.full(4, np.nan)
            if level.rows is not None:
                place = predicted.places[level.rows[n]]
            label, prediction = _words(level, n, predicted.classes)
            # a patient has several slides, and no picture
            picture = "" if level.name == "patient" else pixels.picture(level.names[n], place)
            place_ = (float(place[0]), float(place[1]), float(place[2]), float(place[3]))
            found.append(
                Case(
                    level.name, level.names[n], place_, label, prediction, float(errors[n]), picture
                )
            )
    return found


def save_cases(path: Path, cases: Sequence[Case]) -> None:
    """Write the cases as CSV, atomically."""
    rows = (
        (
            *(one.level, one.name),
            *(None if np.isnan(number) else number for number in one.place),
            *(one.label, one.predicted, one.error),
        )
        for one in cases
    )
    save_table(path, _HEADS, rows, errors="backslashreplace")


def _errors(level: Level) -> npt.NDArray[np.float64]:
    if level.task == "segmentation":
        return image_errors(level.values)
    if level.task == "classification":
        return 1 - np.take_along_axis(level.values, level.truth[:, None], 1)[:, 0]
    if level.task == "survival":  # the error of a single risk is undefined
        return np.full(len(level), np.nan)
    known = ~np.isnan(level.truth)
    apart = np.where(known, np.abs(level.values - level.truth), 0.0).sum(1)
    return np.asarray(apart / np.maximum(known.sum(1), 1))


def _words(level: Level, n: int, classes: Sequence[str]) -> tuple[str, str]:
    """The label and the prediction of a sample, as text."""
    if level.task == "segmentation":
        return "", ""
    values, truth = level.values[n], level.truth[n]
    if level.task == "classification":
        best = int(values.argmax())
        return classes[int(truth)], f"{classes[best]} {values[best]:.3f}"
    pairs = zip(classes, truth.tolist(), values.tolist(), strict=True)
    known = [(name, true, value) for name, true, value in pairs if not np.isnan(true)]
    return (
        ", ".join(f"{name} {true:.4g}" for name, true, _ in known),
        ", ".join(f"{name} {value:.4g}" for name, _, value in known),
    )


class CasePictures:
    """Pictures of tiles and slides, if the predicted images still exist.

    Args:
        config: configuration of the predicting command.
    """

    def __init__(self, config: DictConfig | None) -> None:
        self._slides: dict[str, Path] = {}
        self._samples: dict[Any, Callable[[], Any]] = {}
        if config is None:
            return
        with suppress(ValueError, OSError, ShardError):
            if config.get("slides") is not None:
                paths = slide_names(slide_paths(config.slides))
                self._slides = {name: path for path, name in paths.items()}
            elif config.get("shards") is not None:
                self._find_samples(Path(config.shards).expanduser(), config.get("split"))

    def _find_samples(self, folder: Path, split: str | None) -> None:
        dataset = ShardDataset(folder, split, whole=False)
        if dataset.kind == "volumes":
            return
        for number, name in named_samples(dataset):
            self._samples[name] = partial(dataset.read, number)
            if dataset.kind == "tiles":
                sample: Any = dataset.sample(number)
                key = sample.slide or dataset.path.name, sample.x, sample.y
                self._samples[key] = self._samples[name]

    def picture(self, name: str, place: npt.NDArray[np.float64]) -> str:
        """A slide, or a place on it, as JPEG in base64; empty if it is not available."""
        try:
            image = self._image(name, place)
        except (SlideError, ShardError, ValueError, OSError) as error:
            log.info("no picture of %s: %s", name, error)
            return ""
        if image is None:
            return ""
        image.thumbnail((_SIDE, _SIDE))
        out = io.BytesIO()
        image.save(out, "JPEG", quality=85)
        return base64.b64encode(out.getvalue()).decode("ascii")

    def _image(self, name: str, place: npt.NDArray[np.float64]) -> Image.Image | None:
        if name in self._slides:
            with Slide(self._slides[name]) as slide:
                if np.isnan(place).any():
                    scale = max(1.0, max(slide.size) / _SIDE)
                    return Image.fromarray(slide.thumbnail(scale).image)
                x, y, width, height = place.tolist()
                scale = max(1.0, slide.nearest(max(width, height) / _SIDE))
                size = max(1, round(height / scale)), max(1, round(width / scale))
                return Image.fromarray(slide.read_scaled(int(x), int(y), size, scale))
        key: Any = name
        if not np.isnan(place[:2]).any():
            key = name, int(place[0]), int(place[1])
        read = self._samples.get(key) or self._samples.get(name)
        if read is None:
            return None
        pixels = read()
        if pixels.dtype != np.uint8 or pixels.shape[-1] not in (1, 3):
            return None
        return Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0])


def config_of(folder: Path) -> DictConfig | None:
    """The configuration of a directory of predictions; None if it is missing."""
    try:
        found = yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())
        return literal(found) if isinstance(found, dict) else None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return None
