"""Unfold: the pixels that each window reads, as tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.repartition import repartition
from spatialdl.layout import Window
from spatialdl.spatial.dims import TOKENS
from spatialdl.spatial.table import refusal, register_op, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.spatial.window import check_image, check_output, nothing, pair, window_move


def _steps(window: Window) -> tuple[int, int, int]:
    return window.kernel, window.stride, window.dilation


@register_op(F.unfold, torch._C._nn.im2col, split=("input",))
def unfold(
    input: SpatialTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    """(N, C, H, W) to (N, C * kernel rows * kernel columns, outputs), outputs row by row."""
    check_image("unfold", input)
    values = (pair(value) for value in (kernel_size, stride, padding, dilation))
    rows, cols = (Window(*each) for each in zip(*values, strict=True))
    if min(*_steps(rows), *_steps(cols)) < 1 or min(rows.padding, cols.padding) < 0:
        raise ValueError(
            "unfold: kernel, stride and dilation must be at least 1, padding at least 0; got "
            f"{rows} and {cols}"
        )
    size = rows.output_size(input.shape[-2]), cols.output_size(input.shape[-1])
    check_output("unfold", input, size)
    mesh = input.mesh
    output, plan = window_move(input.spatial_layout, rows, cols, size, mesh.part)
    window = repartition(to_tile(input), mesh.grid_comm, plan, name="unfold")
    own = mesh.own_box(output)
    if own.is_empty:
        values_of_one = input.shape[1] * rows.kernel * cols.kernel
        tokens = nothing((input.shape[0], values_of_one, 0), window)
    else:
        tokens = F.unfold(
            window,
            (rows.kernel, cols.kernel),
            (rows.dilation, cols.dilation),
            0,
            (rows.stride, cols.stride),
        )
    return from_tile(tokens, output, mesh, TOKENS)


@register_op(F.fold, torch._C._nn.col2im)
def fold(*args: Any, **kwargs: Any) -> Tensor:
    raise refusal(
        F.fold,
        spatial_in((args, kwargs)),
        "windows that overlap over ranks are not added up; use conv_transpose2d, or call "
        "full_tensor() before it",
    )
