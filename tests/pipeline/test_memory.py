"""Tensors that share memory, and state written in forward, in stages; see also tests/mpi."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.pipeline.partition import cut
from tests.pipeline.cutting import check_cut, places_of


class Network(nn.Module):
    """Two convolutions, a weight, and buffers; `function` is its forward."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.full((4, 1, 1), 0.7))
        self.register_buffer("shift", torch.linspace(0, 1, 4).view(4, 1, 1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def part(self, x):
    u = self.first(x) * 1
    part = u[:, :2]
    y = self.second(u.tanh())
    part.mul_(0.5)
    return y + u


def halves(self, x):
    u = self.first(x) * 1
    one, two = u[:, :2], u[:, 2:]
    two = two.mul_(3) * 2
    one.add_(2)
    return torch.cat([one, two], 1) * self.scale


def overwritten(self, x):
    u = self.first(x) * 1
    flat = u.view(len(u), 4, -1)
    y = u + 1
    u[:, 0] = 0
    return y.flatten(2) * flat


def without_version(self, x):
    u = self.first(x) * 1
    y = self.second(u)
    u.data.clamp_(-0.1, 0.1)
    return y + u * self.scale


def no_grad(self, x):
    y = self.first(x)
    with torch.no_grad():
        self.scale.clamp_(-0.69, 0.69)
    return self.second(y * self.scale).tanh() + self.shift


def counted(self, x):
    y = self.first(x)
    self.seen += 1
    return self.second(y / self.seen[0]).tanh() + self.seen.sum()


def view_of_state(self, x):
    first = self.seen[:1]
    y = self.first(x)
    first += y.detach().mean()
    return (self.second(y) + self.seen[0]).tanh()


def shared_buffer(self, x):
    y = self.first(x) + self.shift
    return self.second(y.tanh()) * self.shift


def in_place_alone(self, x):
    x = self.first(x).mul_(2)
    return self.second(x).relu_() * self.scale


CUT = {one.__name__: one for one in (part, halves, overwritten, without_version, no_grad, counted)}
CUT |= {one.__name__: one for one in (view_of_state, shared_buffer, in_place_alone)}


@pytest.mark.parametrize("name", CUT)
def test_a_network_cut_wherever_it_may_be_is_itself(name):
    torch.manual_seed(0)
    model = Network(CUT[name]).double()
    free, _ = places_of(model)
    assert free
    for place in free:
        check_cut(copy.deepcopy(model), place)
    check_cut(copy.deepcopy(model), *free)


@pytest.mark.parametrize(
    ("name", "places"),
    [("part", 4), ("halves", 4), ("no_grad", 1), ("shared_buffer", 0), ("in_place_alone", 0)],
)
def test_only_what_shares_memory_is_kept_together(name, places):
    assert len(places_of(Network(CUT[name]))[1]) == places


def test_a_cut_between_a_view_and_what_writes_into_it_is_refused():
    model = Network(part)
    with pytest.raises(ValueError, match=r"'__getitem__' and 'mul_' share memory that is written"):
        cut(model, [1, 1], ["second"], (3, 9, 7))
    first, second = cut(model, [1, 1], None, (3, 9, 7))
    assert [first.paths, second.paths] in ([["first"], ["second"]], [["first", "second"], []])


def test_a_network_of_which_all_parts_share_a_weight_is_refused():
    def twice(self, x):
        return self.first(F.pad(self.first(x), (0, 0, 0, 0))[:, :3])

    with pytest.raises(ValueError, match=r"into 2 stages: 'first' and 'first' share a weight"):
        cut(Network(twice), [1, 1], None, (3, 9, 7))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x, "data", x * 2),
        lambda x: x.register_hook(print),
        lambda x: x.sum().backward(),
    ],
)
def test_changes_that_give_no_tensor_are_not_lost(change):
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            x = self.conv(x)
            change(x)
            return x.tanh()

    with pytest.raises(ValueError, match=r"cannot be cut into 2 stages"):
        cut(Changes(), [1, 1], None, (3, 9, 7))
