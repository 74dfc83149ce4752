"""Input normalisation: `data.mean`, `data.std` and `data.scale` of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that only check a configuration do not import NumPy
    import numpy as np

NAMED = {
    "imagenet": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    "openai_clip": {
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "std": (0.26862954, 0.26130258, 0.27577711),
    },
}
"""Named statistics of red, green and blue."""

DATASET = "dataset"
"""Value of mean and std for those of the training images; replaced in a run's configuration."""

DEFAULTS: Mapping[str, Any] = {"mean": 0.5, "std": 0.25, "scale": None}
"""Defaults of configurations, and of older checkpoints without the keys."""


@dataclass(frozen=True)
class Normalisation:
    """Input normalisation: (pixel / scale - mean) / std, channel by channel.

    Attributes:
        mean, std: one number for all channels, or one per channel.
        scale: pixel value that becomes 1, which is also the white of augmentation and padding;
            None: the largest value of an integer type, 1 for floats.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    scale: float | None = None

    @classmethod
    def from_config(cls, data: Mapping[str, Any]) -> Normalisation:
        """The normalisation of a `data` configuration group.

        Raises:
            ValueError: a value is not a number, not finite, out of range, or an unknown name.
        """
        mean, std, scale = (data.get(key, default) for key, default in DEFAULTS.items())
        if wants_statistics(data):  # not computed yet
            mean, std = DEFAULTS["mean"], DEFAULTS["std"]
        for key, value, other in (("mean", mean, std), ("std", std, mean)):
            if isinstance(value, str) and value in NAMED and other != value:
                given, missing = f"data.{key}={value}", "std" if key == "mean" else "mean"
                raise ValueError(
                    f"{given} with data.{missing}={other}: set data.{missing}={value} too, or give "
                    "numbers for both"
                )
        found = cls(_numbers("mean", mean), _numbers("std", std), scale)
        if min(found.std) <= 0:
            raise ValueError(f"data.std={_shown(std)} must be above 0")
        if scale is not None and not (_is_finite(scale) and scale > 0):
            raise ValueError(
                f"data.scale={scale} must be a number above 0, the pixel value that becomes 1, or "
                "null for the largest value of the pixels' type"
            )
        return found

    def check_channels(self, channels: int) -> None:
        """Check that mean and std have one number, or one per channel.

        Raises:
            ValueError: the number of values differs.
        """
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise ValueError(
                    f"data.{key} has {len(values)} numbers, {_shown(values)}, the images have "
                    f"{channels} channels: give one number, or one per channel"
                )

    def check_pixels(self, dtype: np.dtype[Any]) -> None:
        """Check the values against the type of the stored pixels.

        Raises:
            ValueError: the scale is not a value of integer pixels, or mean and std are in pixel
                units instead of units of the scale.
        """
        if dtype.kind not in "iu":
            return
        signed = dtype.kind == "i"  # such as CT, with air at -1000
        most, scale = _largest(dtype), self.white(dtype)
        if not float(scale).is_integer() or scale > most:
            raise ValueError(
                f"data.scale={self.scale} is not a value of {dtype} images: use a whole number "
                f"from 1 to {most}, or null for {most}"
            )
        for key, values in (("mean", self.mean), ("std", self.std)):
            if not signed and (min(values) < 0 or max(values) > 1):
                raise ValueError(
                    f"data.{key}={_shown(values)} must lie between 0 and 1 for {dtype} images: it "
                    f"applies after division by data.scale ({scale:g}), so divide it by that"
                )

    @property
    def changes_floats(self) -> bool:
        """Whether mean or std change float pixels, regardless of `scale`."""
        return any(self.mean) or any(one != 1 for one in self.std)

    def white(self, dtype: np.dtype[Any]) -> float:
        """The pixel value that becomes 1."""
        if self.scale is not None:
            return self.scale
        return _largest(dtype)

    def by_channel(self, channels: int) -> tuple[list[float], list[float]]:
        """Mean and std, one number per channel."""
        mean, std = (
            list(values) * (channels if len(values) == 1 else 1) for values in (self.mean, self.std)
        )
        return mean, std

    def described(self, channels: int, dtype: np.dtype[Any] | None) -> dict[str, Any]:
        """Numeric values, as checkpoints and exported files record them.

        Args:
            dtype: type of the stored pixels; None if unknown, as in older checkpoints.
        """
        mean, std = self.by_channel(channels)
        scale = self.scale if dtype is None else self.white(dtype)
        name = None if dtype is None else dtype.name
        return {"mean": mean, "std": std, "scale": scale, "dtype": name}

    def text(self, dtype: np.dtype[Any]) -> str:
        """One line for the console and the report."""
        mean, std = _shown(self.mean), _shown(self.std)
        return f"input: {dtype} pixels / {self.white(dtype):g}, then (x - {mean}) / {std}"


def wants_statistics(data: Mapping[str, Any]) -> bool:
    """Whether mean and std are to be computed from the training images.

    Raises:
        ValueError: only one of them is, or the data set is not of shards.
    """
    wanted = [key for key in ("mean", "std") if data.get(key) == DATASET]
    if len(wanted) == 1:
        other = "std" if wanted[0] == "mean" else "mean"
        raise ValueError(
            f"data.{wanted[0]}={DATASET} with data.{other}={data.get(other)}: set data.{other}="
            f"{DATASET} too, or give numbers for both"
        )
    if wanted and data.get("name") != "shards":
        raise ValueError(
            f"data.mean={DATASET} requires data=shards, not data={data.get('name')}: "
            "give numbers for data.mean and data.std"
        )
    return bool(wanted)


def _numbers(key: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, str):
        if value not in NAMED:
            raise ValueError(
                f"data.{key}={value} is unknown: take {', '.join(NAMED)}, dataset, a number, or a "
                "list of one per channel"
            )
        return NAMED[value][key]
    is_list = isinstance(value, Sequence)
    values = tuple(value) if is_list else (value,)
    if not values or not all(map(_is_finite, values)):
        raise ValueError(
            f"data.{key}={_shown(value)} must be a finite number, a list of one per channel, "
            f"or {', '.join(NAMED)}"
        )
    return tuple(map(float, values))


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    """A value in command-line form; a list of one becomes its element."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    texts = [f"{one:g}" if _is_finite(one) else str(one) for one in values]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"


def _largest(dtype: np.dtype[Any]) -> int:
    from spatialdl.data.augmentation.pixel_changes import value_range

    return value_range(dtype)
