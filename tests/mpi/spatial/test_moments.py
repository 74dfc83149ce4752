"""Variances of half types and of fewer values than their correction."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from spatialdl import shard
from tests.mpi.equality import parameter, same


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float16, 1000), (torch.bfloat16, 100)])
def test_means_of_half_types_are_not_rounded_before_they_are_combined(
    dtype: torch.dtype, mean: float, meshes: dict
) -> None:
    """Their neighbours are half a deviation apart, and ranks have means between them."""
    whole = (mean + parameter(random.Random(5), 2, 3, 24, 20)).to(dtype)
    expected = whole.double().var((2, 3))
    for mesh in meshes.values():
        ours = shard(whole, mesh).var((2, 3))
        torch.testing.assert_close(ours.double(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("correction", [6 * 5 - 1, 6 * 5, 6 * 5 + 1, 1000])
def test_a_correction_may_be_more_than_there_are_values(correction: int, meshes: dict) -> None:
    whole = torch.arange(2.0 * 3 * 6 * 5).double().view(2, 3, 6, 5) % 7

    def variance(x: Tensor) -> Tensor:
        return x.var((2, 3), correction=correction)

    def deviation(x: Tensor) -> Tensor:
        return torch.std(x, (2, 3), correction=correction)

    if correction < 6 * 5:
        for mesh in meshes.values():
            torch.testing.assert_close(variance(shard(whole, mesh)), variance(whole))
    else:
        assert variance(whole).isinf().all()
        same(variance, whole, meshes, "var")
        same(deviation, whole, meshes, "std")
