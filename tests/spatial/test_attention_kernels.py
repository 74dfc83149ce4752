"""Fused attention: which kernel takes what, and that each returns what ring attention needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spatialdl.random.plain import attention_of_whole
from spatialdl.spatial.attention_kernels import KERNELS, kernel_for


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_the_kernel_of_the_cpu_is_attention(leading: tuple[int, ...]) -> None:
    query, key, value = drawn(*leading, 7, 8), drawn(*leading, 5, 8), drawn(*leading, 5, 8)
    for one in (query, key, value):
        one.requires_grad_()
    grad = drawn(*leading, 7, 8) - 0.5
    expected = attention_of_whole(query, key, value, scale=0.3)
    kernel = kernel_for(query, key, value)
    assert kernel is not None
    with torch.no_grad():
        out, spread = kernel.forward(query, key, value, 0.3)
        grads = kernel.backward(query, key, value, (grad, out, spread), 0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(spread, (query @ key.mT * 0.3).logsumexp(-1))
    for ours, plain in zip(
        grads, torch.autograd.grad(expected, [query, key, value], grad), strict=True
    ):
        torch.testing.assert_close(ours, plain)


def test_what_no_kernel_computes() -> None:
    x = drawn(2, 3, 7, 8)
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
