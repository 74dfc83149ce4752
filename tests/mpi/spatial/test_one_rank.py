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
from tests.mpi.equality import Operation
from tests.mpi.spatial.test_families import FAMILIES, drawn
from tests.mpi.spatial.test_refusals import UNSUPPORTED
from tests.mpi.spatial.test_views import VIEWS

H, W = 13, 10


def image(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (2, 4, H, W), dtype=torch.float64, generator=draw)


@pytest.fixture(scope="module")
def one() -> Mesh:
    """A grid of this rank alone."""
    return init_mesh((1, 1), comm=MPI.COMM_SELF)


@pytest.fixture(scope="module")
def all_ranks() -> Mesh:
    """Which draws as many numbers as the other one, for it serves the same tests."""
    ranks = MPI.COMM_WORLD.size
    return init_mesh((2, 2) if ranks == 4 else (ranks, 1))


MORE: dict[str, Callable[[Tensor], object]] = {
    "tril": lambda x: x.tril(),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2, dtype=torch.float64)),
    "conv3d": lambda x: F.conv3d(x, image(4, 4, 3, 3, 3)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x.bernoulli(0.5),
    "rand_like": torch.rand_like,
    "allclose": lambda x: torch.allclose(x, x.detach()),
    "in": lambda x: 0.5 in x,
    "five dims beside it": lambda x: x + image(1, 1, 1, 1, 1),
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
    "losses of pixels": lambda x: F.mse_loss(x, image(seed=1), reduction="none"),
}
ALSO: dict[str, tuple[Operation, Tensor]] = {
    **{name: (call, image()) for name, call in MORE.items()},
    **{
        f"{subject} {number}": (call, torch.rand(2, 4, 8, 8))
        for subject in ("what gives away pixels, or compares them", "indices", "reductions")
        for number, (_, call) in enumerate(UNSUPPORTED[subject])
    },
    **{name: (view, torch.rand(2, 4, 12, 8)) for name, view in VIEWS.items()},
    **{
        name: (lambda x, f=family: f(x, drawn(2)[1], 2), drawn(2)[0])
        for name, family in FAMILIES.items()
    },
}


@pytest.mark.parametrize("name", ALSO)
def test_the_same_results_are_split_on_one_rank_and_on_all(
    name: str, one: Mesh, all_ranks: Mesh
) -> None:
    """Also random numbers are then drawn for the same tensors in the same way."""
    operation, whole = ALSO[name]
    try:
        expected = operation(shard(whole.clone().requires_grad_(), all_ranks))
    except (UnsupportedSpatialOp, RuntimeError):
        return
    given = operation(shard(whole.clone().requires_grad_(), one))
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
