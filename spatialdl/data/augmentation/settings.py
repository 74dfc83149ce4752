"""Strength of the augmentation: `data.augment` of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # commands that only check a configuration do not import NumPy
    import numpy as np

Crop = Literal["centre", "random"]
CROPS = ("centre", "random")
_COLOURS = ("saturation", "hue", "stain")
_VALUES = ("brightness", "contrast", *_COLOURS, "blur")
# upper limits of the settings that are numbers
_MOST = {
    "flip": 1.0,
    "brightness": 1.0,
    "contrast": 1.0,
    "saturation": 1.0,
    "hue": 0.5,
    "stain": 0.5,
    "blur": 16.0,
}


@dataclass(frozen=True)
class Augmentation:
    """Bounds of the random draw for each sample and epoch; the defaults change nothing.

    Attributes:
        crop: which part of a larger image is used, its "centre" or a "random" one.
        flip: probability of mirroring left to right, likewise top to bottom, and of volumes first
            slice to last.
        rotate: whether images are rotated by 0, 90, 180 or 270 degrees, equally often; volumes in
            the plane of their rows and columns.
        brightness, contrast, saturation: b changes it by a factor from 1 - b to 1 + b.
        hue: maximum rotation of colours, as a fraction of the colour circle, to either side.
        stain: amounts of hematoxylin, eosin and DAB change by a factor within 1 - stain and
            1 + stain, and by an optical density of up to stain.
        blur: maximum standard deviation of a Gaussian blur in pixels.
    """

    crop: Crop = "centre"
    flip: float = 0.0
    rotate: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    stain: float = 0.0
    blur: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise ValueError(f"data.augment.crop={self.crop} is unknown: take centre or random")
        if not isinstance(self.rotate, bool):
            raise ValueError(f"data.augment.rotate={self.rotate} must be true or false")
        for name, most in _MOST.items():
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (math.isfinite(value) and 0 <= value <= most):
                raise ValueError(
                    f"data.augment.{name}={value} is out of range: use a number from 0 (off) to "
                    f"{most:g}"
                )

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Augmentation:
        """Parse `data.augment`; None changes nothing.

        Raises:
            ValueError: a key is unknown, or a value out of range.
        """
        config = {} if config is None else {str(key): config[key] for key in config}
        known = [field.name for field in fields(cls)]
        for key in config:
            if key not in known:
                raise ValueError(f"data.augment.{key} is unknown: there are {', '.join(known)}")
        return cls(**config)

    @property
    def moves(self) -> bool:
        """Whether pixel positions vary between epochs."""
        return self.crop == "random" or self.rotate or self.flip > 0

    def check_values(self, dims: int, dtype: np.dtype[Any]) -> None:
        """Reject changes of pixel values for signals, volumes and signed types.

        Raises:
            ValueError: with the keys that must be 0.
        """
        wrong = [f"data.augment.{name}" for name in _VALUES if getattr(self, name)]
        if wrong and (dims != 2 or dtype.kind == "i"):
            what = {1: "signals", 2: f"images of {dtype}", 3: "volumes"}[dims]
            raise ValueError(
                f"{', '.join(wrong)} change colours of images from 0 to white, these are {what}: "
                "set to 0 (flip, rotate and crop are available)"
            )
        if self.rotate and dims == 1:
            raise ValueError("data.augment.rotate requires images, these are signals: set to false")

    def check_channels(self, channels: int) -> None:
        """Reject changes of red, green and blue for other channels.

        Raises:
            ValueError: with the keys that must be 0.
        """
        wrong = [f"data.augment.{name}" for name in _COLOURS if getattr(self, name)]
        if wrong and channels != 3:
            raise ValueError(
                f"{', '.join(wrong)} require images of 3 channels (red, green, blue), these have "
                f"{channels}: set to 0"
            )
