from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl.channels.uses import check_plan, uses_of, without_data
from spatialdl.channels.weights import weights_of
from spatialdl.parallel.partition import Partition
from tests.mpi.channels.divided import WORLD, Block, divided

RANKS = WORLD.size


def test_each_layer_is_divided_the_way_that_moves_fewer_numbers():
    weights = weights_of(divided(Block(), torch.randn(2, 3, 6, 6)))
    assert weights["wide.weight"].at == 0
    assert weights["narrow.weight"].at == 1  # twelve maps would come, five go
    assert weights["norm.running_var"].partition == Partition.even(12, RANKS)
    assert weights["scale"].at == 0
    assert weights["head.weight"].at == 1
    assert "unused.weight" not in weights
    assert "norm.num_batches_tracked" not in weights


def test_a_plan_says_how_layers_are_divided():
    x = without_data(torch.randn(2, 3, 6, 6))
    plan = {"*": "input", "wide": "output", "na*": "output", "head": "replicate"}
    uses = uses_of(Block(), WORLD, lambda shadow: shadow(x), plan)
    assert uses["narrow.weight"].at == uses["wide.weight"].at == 0
    assert "head.weight" not in uses
    assert uses["norm.running_var"].at == 0  # buffers follow


def test_a_weight_stays_whole_if_hooks_get_its_gradient():
    x, network = without_data(torch.randn(2, 3, 6, 6)), Block()
    network.wide.weight.register_hook(lambda grad: grad / grad.norm())
    network.narrow.bias.register_post_accumulate_grad_hook(lambda one: one.grad.mul_(2))
    uses = uses_of(network, WORLD, lambda shadow: shadow(x), {"wide": "output"})
    assert {"wide.weight", "narrow.bias"}.isdisjoint(uses)
    assert "narrow.weight" in uses


def test_a_plan_that_does_not_fit_is_refused():
    for plan, sentence in (
        ({"wide.weight": "input"}, "names 'wide.weight', which matches no module of Block with"),
        ({"wide": "columns"}, "tensor_plan of 'wide' is columns: must be one of output"),
    ):
        with pytest.raises(ValueError, match=sentence):
            check_plan(Block(), plan)
    x = without_data(torch.randn(2, 3, 6, 6))
    if RANKS > 1:
        sentence = f"5 inputs and 1 outputs by its outputs, which are fewer than {RANKS}"
        with pytest.raises(ValueError, match=sentence):
            uses_of(Block(), WORLD, lambda shadow: shadow(x), {"head": "output"})


def test_a_network_stays_as_it_is_while_it_is_looked_at():
    network = Block()
    state = copy.deepcopy(network.state_dict())
    x = without_data(torch.randn(2, 3, 6, 6))
    uses_of(network, WORLD, lambda shadow: shadow(x))
    assert network.training
    assert all(torch.equal(one, state[name]) for name, one in network.state_dict().items())
    assert weights_of(network) == {}


class Fused(nn.Module):
    """One layer gives queries, keys and values; a rank is to have heads of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = RANKS + 1
        size = self.heads * 4
        self.qkv, self.out = nn.Linear(6, 3 * size), nn.Linear(size, 6)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(samples, tokens, 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_layers_are_divided_as_what_follows_wishes():
    weights = weights_of(divided(Fused(), torch.randn(2, 5, 6)))
    size = (RANKS + 1) * 4
    heads = Partition.even(3 * size, RANKS, unit=4, pieces=3)
    assert (weights["qkv.weight"].at, weights["qkv.weight"].partition) == (0, heads)
    assert weights["qkv.bias"].partition == heads
    assert weights["out.weight"].partition == Partition.even(size, RANKS, unit=4)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[: int(x.sum())]


def test_a_forward_that_needs_values_is_refused_by_name():
    model = spatialdl.SpatialParallel(Counts(), spatialdl.init_mesh((1, 1), tensor=RANKS))
    with pytest.raises(spatialdl.UnsupportedSpatialOp, match="the forward of Counts cannot run"):
        model(torch.ones(2, 4))
