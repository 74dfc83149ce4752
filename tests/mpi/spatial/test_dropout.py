"""Random masks: every layout draws the picture that one process draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl import Mesh, shard
from spatialdl.spatial.random import checkpoint_contexts, keyed
from spatialdl.spatial.recompute import recompute
from tests.mpi.equality import Operation, check, drawn


def image(*shape: int) -> Tensor:
    return drawn(1, *shape)


def drop_path(x: Tensor, p: float = 0.5) -> Tensor:
    """As in timm."""
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - p)
    return x * keep.div_(1 - p)


def filled(x: Tensor, fill: Callable[[Tensor], Tensor]) -> Tensor:
    return x * fill(torch.zeros_like(x))


DRAWN: dict[str, Operation] = {
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x.flatten(2)),
    "dropout2d": F.dropout2d,
    "alpha_dropout": F.alpha_dropout,
    "feature_alpha_dropout": F.feature_alpha_dropout,
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: filled(x, lambda y: y.bernoulli_(0.3)),
    "uniform_": lambda x: filled(x, lambda y: y.uniform_(-1, 2)),
    "exponential_": lambda x: filled(x, lambda y: y.exponential_(2.0)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, 0.5, dim=1),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu in evaluation, in place": lambda x: F.rrelu(x - 0.5, inplace=True),
    "rand": lambda x: x * torch.rand(2, 4, 1, 1, dtype=torch.float64),
    "stochastic depth, new_empty": drop_path,
    "after a pool": lambda x: F.dropout(x.mean((2, 3))),
    "few pixels": lambda x: F.dropout(F.max_pool2d(x, 4)),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", DRAWN)
def test_the_same_picture_in_every_layout(name: str, meshes: dict) -> None:
    """`check` calls the operation on the whole image, then on the split one."""

    def operation(x: Tensor) -> Tensor:
        with keyed(3, 14, 15):
            first = DRAWN[name](x)
            second = DRAWN[name](x)
        return first + 2 * second

    check(operation, image(2, 4, 9, 8), [], meshes, name)


def test_channels_last_and_different_numbers_for_different_pixels(meshes: dict) -> None:
    whole = image(2, 4, 9, 8)
    with keyed(1, 2):
        expected = F.dropout(whole)
    for mesh in meshes.values():
        x = shard(whole.contiguous(memory_format=torch.channels_last), mesh)
        with keyed(1, 2):
            assert torch.equal(F.dropout(x).full_tensor(), expected)
        numbers = torch.rand_like(x).full_tensor()
        assert numbers.unique().numel() == numbers.numel()


def test_without_a_key_ranks_agree_on_a_seed(meshes: dict, world: MPI.Intracomm) -> None:
    whole = torch.ones(2, 4, 9, 8)
    before = torch.get_rng_state()
    for mesh in meshes.values():
        x = shard(whole, mesh)
        first, second = (F.dropout(x).full_tensor() for _ in range(2))
        assert not torch.equal(first, second)
        assert 0.3 < (first == 0).double().mean() < 0.7
        channels = F.dropout2d(x).full_tensor()
        assert torch.equal(channels, channels[..., :1, :1].expand_as(channels))
        for mask in (first, channels):
            assert all(torch.equal(mask, other) for other in world.allgather(mask))
    assert torch.equal(torch.get_rng_state(), before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.conv(x)).tanh(), 0.3)
        x = drop_path(F.dropout2d(x, 0.2) + x, 0.2)
        return x * F.dropout(x.mean((2, 3), keepdim=True))


def as_it_is(block: Block, x: Tensor) -> Tensor:
    return block(x)


def by_pytorch(block: Block, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)


def by_tape(block: Block, x: Tensor) -> Tensor:
    return recompute(block, x, modules=[block])


def gradients(run: Callable[[Block, Tensor], Tensor], mesh: Mesh | None) -> list[Tensor]:
    """Of the image and of the kernel; two micro-batches, whose backward comes after both."""
    block = Block().double()
    leaf = image(2, 4, 9, 8).requires_grad_()
    losses = []
    for microbatch in range(2):
        with keyed(5, 1, microbatch):
            losses.append(run(block, leaf if mesh is None else shard(leaf, mesh)).square().sum())
    for loss in losses:
        loss.backward()
    grads = [leaf.grad, block.conv.weight.grad]
    if mesh is not None:
        grads[1] = sum(MPI.COMM_WORLD.allgather(grads[1])) / mesh.size
    return grads


@pytest.mark.parametrize("run", [as_it_is, by_pytorch, by_tape])
def test_what_runs_again_draws_the_same_masks(
    run: Callable[[Block, Tensor], Tensor], meshes: dict
) -> None:
    expected = gradients(as_it_is, None)
    for mesh in [None, *meshes.values()]:
        for ours, plain in zip(gradients(run, mesh), expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("run", [by_pytorch, by_tape])
def test_what_runs_again_without_a_key(
    run: Callable[[Block, Tensor], Tensor], meshes: dict
) -> None:
    """The gradient of a sum of masked numbers shows the mask of backward."""

    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * 2, 0.5)

    for mesh in meshes.values():
        leaf = image(2, 4, 9, 8).requires_grad_()
        y = run(Drop(), shard(leaf, mesh))
        F.dropout(shard(image(2, 4, 9, 8), mesh))  # the running number of calls goes on
        y.sum().backward()
        torch.testing.assert_close(leaf.grad * leaf.detach(), y.full_tensor())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_second_run_that_would_draw_other_masks_raises(reentrant: bool, meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(image(2, 4, 9, 8), mesh).requires_grad_()
        y = checkpoint(lambda x: F.dropout(x.sin()).sin(), x, use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match="checkpoint_contexts"):
            y.sum().backward()
