"""Stride in pixels of an encoder's map, found on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from spatialdl.features.encoders.encoder import Encoder
from spatialdl.spatial.meta import meta_copy, on_meta

_FAR = 30240  # pixels; a multiple of all usual strides, such as 32 and 224
_TIMES = 64
_STEPS = (1, 5, 64)


@dataclass(frozen=True)
class Stride:
    """The stride of a map, in rows and columns.

    Attributes:
        pixels: pixels from one cell to the next.
        multiple: image sizes must be multiples of these pixels, a multiple of the stride.
    """

    pixels: tuple[int, int]
    multiple: tuple[int, int]


def stride_of(encoder: Encoder) -> Stride:
    """Find the stride of an encoder's maps.

    Raises:
        ValueError: the encoder does not take other image sizes, or its map does not grow with them.
    """
    side = encoder.preprocessing.size
    with torch.no_grad(), on_meta():
        shadow = meta_copy(encoder.network)
        first, far = _map_size(shadow, side), _map_size(shadow, side + _FAR)
        found = [_along(shadow, side, dim, first[dim], far[dim]) for dim in (0, 1)]
    (rows, of_rows), (columns, of_columns) = found
    return Stride((rows, columns), (of_rows, of_columns))


def _along(shadow: nn.Module, side: int, dim: int, first: int, far: int) -> tuple[int, int]:
    """Stride and multiple along one dim."""
    stride = round(_FAR / (far - first)) if far > first else 0
    for times in range(1, _TIMES + 1) if stride else ():
        if _is_regular(shadow, side, dim, first, stride, times):
            return stride, stride * times
    name = ("rows", "columns")[dim]
    raise ValueError(
        f"the encoder returns {first} {name} for an image of {side} x {side}, {far} for one of "
        f"{side + _FAR} x {side + _FAR}: its map has no regular stride, and cannot be located in a "
        "slide; use an encoder without pooling to a fixed size"
    )


def _is_regular(
    shadow: nn.Module, side: int, dim: int, first: int, stride: int, times: int
) -> bool:
    """Whether multiples of `times` strides more pixels add `times` cells each."""
    try:
        return all(
            _map_size(shadow, side + steps * times * stride)[dim] == first + steps * times
            for steps in _STEPS
        )
    except ValueError:  # the encoder does not take that size
        return False


def _map_size(shadow: nn.Module, side: int) -> tuple[int, int]:
    try:
        rows, columns = shadow(torch.empty(1, 3, side, side)).shape[2:]
    except NotImplementedError as error:
        raise ValueError(
            f"the encoder has an operation without a meta kernel ({error}): its stride is unknown"
        ) from error
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the encoder does not take images of {side} x {side} ({reason}), but --whole needs "
            "any size: use another encoder; in timm, vision transformers support it with "
            "--encoder-args dynamic_img_size=true, and Swin with strict_img_size=false"
        ) from error
    return int(rows), int(columns)
