"""An operation in place must be noticed by those that have kept what it overwrites.

Once it was not: below autograd nobody counted the writes to a tile, so the convolution before a
`relu_` worked out its weight's gradient from the overwritten tile, without a word.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import spatialdl

KEEPERS: dict[str, Callable[[Tensor], Tensor]] = {
    "conv3x3": nn.Conv2d(3, 3, 3, padding=1).double(),
    "conv1x1": nn.Conv2d(3, 3, 1).double(),
    "batch_norm": nn.BatchNorm2d(3).double(),
    "square": lambda x: x * x,
}
WRITERS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": F.relu_,
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(torch.full((3, 1, 1), 2.0, dtype=torch.float64)),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(x * 3),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("keeper", KEEPERS)
def test_overwriting_what_backward_needs_is_an_error(
    keeper: str, writer: str, world: MPI.Intracomm
) -> None:
    mesh = spatialdl.init_mesh((world.size, 1))
    image = torch.randn(1, 3, 16, 16, dtype=torch.float64).requires_grad_()
    x = spatialdl.shard(image, mesh) * 1
    y = KEEPERS[keeper](x)
    WRITERS[writer](x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_after_a_convolution_is_exact(world: MPI.Intracomm) -> None:
    mesh = spatialdl.init_mesh((world.size, 1))
    image = torch.sin(torch.arange(3 * 17 * 9, dtype=torch.float64)).view(1, 3, 17, 9)
    weight = torch.cos(torch.arange(81, dtype=torch.float64)).view(3, 3, 3, 3).requires_grad_()
    gradients = []
    for x in (image, spatialdl.shard(image, mesh)):
        y = F.conv2d(x, weight, padding=1).add_(1).mul_(2).relu_()
        (gradient,) = torch.autograd.grad((y * y).sum(), weight)
        gradients.append(gradient)
    total = world.all_reduce(gradients[1])
    torch.testing.assert_close(total / world.size, gradients[0], rtol=1e-12, atol=1e-10)
