"""Input normalisation: `data.mean`, `data.std` and `data.scale` of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that only check a configuration start without NumPy
    import numpy as np

NAMED = {
    "imagenet": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    "openai_clip": {
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "std": (0.26862954, 0.26130258, 0.27577711),
    },
}
"""Statistics that have a name, of red, green and blue."""

DATASET = "dataset"
"""Those of the training images, put in its place in a run's configuration as soon as known."""

DEFAULTS: Mapping[str, Any] = {"mean": 0.5, "std": 0.25, "scale": None}
"""Of configurations, and of checkpoints that were written before they had the keys."""


@dataclass(frozen=True)
class Normalisation:
    """The input of a network is (pixel / scale - mean) / std, channel by channel.

    Attributes:
        mean, std: one number for all channels, or one for each.
        scale: pixel value that becomes 1, which is also the white of augmentation and padding;
            None: the largest value of an integer type, 1 for floats.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    scale: float | None = None

    @classmethod
    def from_config(cls, data: Mapping[str, Any]) -> Normalisation:
        """The normalisation of a `data` group.

        Raises:
            ValueError: a value is no number, not finite, out of range, or an unknown name.
        """
        mean, std, scale = (data.get(key, default) for key, default in DEFAULTS.items())
        if wants_statistics(data):  # so far it is not known
            mean, std = DEFAULTS["mean"], DEFAULTS["std"]
        for key, value, other in (("mean", mean, std), ("std", std, mean)):
            if isinstance(value, str) and value in NAMED and other != value:
                given, missing = f"data.{key}={value}", "std" if key == "mean" else "mean"
                raise ValueError(
                    f"{given} with data.{missing}={other}: set data.{missing}={value} too, or give "
                    "both as numbers"
                )
        found = cls(_numbers("mean", mean), _numbers("std", std), scale)
        if min(found.std) <= 0:
            raise ValueError(f"data.std={_shown(std)} must be above 0")
        if scale is not None and not (_is_finite(scale) and scale > 0):
            raise ValueError(
                f"data.scale={scale} must be a number above 0, the pixel value that becomes 1, or "
                "null for the largest of the pixels' type"
            )
        return found

    def check_channels(self, channels: int) -> None:
        """Check that there is a number for each channel.

        Raises:
            ValueError: there are more or fewer.
        """
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise ValueError(
                    f"data.{key} has {len(values)} numbers, {_shown(values)}, the images have "
                    f"{channels} channels: give one number, or one for each channel"
                )

    def check_pixels(self, dtype: np.dtype[Any]) -> None:
        """Check the values against the type of the stored pixels.

        Raises:
            ValueError: the scale is no value of integer pixels, or mean and std are in units of
                pixels instead of units of the scale.
        """
        if dtype.kind not in "iu":
            return
        signed = dtype.kind == "i"  # such as CT, whose air is at -1000
        most, scale = _largest(dtype), self.white(dtype)
        if not float(scale).is_integer() or scale > most:
            raise ValueError(
                f"data.scale={self.scale} is no value of {dtype} images: take a whole number from "
                f"1 to {most}, or null for {most}"
            )
        for key, values in (("mean", self.mean), ("std", self.std)):
            if not signed and (min(values) < 0 or max(values) > 1):
                raise ValueError(
                    f"data.{key}={_shown(values)} must lie between 0 and 1 for {dtype} images: it "
                    f"holds after division by data.scale ({scale:g}), so divide it by that"
                )

    @property
    def changes_floats(self) -> bool:
        """Whether floats do not stay as they are; `scale` apart."""
        return any(self.mean) or any(one != 1 for one in self.std)

    def white(self, dtype: np.dtype[Any]) -> float:
        """The pixel value that becomes 1."""
        if self.scale is not None:
            return self.scale
        return _largest(dtype)

    def by_channel(self, channels: int) -> tuple[list[float], list[float]]:
        """Mean and std, one number for each channel."""
        mean, std = (
            list(values) * (channels if len(values) == 1 else 1) for values in (self.mean, self.std)
        )
        return mean, std

    def described(self, channels: int, dtype: np.dtype[Any] | None) -> dict[str, Any]:
        """The same in numbers, as checkpoints and exported files record it.

        Args:
            dtype: of the stored pixels; None if unknown, as in older checkpoints.
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
    """Whether mean and std are to be those of the training images.

    Raises:
        ValueError: only one of them is, or the data are no shards.
    """
    wanted = [key for key in ("mean", "std") if data.get(key) == DATASET]
    if len(wanted) == 1:
        other = "std" if wanted[0] == "mean" else "mean"
        raise ValueError(
            f"data.{wanted[0]}={DATASET} with data.{other}={data.get(other)}: set data.{other}="
            f"{DATASET} too, or give both as numbers"
        )
    if wanted and data.get("name") != "shards":
        raise ValueError(
            f"data.mean={DATASET} is computed for data=shards, not for data={data.get('name')}: "
            "give data.mean and data.std as numbers"
        )
    return bool(wanted)


def _numbers(key: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, str):
        if value not in NAMED:
            raise ValueError(
                f"data.{key}={value} is unknown: take {', '.join(NAMED)}, dataset, a number, or a "
                "list of one for each channel"
            )
        return NAMED[value][key]
    is_list = isinstance(value, Sequence)
    values = tuple(value) if is_list else (value,)
    if not values or not all(map(_is_finite, values)):
        raise ValueError(
            f"data.{key}={_shown(value)} must be a finite number, a list of one for each channel, "
            f"or {', '.join(NAMED)}"
        )
    return tuple(map(float, values))


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    """As it is written on the command line; a tuple of one is its number."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    texts = [f"{one:g}" if _is_finite(one) else str(one) for one in values]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"


def _largest(dtype: np.dtype[Any]) -> int:
    from spatialdl.data.augmentation.color import value_range

    return value_range(dtype)
