"""Split tensors of a grid of one rank: as PyTorch's own, and split where those of others are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import spatialdl
from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, init_mesh, shard
from spatialdl.models import resnet50
from tests.mpi.spatial.test_tensor import ASKED, H, W, image


@pytest.fixture(scope="module")
def one() -> Mesh:
    """A grid of this rank alone."""
    return init_mesh((1, 1), comm=MPI.COMM_SELF)


@pytest.fixture(scope="module")
def all_ranks() -> Mesh:
    ranks = MPI.COMM_WORLD.size
    return init_mesh((2, 2) if ranks == 4 else (ranks, 1))


MORE: dict[str, Callable[[Tensor], object]] = {
    "same from the right": lambda x: image(4, 1, 1) * x,
    "a whole image": lambda x: image() + x,
    "a whole image as the other's type": lambda x: image().type_as(x),
    "more dims": lambda x: x + image(3, 2, 4, 1, 1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "float": lambda x: x.float(),
    "clone": lambda x: x.clone(),
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=True),
    "compare": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "two results": torch.frexp,
    "in place": lambda x: (x * 1).relu_(),
    "one row": lambda x: x[:, :, 3],
    "steps": lambda x: x[:, 1, 1::2, :7],
    "tokens": lambda x: F.layer_norm(x.flatten(2).transpose(1, 2), (4,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": F.instance_norm,
    "softmax over channels": lambda x: x.softmax(1),
    "softmax over columns": lambda x: F.softmax(x, dim=-1),
    "strided convolution": lambda x: F.conv2d(x, image(3, 4, 3, 3), stride=2, padding=1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "global average": lambda x: F.adaptive_avg_pool2d(x, 1),
    "average": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "mean of an image": lambda x: x.mean((2, 3), keepdim=True),
    "mean of a row": lambda x: x.mean(-1),
    "mean of channels": lambda x: x.mean(1),
    "squeeze and excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "losses of pixels": lambda x: F.mse_loss(x, image(seed=1), reduction="none"),
}


@pytest.mark.parametrize("name", [*ASKED, *MORE])
def test_the_same_results_are_split_on_one_rank_and_on_all(
    name: str, one: Mesh, all_ranks: Mesh
) -> None:
    """Also random numbers are then drawn for the same tensors in the same way."""
    operation = {**ASKED, **MORE}[name]
    try:
        expected = operation(shard(image().requires_grad_(), all_ranks))
    except (UnsupportedSpatialOp, RuntimeError):
        return
    given = operation(shard(image().requires_grad_(), one))
    for ours, theirs in zip(tree_leaves(given), tree_leaves(expected), strict=True):
        assert isinstance(ours, SpatialTensor) == isinstance(theirs, SpatialTensor)
        assert isinstance(ours, Tensor) == isinstance(theirs, Tensor)
        if isinstance(theirs, Tensor):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert ours.requires_grad == theirs.requires_grad
        if isinstance(theirs, SpatialTensor):
            assert ours.spatial_dims == theirs.spatial_dims
            assert ours.spatial_layout.size == theirs.spatial_layout.size
            assert ours.spatial_layout.grid == (1, 1)
            # random numbers too, in whichever layout they were drawn
            torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor())


def test_a_training_step_has_the_bits_of_one_process(one: Mesh) -> None:
    torch.manual_seed(0)
    network, images = resnet50(num_classes=3), torch.randn(2, 3, 64, 64)
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight)
    results = []
    for x in (images, shard(images, one)):
        network.zero_grad()
        loss = F.cross_entropy(network(x), torch.tensor([0, 2]))
        loss.backward()
        buffers = [value.clone() for value in network.buffers()]
        network.apply(lambda m: isinstance(m, nn.BatchNorm2d) and m.reset_running_stats())
        results.append([loss, *(p.grad.clone() for p in network.parameters()), *buffers])
    plain, ours = results
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


class Dropping(nn.Module):
    """Drops pixels, whole channels, and what is no longer split."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.silu(self.norm(self.conv(x))), 0.4)
        x = F.dropout2d(x * x.mean((2, 3), keepdim=True).sigmoid(), 0.3)
        x = x + torch.randn_like(x) * 0.1
        return self.head(F.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1), 0.5))


@pytest.mark.parametrize("is_keyed", [False, True])
def test_random_numbers_are_those_of_all_ranks(is_keyed: bool) -> None:
    ranks = MPI.COMM_WORLD.size
    torch.manual_seed(3)
    network = Dropping().double()
    results = []
    for grid, comm in (((ranks, 1), None), ((1, 1), MPI.COMM_SELF)):
        torch.manual_seed(5)  # of new meshes, and of what is not split
        mesh = init_mesh(grid, comm=comm)
        if is_keyed:
            with spatialdl.random.keyed(1, 2):
                results.append(network(shard(image(), mesh)))
        else:
            results.append(network(shard(image(), mesh)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


def test_what_draws_without_a_handler_is_refused(one: Mesh) -> None:
    for draw in (Tensor.cauchy_, Tensor.log_normal_, torch.poisson):
        with pytest.raises(UnsupportedSpatialOp):
            draw(shard(image().abs(), one))


def test_gradients_are_split(one: Mesh) -> None:
    x = shard(image(), one).requires_grad_()
    hooked: list[Tensor] = []
    x.register_hook(hooked.append)
    (x * 3).sum().backward()
    (returned,) = torch.autograd.grad((x * 2).sum(), x)
    for grad, value in ((hooked[0], 3), (x.grad, 3), (returned, 2)):
        assert isinstance(grad, SpatialTensor)
        assert grad.spatial_layout == x.spatial_layout
        torch.testing.assert_close(
            grad.full_tensor(), torch.full((2, 4, H, W), float(value)).double()
        )


def test_views_are_pytorchs(one: Mesh) -> None:
    """What is written to them reaches the image, and autograd knows."""

    def steps(x: Tensor) -> Tensor:
        x = x * 1
        x[:, :, 3].mul_(2)
        x.permute(0, 2, 3, 1)[:, 1:5, 2:].add_(x.mean())
        return x.relu_() * x

    plain, ours = (image().requires_grad_() for _ in range(2))
    expected, given = steps(plain), steps(shard(ours, one))
    assert isinstance(given, SpatialTensor)
    assert torch.equal(given.full_tensor(), expected)
    expected.sum().backward()
    given.sum().backward()
    assert torch.equal(ours.grad, plain.grad)


def test_a_plain_tensor_that_is_handed_on_stays_plain(one: Mesh) -> None:
    x, plain = shard(image(), one), image()
    assert isinstance(plain.type_as(x), SpatialTensor)
    assert torch.add(plain, x, out=plain) is plain
    assert type(plain) is Tensor
    base = image()
    view = spatialdl.from_local(base, one, (H, W))
    assert type(view._base) is not SpatialTensor or view._base is not base
    assert type(base) is Tensor


def test_dims_do_not_change_in_place(one: Mesh) -> None:
    for change in (lambda x: x.transpose_(1, 3), lambda x: x.unsqueeze_(0), lambda x: x.t_()):
        with pytest.raises(UnsupportedSpatialOp, match="in place"):
            change(shard(image(), one))


def test_a_detached_tile_is_the_same_memory(one: Mesh) -> None:
    x = shard(image(), one)
    x.to_local().zero_()
    assert math.isclose(float(x.full_tensor().abs().sum()), 0.0)
