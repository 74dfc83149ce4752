"""Encoder and aggregator on all tiles of a slide equal one process that keeps the whole graph."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import spatialdl
from spatialdl import Mesh, UnsupportedSpatialOp, init_mesh
from spatialdl.bags import EndToEnd
from spatialdl.random import keyed

RANKS = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
WIDTH, CLASSES = 6, 3
NEAR = {"rtol": 1e-10, "atol": 1e-10}


@cache
def mesh_of(data: int = 1) -> Mesh:
    return init_mesh((RANKS // data,), data=data)


class DropPath(nn.Module):
    """Whole tiles are dropped, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.8)
        return x * keep


def encoder(norm: nn.Module | None = None, drops: bool = True) -> nn.Module:
    layers = [
        nn.Conv2d(2, 4, 3),
        norm or nn.GroupNorm(2, 4),
        nn.GELU(),
        *([nn.Dropout2d(0.3), DropPath()] if drops else []),
        nn.Conv2d(4, WIDTH, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        *([nn.Dropout(0.2)] if drops else []),
    ]
    return nn.Sequential(*layers)


class MeanPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv1d(WIDTH, 5, 1), nn.Linear(5, CLASSES)

    def forward(self, bag: Tensor) -> Tensor:
        return self.head(self.embed(bag).tanh().mean(2))


class GatedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values, self.gate = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.score, self.head = nn.Linear(4, 1), nn.Linear(WIDTH, CLASSES)
        self.drop = nn.Dropout(0.25)

    def forward(self, bag: Tensor) -> Tensor:
        tiles = bag.transpose(1, 2)
        scores = self.score(self.drop(self.values(tiles).tanh() * self.gate(tiles).sigmoid()))
        pooled = (scores.softmax(1).transpose(1, 2) @ tiles).flatten(1)
        return self.head(self.drop(pooled))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH) / 5)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.drop = nn.Dropout(0.1)

    def forward(self, bag: Tensor) -> Tensor:
        x = torch.cat([self.token, bag.transpose(1, 2)], 1)
        q, k, v = (
            part.unflatten(2, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return self.head(self.norm(x)[:, 0])


AGGREGATORS: dict[str, Callable[[], nn.Module]] = {
    "mean": MeanPool,
    "gated attention": GatedAttention,
    "transformer": Transformer,
}


def slides(*counts: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [
        (torch.randn(n, 2, 9, 8, dtype=torch.float64), torch.tensor([number % CLASSES]))
        for number, n in enumerate(counts)
    ]


def bounds_of(count: int, seed: int) -> list[int]:
    """Where the ranges of ranks begin: anywhere, and the same on all ranks."""
    draw = random.Random(seed)
    return [0, *sorted(draw.randint(0, count) for _ in range(mesh_of().parts - 1)), count]


def networks(aggregator: str, norm: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return encoder(norm).double(), AGGREGATORS[aggregator]().double()


def alone(
    both: Sequence[nn.Module], bags: Sequence[tuple[Tensor, Tensor]], steps: int = 3
) -> tuple[list[Tensor], list[Tensor], nn.Module]:
    """One process: losses of all slides, gradients of the first step, networks after the last."""
    whole = nn.ModuleList(copy.deepcopy(one) for one in both)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], []
    for step in range(steps):
        optimizer.zero_grad()
        with keyed(5, step):
            for tiles, target in bags:
                loss = F.cross_entropy(whole[1](whole[0](tiles).t()[None]), target)
                loss.backward()
                losses.append(loss.detach())
        if step == 0:
            grads = [parameter.grad.clone() for parameter in whole.parameters()]
        optimizer.step()
    return losses, grads, whole


def split(
    both: Sequence[nn.Module],
    bags: Sequence[tuple[Tensor, Tensor]],
    mode: str,
    size: int,
    tiles_of: Callable[[Tensor, int], tuple[object, int | None]],
) -> tuple[list[Tensor], list[Tensor], EndToEnd]:
    e2e = EndToEnd(*(copy.deepcopy(one) for one in both), mesh_of(), size, mode)
    optimizer = torch.optim.SGD(e2e.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], []
    for step in range(3):
        optimizer.zero_grad()
        with keyed(5, step):
            for number, (tiles, target) in enumerate(bags):
                given, count = tiles_of(tiles, number)
                last = number == len(bags) - 1
                losses.append(e2e.step(given, target, F.cross_entropy, count, average=last))
        if step == 0:
            grads = [parameter.grad.clone() for parameter in e2e.parameters()]
        optimizer.step()
    return losses, grads, e2e


def own_range(tiles: Tensor, seed: int) -> tuple[Tensor, None]:
    bounds = bounds_of(len(tiles), seed)
    part = mesh_of().part
    return tiles[bounds[part] : bounds[part + 1]], None


def read(tiles: Tensor, seed: int) -> tuple[Callable[[int, int], Tensor], int]:
    return lambda start, stop: tiles[start:stop].clone(), len(tiles)


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **NEAR)


@pytest.mark.parametrize(("mode", "given"), [("slices", own_range), ("graph", read)])
@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_losses_gradients_and_three_steps_are_those_of_one_process(aggregator, mode, given):
    both, bags = networks(aggregator), slides(13, 7, 2)  # fewer than four ranks, too
    losses, grads, whole = alone(both, bags)
    found, found_grads, e2e = split(both, bags, mode, 3, given)
    assert_same(found, losses)
    assert_same(found_grads, grads)
    assert max(grad.abs().max() for grad in grads[:2]) > 1e-3
    assert_same(list(e2e.parameters()), list(whole.parameters()))


@pytest.mark.parametrize("size", [1, 100])
def test_the_size_of_slices_changes_nothing(size):
    both, bags = networks("gated attention"), slides(5, 1)
    losses, grads, _ = alone(both, bags)
    found, found_grads, _ = split(both, bags, "slices", size, own_range)
    assert_same(found, losses)
    assert_same(found_grads, grads)


def test_batch_norm_in_a_graph_sees_all_tiles_and_is_updated_once():
    both, bags = networks("mean", nn.BatchNorm2d(4)), slides(9, 3)
    losses, grads, whole = alone(both, bags)
    found, found_grads, e2e = split(both, bags, "graph", 3, own_range)
    assert_same(found, losses)
    assert_same(found_grads, grads)
    assert_same(list(e2e.encoder.buffers()), list(whole[0].buffers()))


def test_batch_norm_in_slices_is_refused_by_name_unless_frozen():
    both = networks("mean", nn.BatchNorm2d(4))
    e2e = EndToEnd(*both, mesh_of())
    tiles, target = slides(3)[0]
    with pytest.raises(UnsupportedSpatialOp, match=r"1 \(BatchNorm2d\) of the encoder"):
        e2e.step(own_range(tiles, 0)[0], target, F.cross_entropy)
    frozen = EndToEnd(*both, mesh_of(), frozen_norm=True)
    frozen.train()
    assert not frozen.encoder[1].training
    assert frozen.encoder[0].training
    before = [buffer.clone() for buffer in frozen.encoder.buffers()]
    frozen.step(own_range(tiles, 0)[0], target, F.cross_entropy)
    assert_same(list(frozen.encoder.buffers()), before)


@pytest.mark.parametrize("mode", ["slices", "graph"])
def test_buffers_are_updated_once_also_on_ranks_without_tiles(mode):
    """Spectral norm takes a step of its power iteration in each forward."""
    both, bags = networks("mean"), slides(7, 1)
    nn.utils.parametrizations.spectral_norm(both[0][0])
    losses, grads, whole = alone(both, bags)
    found, found_grads, e2e = split(both, bags, mode, 2, own_range)
    assert_same(found, losses)
    assert_same(found_grads, grads)
    assert_same(list(e2e.encoder.buffers()), list(whole[0].buffers()))


def test_what_draws_from_pytorchs_own_generator_is_drawn_again():
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, torch.randperm(WIDTH)]

    both, (bag,) = networks("mean"), slides(6)
    e2e = EndToEnd(nn.Sequential(both[0], Shuffled()), both[1], mesh_of(), 2)
    for _ in range(2):  # features of both runs are compared
        e2e.step(own_range(bag[0], 0)[0], bag[1], F.cross_entropy)


def test_autocast_computes_the_same_in_both_runs():
    """Weights cast in the first run, which has no graph, are not those of the second."""
    both, (bag,) = networks("gated attention"), slides(11)
    found = {}
    for mode in ("slices", "graph"):
        e2e = EndToEnd(*(copy.deepcopy(one).float() for one in both), mesh_of(), 4, mode)
        tiles = own_range(bag[0].float(), 1)[0]
        with keyed(1, 1), torch.autocast("cpu", torch.bfloat16):
            loss = e2e.step(tiles, bag[1], F.cross_entropy)
        found[mode] = [loss, *(parameter.grad for parameter in e2e.parameters())]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    assert all(grad.abs().max() > 0 for grad in found["slices"][1:3])


def test_replicas_have_slides_of_their_own_and_clipping_counts_all_parameters():
    if RANKS % 2:
        pytest.skip("two replicas need an even number of ranks")
    both, bags = networks("gated attention"), slides(5, 8)
    for drop in [m for m in both[0] if isinstance(m, nn.Dropout | nn.Dropout2d)]:
        drop.eval()
    mesh = mesh_of(2)
    e2e = EndToEnd(*(copy.deepcopy(one) for one in both), mesh, 3)
    tiles, target = bags[mesh.replica]
    with keyed(5, 0):
        start, stop = mesh.box((len(tiles),))
        e2e.step(tiles[start:stop], target, F.cross_entropy)
    norm = spatialdl.clip_grad_norm_(e2e, mesh, 0.05)
    whole = nn.ModuleList(both)
    for tiles, target in bags:
        with keyed(5, 0):
            (F.cross_entropy(whole[1](whole[0](tiles).t()[None]), target) / 2).backward()
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
    assert_same([norm], [wanted])
    assert_same([p.grad for p in e2e.parameters()], [p.grad for p in whole.parameters()])


def test_the_output_without_a_graph_is_that_of_one_process():
    both, (bag,) = networks("transformer"), slides(5)
    e2e = EndToEnd(*both, mesh_of(), 2).eval()
    for tiles, count in (own_range(bag[0], 2), read(bag[0], 0)):
        output = e2e(tiles, count)
        assert not output.requires_grad
        assert_same([output], [both[1].eval()(both[0].eval()(bag[0]).t()[None]).detach()])


def test_a_frozen_encoder_gets_no_gradient_and_runs_once():
    both, (bag,) = networks("mean"), slides(5)
    both[0].requires_grad_(False)
    calls: list[int] = []
    e2e = EndToEnd(*both, mesh_of(), 8)

    def tiles(start: int, stop: int) -> Tensor:
        calls.append(start)
        return bag[0][start:stop]

    e2e.step(tiles, bag[1], F.cross_entropy, 5)
    start, stop = mesh_of().box((5,))
    assert calls == [start] * (stop > start)
    assert all(parameter.grad is None for parameter in e2e.encoder.parameters())
    assert all(parameter.grad is not None for parameter in e2e.aggregator.parameters())


def test_what_does_not_fit_is_refused_on_all_ranks():
    both, (bag,) = networks("mean"), slides(5)
    e2e = EndToEnd(*both, mesh_of())
    tiles, target = bag
    own = own_range(tiles, 0)[0]

    def refused(given: object, count: int | None, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            e2e.step(given, target, F.cross_entropy, count)

    refused(tiles[:0], None, "the slide has no tiles")
    refused(read(tiles, 0)[0], None, "pass count=")
    refused(read(tiles, 0)[0], -1, "must not be negative")
    refused(own, 6, "count=6 tiles, but ranks passed")
    refused(own.clone().requires_grad_(), None, "must not require a gradient")
    refused([own], None, "got list")
    if RANKS > 1:
        refused(own if RANK else read(tiles, 0)[0], 5, "inconsistent across ranks")
    with pytest.raises(ValueError, match="scalar loss"):
        e2e.step(own, target, lambda y, t: y)
    for wrong in ({"slice_size": 0}, {"mode": "both"}):
        with pytest.raises(ValueError, match="slice_size must be at least 1 and mode"):
            EndToEnd(*both, mesh_of(), **wrong)
    with pytest.raises(ValueError, match="a grid with one axis"):
        EndToEnd(*both, init_mesh((RANKS, 1)))


def test_a_function_that_gives_other_tiles_the_second_time_is_noticed():
    both, (bag,) = networks("mean"), slides(4 * RANKS)
    e2e = EndToEnd(*both, mesh_of(), 8)
    seen: list[int] = []

    def tiles(start: int, stop: int) -> Tensor:
        seen.append(start)
        return bag[0][start:stop] + len(seen)

    with pytest.raises(RuntimeError, match="first run for tiles"):
        e2e.step(tiles, bag[1], F.cross_entropy, 4 * RANKS)
    with pytest.raises(ValueError, match=r"must return 4 tiles as a tensor, got \(1,"):
        e2e.step(lambda start, stop: bag[0][:1], bag[1], F.cross_entropy, 4 * RANKS)
