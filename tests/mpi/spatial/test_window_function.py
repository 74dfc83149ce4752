"""Outputs that read no pixel at all."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.mpi.equality import check, parameter


@pytest.fixture
def memory_is_never_clean() -> Iterator[None]:
    """What nobody has written to is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("stride", "kernel", "more"), [(5, 2, 4), (7, 1, 6), (9, 3, 8)])
def test_gaps_between_pixels_are_the_bias(
    stride: int, kernel: int, more: int, meshes: dict, memory_is_never_clean: None
) -> None:
    """Ranks may have nothing else: one pixel of the image becomes many rows and columns."""
    rng = random.Random(3)
    weights = [parameter(rng, 3, 4, kernel, kernel), parameter(rng, 4)]

    def spread(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        few = F.max_pool2d(x, 4)
        return F.conv_transpose2d(few, weight, bias, stride, 0, more)

    for mesh in meshes.values():
        check(spread, parameter(rng, 2, 3, 5, 7), weights, mesh, f"on {mesh.grid} ")
