"""Fused kernels that return what ring attention needs; attention itself: tests/mpi/spatial."""

from __future__ import annotations

import pytest
import torch

from spatialdl.spatial.blockwise import KERNELS, kernel_for


def test_what_no_kernel_computes() -> None:
    x = torch.rand(2, 3, 7, 8, dtype=torch.float64)
    assert kernel_for(x, x, x[..., :5]) is None, "values of another size"
    assert kernel_for(x[None], x[None], x[None]) is None, "five dims"
    cuda = KERNELS["cuda"]
    assert not cuda.takes(x, x, x), "float64"
    x = x.float()
    assert cuda.takes(x, x, x)
    assert not cuda.takes(x[..., :6], x[..., :6], x[..., :6]), "features that are not aligned"


@pytest.mark.parametrize("queries", [32, 37])
def test_the_kernel_of_cuda_is_called_as_its_shapes_say(queries: int) -> None:
    """Shapes alone: its log-sum-exp is that of 64 queries where there are 37."""
    query, key = (
        torch.empty(2, 3, queries, 8, device="meta"),
        torch.empty(2, 3, 9, 8, device="meta"),
    )
    cuda = KERNELS["cuda"]
    out, spread = cuda.forward(query, key, key, 0.3)
    assert out.shape == query.shape
    assert spread.shape == query.shape[:-1]
    grads = cuda.backward(query, key, key, (out, out, spread), 0.3)
    assert [x.shape for x in grads] == [query.shape, key.shape, key.shape]
