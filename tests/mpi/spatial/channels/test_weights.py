"""Weights of divided channels: how they are divided, states, copies, steps of networks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl.layout.partition import Partition
from spatialdl.spatial.channels.weights import (
    check_plan,
    full_state,
    local_state,
    uses_of,
    weights_of,
    without_data,
)
from tests.mpi.device import DEVICE
from tests.mpi.spatial.channels.divided import WORLD, Block, divided

RANKS = WORLD.size


def test_parameters_stay_the_objects_that_optimizers_know():
    network = Block()
    before = list(network.parameters())
    sizes = [one.numel() for one in before]
    divided(network, torch.randn(2, 3, 6, 6))
    assert all(a is b for a, b in zip(before, network.parameters(), strict=True))
    assert before[0].numel() < sizes[0]
    assert network.wide.weight.shape == (12, 3, 3, 3)  # which forwards see
    with pytest.raises(RuntimeError, match="channels are divided over ranks: save full_tensor"):
        copy.copy(network.wide.weight).__reduce_ex__(2)


def test_whole_weights_come_and_go():
    torch.manual_seed(1)
    network = Block()
    state = copy.deepcopy(network.state_dict())
    divided(network, torch.randn(2, 3, 6, 6))
    whole = full_state(network)
    assert list(whole) == list(state)
    assert all(torch.equal(whole[name], one) for name, one in state.items())
    other = {name: one + 1 for name, one in state.items()}
    network.load_state_dict(local_state(network, other))
    assert torch.equal(full_state(network)["wide.weight"], other["wide.weight"])
    network.load_state_dict(local_state(network, network.state_dict()))  # parts, too


def test_a_copy_has_weights_of_its_own():
    network = divided(Block(), torch.randn(2, 3, 6, 6))
    copied = copy.deepcopy(network)
    with torch.no_grad():
        copied.wide.weight.part.fill_(0)
    assert float(full_state(copied)["wide.weight"].abs().sum()) == 0
    assert float(full_state(network)["wide.weight"].abs().sum()) > 0


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_those_that_forwards_use(assign: bool):
    """With assign=True modules had a part, and took it for the whole weight."""
    torch.manual_seed(3)
    plain, other = Block().double(), Block().double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain), mesh)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    with torch.inference_mode():
        model.eval()(x)  # whose tensors training could not use
    model.load_state_dict(other.state_dict(), assign=assign)
    torch.testing.assert_close(model.train()(x), other(x), rtol=0, atol=1e-12)
    model(x).sum().backward()


# --- networks that write, share or reshape their weights, over several steps


class Tracked(nn.Module):
    """Keeps statistics in buffers by operations of its own, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("largest", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
            self.largest = torch.maximum(self.largest, x.amax((0, 2, 3)))
        return (x - self.mean[None, :, None, None]).square().mean((1, 2, 3))


class Shared(nn.Module):
    """One BatchNorm on divided channels, on others, and on whole ones.

    Statistics were updated in copies, so that evaluation was wrong.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.third, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.first(x), self.second(x)], 1)
        if self.how == "only in training" and not self.training:
            return self.third(x)
        if self.how == "only in training":
            return self.norm(self.third(x))
        is_divided = self.how == "two partitions"
        other = self.third(x) if is_divided else x.repeat(1, 3, 1, 1)[:, :8]
        return self.norm(joined) + self.norm(other)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class Chosen(nn.Module):
    """Looks at single channels, one by one.

    A wish for pieces of one channel left a rank with none, and it failed alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.shift = torch.linspace(0, 1, 4)  # a tensor that is no buffer

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) + self.shift.to(x)
        return x[:, 2] + sum(x.unbind(1)[:2])


class Beside(nn.Module):
    """Tokens, positions and scales, in all the forms in which networks write them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.token, self.other = (nn.Parameter(torch.randn(1, 1, 8)) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(1, 7, 8))
        self.maps = nn.Parameter(torch.randn(1, 8, 5, 1))
        self.scale, self.shift = (nn.Parameter(torch.randn(8)) for _ in range(2))
        self.table = nn.Parameter(torch.randn(9, 8))
        self.register_buffer("places", torch.tensor([3, 0, 8, 3, 1, 1, 5]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + self.maps.flatten(2).transpose(1, 2)
        token = self.token.expand(len(x), -1, -1)
        x = torch.cat([token, self.other.repeat(len(x), 1, 1), x], 1)
        x = x + self.positions[:, : x.shape[1]] + self.table[self.places].unsqueeze(0)
        x = x * self.scale.exp().view(1, 1, -1) + torch.tanh(self.shift)
        return self.head(x[:, :2].sum(1))


class Met(nn.Module):
    """What two layers give is added to what one gives, behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.both, self.norm = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.first(x), self.second(x)], 1)
        return (F.relu(self.norm(self.both(x))) + joined).mean((2, 3))


class Embedded(nn.Module):
    """A large table, a row of which goes to each sample."""

    def __init__(self, **keys: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 2 * RANKS + 1, **keys), nn.Linear(2 * RANKS + 1, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.flatten(1)[:, :4].abs() * 10).long().clamp(max=49)
        return self.head(torch.tanh(self.table(rows))).mean(1)


Network = tuple[Callable[[], nn.Module], tuple[int, ...], Collection[str], Collection[str]]
MAPS = (2, 3, 6, 5)
NETWORKS: dict[str, Network] = {
    "buffers that a forward writes": (Tracked, MAPS, (), ()),
    **{
        f"a norm that is shared, {how}": (functools.partial(Shared, how), MAPS, (), ())
        for how in ("only in training", "two partitions", "whole, too")
    },
    "a weight of two layers": (Tied, (3, 8), ["first.weight"], ()),
    "single channels": (Chosen, (2, 3, 5, 4), (), ()),
    "tokens, positions and scales": (
        Beside,
        (2, 5, 6),
        (),
        ("token", "other", "positions", "maps", "scale", "shift", "table"),
    ),
    "layers whose outputs meet": (Met, MAPS, ["both.weight", "norm.weight"], ()),
    "tables": (
        functools.partial(Embedded, padding_idx=3),
        (2, 3, 6, 6),
        ["table.weight", "head.weight"],
        (),
    ),
    "rows with a largest norm": (
        functools.partial(Embedded, max_norm=0.5),
        (2, 3, 6, 6),
        ["head.weight"],
        ["table.weight"],
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_those_of_one_process(name: str):
    """Some parameters are divided, others are not."""
    make, shape, divided_ones, whole_ones = NETWORKS[name]

    torch.manual_seed(3)
    plain = make().double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain).to(DEVICE), mesh)
    optimizers = [torch.optim.SGD(one.parameters(), 0.01, 0.9) for one in (model, plain)]
    for _ in range(3):
        x = torch.randn(*shape, dtype=torch.float64)
        found, wanted = model(x.to(DEVICE)), plain(x)
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-12)
        if name == "a norm that is shared, whole, too":
            continue  # its statistics are written twice before a backward, which is refused
        for one in (found, wanted):
            one.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = spatialdl.full_state_dict(model, mesh)
    for key, one in plain.state_dict().items():
        torch.testing.assert_close(state[key].cpu(), one, rtol=0, atol=1e-12)
    weights = weights_of(model.module)
    assert set(divided_ones) <= set(weights)
    assert set(whole_ones).isdisjoint(weights)


def test_a_layer_is_divided_as_what_its_outputs_meet():
    weights = weights_of(divided(Met(), torch.randn(MAPS)))
    assert weights["both.weight"].partition == Partition.even(16, RANKS, pieces=2)
    assert weights["norm.running_mean"].partition == weights["both.weight"].partition
    tied = divided(Tied(), torch.randn(3, 8))
    assert tied.second.weight.part is tied.first.weight.part


# --- how layers are divided


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
