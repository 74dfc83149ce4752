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
from spatialdl.channels.uses import check_plan, uses_of, without_data
from spatialdl.channels.weights import weights_of
from spatialdl.parallel.partition import Partition
from tests.mpi.channels.divided import WORLD, Block, divided
from tests.mpi.device import DEVICE

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


class Multiplied(nn.Module):
    """Weights that only products and functions of their own take stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 8))
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x @ F.normalize(self.first)) @ self.second.weight @ self.first.t()


def test_weights_in_products_stay_whole_or_are_gathered():
    torch.manual_seed(3)
    plain = Multiplied().double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain), mesh)
    x = torch.randn(2, 6, dtype=torch.float64)
    found, wanted = model(x), plain(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for one in (found, wanted):
        one.square().sum().backward()
    torch.testing.assert_close(model.module.first.grad, plain.first.grad, rtol=0, atol=1e-12)
    assert "first" not in weights_of(model.module)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def test_a_weight_of_two_layers_is_divided_once():
    torch.manual_seed(2)
    network, plain = Tied().double(), Tied().double()
    plain.load_state_dict(network.state_dict())
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model, x = spatialdl.SpatialParallel(network, mesh), torch.randn(3, 8, dtype=torch.float64)
    plain.load_state_dict(spatialdl.full_state_dict(model, mesh))
    for one in (model, plain):
        one(x).square().sum().backward()
    found = network.first.weight.part.grad
    at, partition = network.first.weight.at, network.first.weight.partition
    ((start, stop),) = partition.held(WORLD.rank)
    wanted = plain.first.weight.grad.narrow(at, start, stop - start)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert network.second.weight.part is network.first.weight.part


class Chosen(nn.Module):
    """Looks at single channels, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.shift = torch.linspace(0, 1, 4)  # a tensor that is no buffer

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) + self.shift.to(x)
        return x[:, 2] + sum(x.unbind(1)[:2])


def test_single_channels_leave_no_rank_without_weights():
    """A wish for pieces of one channel left a rank with none, and it failed alone."""
    torch.manual_seed(3)
    plain = Chosen().double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain), mesh)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)


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


# --- weights that no layer takes


def assert_steps(
    make: Callable[[], nn.Module], *shape: int, divided: Collection[str], whole: Collection[str]
) -> None:
    """Three steps as of one process; these parameters are divided, those are not."""
    torch.manual_seed(3)
    plain = make().double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain).to(DEVICE), mesh)
    optimizers = [torch.optim.SGD(one.parameters(), 0.01, 0.9) for one in (model, plain)]
    for _ in range(3):
        x = torch.randn(*shape, dtype=torch.float64)
        found, wanted = model(x.to(DEVICE)), plain(x)
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-12)
        for one in (found, wanted):
            one.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = spatialdl.full_state_dict(model, mesh)
    for name, one in plain.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), one, rtol=0, atol=1e-12)
    weights = weights_of(model.module)
    assert {name for name in divided if name not in weights} == set()
    assert {name for name in whole if name in weights} == set()


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


def test_tokens_positions_and_scales_are_divided():
    names = ("token", "other", "positions", "maps", "scale", "shift", "table")
    assert_steps(Beside, 2, 5, 6, divided=names, whole=())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Apart(nn.Module):
    """Weights of which, in the end, something needs all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        for name in ("direct", "viewed", "sorted", "written"):
            setattr(self, name, nn.Parameter(torch.randn(8, 8)))
        self.normal = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + Doubled.apply(self.direct) + Doubled.apply(self.viewed.view(8, 8))
        x = x + self.sorted.expand(1, -1, -1)[0].sort(0).values.sort(1).values
        with torch.no_grad():
            self.written.mul_(1 + 0 * self.written.abs())
        y = self.written.clone()
        y[:, 1] = 0
        y.view(-1)[::3] = 1
        return self.head(x + y) + F.linear(x, F.normalize(self.normal, dim=1))


def test_weights_of_which_all_is_needed_stay_whole():
    whole = ("direct", "viewed", "sorted", "written")
    assert_steps(Apart, 8, 6, divided=["normal"] * (RANKS < 5), whole=whole)


class Standardised(nn.Module):
    """A convolution whose weights are normalised first, by each output channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        flat = F.batch_norm(weight.reshape(1, 8, -1), None, None, training=True)
        return self.head(F.conv2d(x, flat.reshape_as(weight), self.conv.bias).mean((2, 3)))


def test_standardised_kernels_are_divided():
    assert_steps(Standardised, 2, 3, 6, 5, divided=["conv.weight"], whole=())


class Met(nn.Module):
    """What two layers give is added to what one gives, behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.both, self.norm = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.first(x), self.second(x)], 1)
        return (F.relu(self.norm(self.both(x))) + joined).mean((2, 3))


def test_a_layer_is_divided_as_what_its_outputs_meet():
    assert_steps(Met, 2, 3, 6, 5, divided=["both.weight", "norm.weight"], whole=())
    weights = weights_of(divided(Met(), torch.randn(2, 3, 6, 5)))
    assert weights["both.weight"].partition == Partition.even(16, RANKS, pieces=2)
    assert weights["norm.running_mean"].partition == weights["both.weight"].partition


class Embedded(nn.Module):
    """A large table, a row of which goes to each sample."""

    def __init__(self, **keys: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 2 * RANKS + 1, **keys), nn.Linear(2 * RANKS + 1, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.flatten(1)[:, :4].abs() * 10).long().clamp(max=49)
        return self.head(torch.tanh(self.table(rows))).mean(1)


def test_tables_of_embeddings_are_divided():
    make = functools.partial(Embedded, padding_idx=3)
    assert_steps(make, 2, 3, 6, 6, divided=["table.weight", "head.weight"], whole=[])


def test_rows_with_a_largest_norm_stay_whole():
    make = functools.partial(Embedded, max_norm=0.5)
    assert_steps(make, 2, 3, 6, 6, divided=["head.weight"], whole=["table.weight"])
