"""What tests of operations on split images share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.mpi.equality import Operation

Shapes = Sequence[tuple[int, ...]]
Cases = dict[str, tuple[Operation, tuple[int, ...], Shapes]]
"""Operations, shapes of their images, and shapes of their parameters; for `check_keyed`."""


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def tokens(x: Tensor) -> Tensor:
    """(N, C, ...) as (N, tokens, C)."""
    return x.flatten(2).transpose(1, 2)


def near(size: int, kernel: int = 3) -> Tensor:
    """For each place the indices of its window, which lies within the image."""
    first = (torch.arange(size) - kernel // 2).clamp(0, size - kernel)
    return first[:, None] + torch.arange(kernel)
