"""Encoder and aggregator on all tiles of a slide equal one process that keeps the whole graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import spatialdl
from spatialdl import Mesh, init_mesh
from spatialdl.models import abmil, bag_pooling, bag_transformer
from spatialdl.spatial.random import keyed, scope
from spatialdl.training.bags import EndToEndNetwork

RANKS = MPI.COMM_WORLD.size
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


def encoder() -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Dropout2d(0.3), DropPath()]
    layers += [nn.Conv2d(4, WIDTH, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))


SIZES = {"num_classes": CLASSES, "in_channels": WIDTH}
AGGREGATORS: dict[str, Callable[[], nn.Module]] = {
    "mean": partial(bag_pooling, **SIZES, width=5),
    "gated attention": partial(abmil, **SIZES, width=5, hidden=4),
    "transformer": partial(bag_transformer, **SIZES, width=6, depth=1, heads=2),
}


Bags = Sequence[tuple[Tensor, Tensor]]


def slides(*counts: int) -> Bags:
    torch.manual_seed(7)
    return [
        (torch.randn(n, 2, 9, 8, dtype=torch.float64), torch.tensor([number % CLASSES]))
        for number, n in enumerate(counts)
    ]


def network(aggregator: str, mode: str = "slices", size: int = 3) -> EndToEndNetwork:
    torch.manual_seed(3)
    parts = encoder(), AGGREGATORS[aggregator]()
    return EndToEndNetwork(*parts, (2, 9, 8), slice_size=size, mode=mode).double()


def at_once(both: EndToEndNetwork, tiles: Tensor) -> Tensor:
    """Output with the whole graph of all tiles."""
    with scope("encoder of tiles"):
        features = both.encoder.network(tiles)
    return both.aggregator(features.t()[None])


def trained(both: EndToEndNetwork, bags: Bags, mesh: Mesh | None) -> list[Tensor]:
    """Losses of all slides, gradients of the first of three steps, then weights and buffers."""
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9)
    found: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        for tiles, target in bags:
            with keyed(5, step):
                pixels = tiles.flatten(1).t()[None]
                if mesh is None:
                    loss = F.cross_entropy(at_once(both, tiles), target)
                else:
                    loss = F.cross_entropy(both(spatialdl.shard(pixels, mesh)), target)
            loss.backward()
            found.append(loss.detach())
        if mesh is not None:
            spatialdl.average_gradients(both, mesh)
        if step == 0:
            found += [parameter.grad.clone() for parameter in both.parameters()]
        optimizer.step()
    return [*found, *(x.detach() for x in both.state_dict().values())]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **NEAR)


CASES = [
    *(("mean", mode, 3) for mode in ("slices", "graph")),
    *(("gated attention", "slices", size) for size in (1, 3, 100)),
    ("transformer", "slices", 3),
]


@pytest.mark.parametrize(("aggregator", "mode", "size"), CASES)
def test_losses_gradients_and_three_steps_are_those_of_one_process(aggregator, mode, size):
    both, bags = network(aggregator, mode, size), slides(13, 7, RANKS)
    expected = trained(copy.deepcopy(both), bags, None)
    assert_same(trained(both, bags, mesh_of()), expected)


@pytest.mark.parametrize("mode", ["slices", "graph"])
def test_buffers_are_updated_once_for_all_slices(mode):
    """Spectral norm takes a step of its power iteration in each forward."""
    both, bags = network("mean", mode, 2), slides(17)
    nn.utils.parametrizations.spectral_norm(both.encoder.network[0])
    expected = trained(copy.deepcopy(both), bags, None)
    assert_same(trained(both, bags, mesh_of()), expected)


def test_autocast_computes_the_same_in_both_runs():
    """Weights cast in the first run, which has no graph, are not those of the second."""
    [(tiles, target)] = slides(11)
    found = {}
    for mode in ("slices", "graph"):
        both = network("gated attention", mode, 4).float()
        bag = spatialdl.shard(tiles.float().flatten(1).t()[None], mesh_of())
        with keyed(1, 1), torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(both(bag), target)
        loss.backward()
        found[mode] = [loss.detach(), *(parameter.grad for parameter in both.parameters())]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    assert all(grad.abs().max() > 0 for grad in found["slices"][1:3])


def test_replicas_have_slides_of_their_own_and_clipping_counts_all_parameters():
    if RANKS % 2:
        pytest.skip("two replicas need an even number of ranks")
    both, bags, mesh = network("gated attention"), slides(5, 8), mesh_of(2)
    whole = copy.deepcopy(both)
    for parts in (both, whole):
        for drop in parts.encoder.network:
            drop.train(not isinstance(drop, nn.Dropout | nn.Dropout2d))
    tiles, target = bags[mesh.replica]
    with keyed(5, 0):
        F.cross_entropy(both(spatialdl.shard(tiles.flatten(1).t()[None], mesh)), target).backward()
    spatialdl.average_gradients(both, mesh)
    norm = spatialdl.clip_grad_norm_(both, mesh, 0.05)
    for tiles, target in bags:
        with keyed(5, 0):
            (F.cross_entropy(at_once(whole, tiles), target) / 2).backward()
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
    assert_same([norm], [wanted])
    assert_same([p.grad for p in both.parameters()], [p.grad for p in whole.parameters()])


def test_a_frozen_encoder_gets_no_gradient_and_runs_once():
    both, [(tiles, target)] = network("mean", size=100), slides(9)
    both.encoder.requires_grad_(False)
    calls: list[int] = []
    both.encoder.network[0].register_forward_hook(lambda *_: calls.append(1))
    bag = spatialdl.shard(tiles.flatten(1).t()[None], mesh_of())
    F.cross_entropy(both(bag), target).backward()
    assert len(calls) == 1
    assert all(parameter.grad is None for parameter in both.encoder.parameters())
    assert all(parameter.grad is not None for parameter in both.aggregator.parameters())


def test_an_encoder_that_returns_no_features_is_refused():
    both = EndToEndNetwork(nn.Conv2d(2, 4, 3), nn.Identity(), (2, 9, 8))
    with pytest.raises(ValueError, match=r"\(5, D\), got \(5, 4, 7, 6\); pool and flatten"):
        both(torch.zeros(1, 2 * 9 * 8, 5))
