"""A rank's box of images or masks, of which parts are made when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """What a rank with virtual tiles has of a micro-batch's images, or of their masks.

    Attributes:
        shape: of the rank's box: (N, C, *spatial), of masks (N, *spatial).
        dtype: of what is read.
        size: of the spatial dims of the whole image.
        read: gives a part, from slices of all dims or with ``...`` of the last ones.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    read: Callable[[Any], Tensor]

    def __getitem__(self, part: Any) -> Tensor:
        return self.read(part)
