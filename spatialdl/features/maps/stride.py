"""How many pixels apart the cells of an encoder's map lie, found without memory and data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from spatialdl.features.encoders.encoder import Encoder
from spatialdl.spatial.shadow import meta_copy

_FAR = 30240  # pixels; divided by 32 and 224, and by all other usual strides
_TIMES = 64
_STEPS = (1, 5, 64)


@dataclass(frozen=True)
class Stride:
    """Rows and columns of pixels.

    Attributes:
        pixels: from one cell of a map to the next.
        multiple: of which sizes of images are to be; each so many more give so many more cells.
    """

    pixels: tuple[int, int]
    multiple: tuple[int, int]


def stride_of(encoder: Encoder) -> Stride:
    """The stride of an encoder's maps.

    Raises:
        ValueError: it does not take images of other sizes, or its map does not grow with them.
    """
    side = encoder.preprocessing.size
    with torch.no_grad(), torch.device("meta"):
        shadow = meta_copy(encoder.network)
        first, far = _map_size(shadow, side), _map_size(shadow, side + _FAR)
        found = [_along(shadow, side, dim, first[dim], far[dim]) for dim in (0, 1)]
    (rows, of_rows), (columns, of_columns) = found
    return Stride((rows, columns), (of_rows, of_columns))


def _along(shadow: nn.Module, side: int, dim: int, first: int, far: int) -> tuple[int, int]:
    """Stride and multiple of a dim."""
    stride = round(_FAR / (far - first)) if far > first else 0
    for times in range(1, _TIMES + 1) if stride else ():
        if _is_regular(shadow, side, dim, first, stride, times):
            return stride, stride * times
    name = ("rows", "columns")[dim]
    raise ValueError(
        f"the encoder gives {first} {name} for an image of {side} x {side}, {far} for one of "
        f"{side + _FAR} x {side + _FAR}: its map does not grow by a cell for so many whole pixels, "
        "and has no place in a slide; take an encoder without pooling to a fixed size"
    )


def _is_regular(
    shadow: nn.Module, side: int, dim: int, first: int, stride: int, times: int
) -> bool:
    """Whether so many times more pixels give so many more cells."""
    try:
        return all(
            _map_size(shadow, side + steps * times * stride)[dim] == first + steps * times
            for steps in _STEPS
        )
    except ValueError:  # an image of that size is not taken
        return False


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
            "have any size: take another encoder; of timm, vision transformers do with "
            "--encoder-args dynamic_img_size=true, and Swin with strict_img_size=false"
        ) from error
    return int(rows), int(columns)
