from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from spatialdl.models import resnet18
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.stage import (
    Stage,
    pieces,
    rest_in_training,
    start_training,
)
from spatialdl.spatial.random import keyed, scope
from spatialdl.spatial.recompute import recompute_blocks
from tests.pipeline.cutting import run_in_turn


class Skips(nn.Module):
    """Its input and its first map are used at the end once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.relu = nn.ReLU()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.tensor(0.25), persistent=False)
        self.last = nn.Conv2d(7, 2, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        skip = y = self.first(x)
        for layer in self.middle:
            y = self.relu(layer(y))
        y = y * self.scale + self.shift
        return self.last(torch.cat([x, y + skip], 1)).mean((2, 3)), {"sum": y.sum()}


def parts_of(model: nn.Module, *bounds: int, recompute: bool = False) -> list[Stage]:
    network = Forward(model, (3, 9, 7))
    ends = [*bounds, len(network.of(2, True).steps)]
    return [
        Stage(model, network, start, stop, recompute=recompute)
        for start, stop in zip([0, *bounds], ends, strict=True)
    ]


@pytest.mark.parametrize(("bounds", "recompute"), [((3,), True), ((2, 6, 9), False)])
def test_stages_give_what_the_network_gives(bounds, recompute):
    model = Skips().double()
    x = torch.randn(3, 3, 9, 7, dtype=torch.float64)
    expected, others = model(x)
    expected.sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    stages = parts_of(model, *bounds, recompute=recompute)
    found, more = run_in_turn(stages, x)
    found.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(more["sum"], others["sum"])
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in grads)
        assert p.grad is None or torch.equal(p.grad, grads[name]), name


def test_a_stage_holds_its_own_under_their_names():
    first, last = parts_of(Skips(), 6)
    assert set(first.state_dict()) == {
        f"{layer}.{kind}"
        for layer in ("first", "middle.0", "middle.1", "middle.2")
        for kind in ("weight", "bias")
    }
    assert set(last.state_dict()) == {"scale", "last.weight", "last.bias"}
    assert dict(last.named_buffers()).keys() == {"shift"}  # which is in no state dict
    assert first.paths == ["first", "middle.0", "relu", "middle.1", "relu", "middle.2"]


def test_a_value_is_let_go_after_its_last_use():
    alive = []

    class Watches(nn.Module):
        def forward(self, x):
            y = x + 1
            if x.device.type != "meta":
                alive.append([one() is not None for one in seen])
                seen.append(weakref.ref(y))
            return y

    seen: list[weakref.ref] = []
    (stage,) = parts_of(nn.Sequential(*(Watches() for _ in range(4))))
    with torch.no_grad():
        run_in_turn([stage], torch.zeros(2, 3, 9, 7))
    assert alive == [[], [True], [False, True], [False, False, True]]


def test_modules_draw_the_same_numbers_in_every_stage_and_uncut():
    drop = nn.Dropout()  # called twice, it draws twice
    model = nn.Sequential(nn.ReLU(), drop, nn.Sequential(nn.Dropout2d(), nn.Conv2d(3, 3, 1)), drop)
    x = torch.rand(4, 3, 9, 7)
    found = []
    for bounds in ((), (1,), (2,), (3,), (1, 4)):
        with keyed(seed=3, step=1):
            found.append(run_in_turn(parts_of(model, *bounds), x))
    masks = []
    for path in ("1", "1#1"):
        with keyed(seed=3, step=1), scope(path):
            masks.append(drop(torch.ones(4, 3, 9, 7)))
    assert not torch.equal(*masks)
    with keyed(seed=3, step=1):
        ones = nn.Sequential(nn.Identity(), drop)  # under the name that it has above
        assert torch.equal(run_in_turn(parts_of(ones), torch.ones(4, 3, 9, 7)), masks[0])
    (whole,) = cut(model, [1])
    assert whole is model
    for _ in range(2):  # the calls of a run are counted anew
        with keyed(seed=3, step=1):
            found.append(model(x))
    assert all(torch.equal(y, found[0]) for y in found)


def kinds(found) -> list[str]:
    return [" ".join(type(layer).__name__ for layer in piece) for piece in found]


def test_loose_layers_run_again_in_pieces_of_two_convolutions():
    layers = [
        *(nn.ReLU(), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Conv2d(1, 1, 1), nn.ReLU()),
        *(nn.Conv2d(1, 1, 1), nn.Sigmoid()),
    ]
    assert kinds(pieces(layers)) == ["ReLU", "Conv2d BatchNorm2d Conv2d ReLU", "Conv2d Sigmoid"]


def test_blocks_run_again_by_themselves():
    model = resnet18(num_classes=2, width=2)
    recompute_blocks(model)
    (stage,) = parts_of(model)
    assert kinds(pieces([stage.get_submodule(path) for path in stage.paths])) == [
        "Conv2d BatchNorm2d ReLU MaxPool2d",
        *["BasicBlock"] * 8,
        *("AdaptiveAvgPool2d", "Flatten", "Linear"),
    ]
    assert list(stage.state_dict()) == list(resnet18(num_classes=2, width=2).state_dict())


class Modes(nn.Module):
    """Sets the modes of its layers, and what learns, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def train(self, mode: bool = True):
        super().train(mode)
        self.one.eval()
        self.two.requires_grad_(not mode)
        return self

    def eval(self):
        super().eval()
        self.two.train()
        return self

    def forward(self, x):
        return self.two(self.one(x))


@pytest.mark.parametrize("inside", [False, True])
def test_a_part_has_the_modes_that_the_whole_network_sets(inside):
    model = Modes()
    stages = parts_of(nn.Sequential(model) if inside else model, 1)
    for stage in stages:
        stage.train()
    assert [model.one.training, model.two.training] == [False, True]
    assert [model.one.weight.requires_grad, model.two.weight.requires_grad] == [True, False]
    for stage in stages:
        stage.eval()
    assert [model.one.training, model.two.training] == [False, not inside]


def test_layers_that_rest_stay_in_evaluation_and_so_do_their_copies():
    """Others whose weights a user has frozen do not, as in PyTorch."""
    stage = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    stage.requires_grad_(False)
    rest_in_training(stage[0])
    for one in (stage, copy.deepcopy(stage)):
        one.eval()
        start_training(one)
        assert [layer.training for layer in (one, *one, *one[1])] == [True, False, True, True, True]
