"""How many pixels apart the cells of an encoder's map lie, found without memory and data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from spatialdl.features.encoders.encoder import Encoder
from spatialdl.spatial.shadow import meta_copy

_FAR = 15120  # pixels; divided by all strides up to 10, and by 12, 14, 16, 20, 24, 28, 30
_STEPS = (1, 5, 64)


class Stride(NamedTuple):
    """Pixels from one cell of a map to the next."""

    rows: int
    columns: int


def stride_of(encoder: Encoder) -> Stride:
    """The stride of an encoder's maps.

    Raises:
        ValueError: it does not take images of other sizes, or its map does not grow with them.
    """
    side = encoder.preprocessing.size
    with torch.no_grad(), torch.device("meta"):
        shadow = meta_copy(encoder.network)
        first = _map_size(shadow, side)
        far = _map_size(shadow, side + _FAR)
        found = []
        for dim, name in enumerate(("rows", "columns")):
            more = far[dim] - first[dim]
            stride = round(_FAR / more) if more > 0 else 0
            if stride == 0 or not _is_regular(shadow, side, dim, first[dim], stride):
                raise ValueError(
                    f"the encoder gives {first[dim]} {name} for an image of {side} x {side}, "
                    f"{far[dim]} for one of {side + _FAR} x {side + _FAR}: these are not so many "
                    "whole pixels apart everywhere, so that they have no place in a slide; take an "
                    "encoder without pooling to a fixed size"
                )
            found.append(stride)
    return Stride(*found)


def _is_regular(shadow: nn.Module, side: int, dim: int, first: int, stride: int) -> bool:
    """Whether each stride of pixels gives a cell more."""
    return all(_map_size(shadow, side + steps * stride)[dim] == first + steps for steps in _STEPS)


def _map_size(shadow: nn.Module, side: int) -> tuple[int, int]:
    try:
        rows, columns = shadow(torch.empty(1, 3, side, side)).shape[2:]
    except NotImplementedError as error:
        raise ValueError(
            f"the encoder has an operation that cannot be looked at without data ({error}): its "
            "stride is not known"
        ) from error
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the encoder does not take images of {side} x {side} ({said}), and a whole region may "
            "have any size; transformers of timm do with --encoder-args dynamic_img_size=true"
        ) from error
    return int(rows), int(columns)
