"""How strongly images are changed: `data.augment` of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # commands that only check a configuration start without NumPy
    import numpy as np

Crop = Literal["centre", "random"]
CROPS = ("centre", "random")
_COLOURS = ("saturation", "hue", "stain")
_VALUES = ("brightness", "contrast", *_COLOURS, "blur")
# of numbers that do not begin at 0 there are none
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
    """Bounds of what is drawn for each sample and epoch; as it comes, nothing is changed.

    Attributes:
        crop: which part of a larger image is taken, its "centre" or a "random" one.
        flip: probability of being mirrored left to right, likewise top to bottom, and of volumes
            first slice to last.
        rotate: whether images are turned by 0, 90, 180 or 270 degrees, equally often; volumes in
            the plane of their rows and columns.
        brightness, contrast, saturation: b changes it by a factor from 1 - b to 1 + b.
        hue: colours are turned by up to this part of the colour circle, to either side.
        stain: amounts of hematoxylin, eosin and DAB change by a factor within 1 - stain and
            1 + stain, and by an optical density of up to stain.
        blur: standard deviation of a Gaussian blur in pixels, at most.
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
            raise ValueError(f"data.augment.rotate={self.rotate} is true or false")
        for name, most in _MOST.items():
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (math.isfinite(value) and 0 <= value <= most):
                raise ValueError(
                    f"data.augment.{name}={value} is out of range: take a number from 0, which "
                    f"leaves it out, to {most:g}"
                )

    @classmethod
    def from_config(cls, given: Mapping[str, Any] | None) -> Augmentation:
        """What `data.augment` says; None changes nothing.

        Raises:
            ValueError: a key is unknown, or a value out of range.
        """
        given = {} if given is None else {str(key): given[key] for key in given}
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(f"data.augment.{key} is unknown: there are {', '.join(known)}")
        return cls(**given)

    @property
    def moves(self) -> bool:
        """Whether pixels come from elsewhere in the image another time."""
        return self.crop == "random" or self.rotate or self.flip > 0

    def check_values(self, dims: int, dtype: np.dtype[Any]) -> None:
        """Refuse changes of pixel values, which are those of light from 0 to white, elsewhere.

        Raises:
            ValueError: the images are signals or volumes, or have negative values; names the keys.
        """
        wrong = [f"data.augment.{name}" for name in _VALUES if getattr(self, name)]
        if wrong and (dims != 2 or dtype.kind == "i"):
            what = {1: "signals", 2: f"images of {dtype}", 3: "volumes"}[dims]
            raise ValueError(
                f"{', '.join(wrong)} change colours of images from 0 to white, these are {what}: "
                "set to 0 (flip, rotate and crop remain)"
            )
        if self.rotate and dims == 1:
            raise ValueError("data.augment.rotate turns images, these are signals: set to false")

    def check_channels(self, channels: int) -> None:
        """Refuse what is about red, green and blue where there are other channels.

        Raises:
            ValueError: names the keys.
        """
        wrong = [f"data.augment.{name}" for name in _COLOURS if getattr(self, name)]
        if wrong and channels != 3:
            raise ValueError(
                f"{', '.join(wrong)} need images of 3 channels (red, green, blue), these have "
                f"{channels}: set to 0"
            )
