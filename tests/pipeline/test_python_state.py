"""Python state that forwards change is exact in one stage, or refused by name."""

from __future__ import annotations

import copy
import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.pipeline.partition import cut
from tests.pipeline.cutting import SIZE, check_cut, places_of, run_stages, stages_of

CALLS = 0


class Part(nn.Module):
    """A part with a layer; `function` is its forward."""

    def __init__(self, function, **attributes) -> None:
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("ema", torch.zeros(()))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Network(nn.Module):
    """A stem, the part, a head; `function` comes before the head."""

    def __init__(self, part: nn.Module, function=lambda self, x: x) -> None:
        super().__init__()
        self.function, self.part = function, part
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).tanh()
        return self.head(self.function(self, self.part(x)).tanh())


class Schedule:
    def __init__(self) -> None:
        self.steps = [0]

    def step(self) -> float:
        self.steps[0] += 1
        return 0.9 ** self.steps[0]


class Inner(nn.Module):
    """A block, called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def counts(self, x):
    self.calls += 1
    return x + self.conv(x) * min(1.0, self.calls / 10)


def scheduled(self, x):
    return self.conv(x) * self.schedule.step()


def rebinds(self, x):
    self.ema = 0.9 * self.ema + 0.1 * x.detach().mean()
    return self.conv(x) * (1 + self.ema)


def cached(self, x):
    if self.table is None or len(self.table) != len(x):
        self.table = torch.linspace(0, 1, len(x), dtype=x.dtype).view(-1, 1, 1, 1)
    return self.conv(x) + self.table


def sets_a_block(self, x):
    self.calls += 1
    self.blocks[0].scale = 1 / self.calls
    return self.blocks[0](self.conv(x))


def sets_a_mode(self, x):
    self.norm.eval()
    return self.norm(self.conv(x))


KEPT = {
    "counts": lambda: Part(counts, calls=0),
    "scheduled": lambda: Part(scheduled, schedule=Schedule()),
    "rebinds": lambda: Part(rebinds),
    "cached": lambda: Part(cached, table=None),
    "sets_a_block": lambda: Part(sets_a_block, calls=0, blocks=nn.ModuleList([Inner()])),
    "sets_a_mode": lambda: Part(sets_a_mode, norm=nn.BatchNorm2d(4)),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_part_whose_state_changes_is_called_as_a_whole(name):
    torch.manual_seed(0)
    model = Network(KEPT[name]()).double()
    free, _ = places_of(model)
    assert "part" in stages_of(copy.deepcopy(model), free)[3].paths
    check_cut(model, *free)


def sizes(self, x):
    """What is set before it is read is not state."""
    self.height, self.width = x.shape[-2:]
    self.last = x.detach()
    return self.conv(x).flatten(2).unflatten(2, (self.height, self.width))


def warns_once(self, x):
    if not self.warned:
        self.warned = True
    return self.conv(x).tanh()


@pytest.mark.parametrize(
    "part", [lambda: Part(sizes, height=None), lambda: Part(warns_once, warned=False)]
)
def test_what_is_no_state_may_be_cut_and_divided(part):
    torch.manual_seed(0)
    model = Network(part()).double()
    assert cut(model, [1], image_size=SIZE, divided=True) == [model]
    free, kept_together = places_of(model)
    stages = stages_of(copy.deepcopy(model), free)
    assert "part.conv" in [path for stage in stages for path in stage.paths]
    assert not kept_together
    check_cut(model, *free)


def of_class(self, x):
    type(self).calls += 1
    return x


def of_closure():
    calls = 0

    class Counts(Network):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return super().forward(x) * (calls > 100)

    return Counts(nn.Tanh())


def counts_itself(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return x / self.calls


def counts_a_part(self, x):
    self.part.calls += 1
    return x


def takes_a_number(self, x):
    x, factor = self.inner(x)
    return x * factor


def gives_a_number(self, x):
    self.calls += 1
    return self.conv(x), min(1.0, self.calls / 10)


class Counted(Network):
    calls = 0


class CountsOuter(Network):
    def forward(self, x):
        global CALLS  # noqa: PLW0603, that is what is looked for
        CALLS += 1
        return super().forward(x) * (CALLS > 100)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Network(Part(counts, calls=0), counts_itself), "changes the attribute 'calls'"),
        (lambda: Network(Part(counts, calls=0), counts_a_part), r"the attribute 'part\.calls'"),
        (lambda: Counted(nn.Tanh(), of_class), r"'Counted\.calls', which changes from run to run"),
        (lambda: CountsOuter(nn.Tanh()), r"'tests\.pipeline\.test_python_state\.CALLS', wh"),
        (of_closure, r"Counts\.forward', which changes from run to run"),
        (lambda: Network(nn.Tanh(), lambda s, x: x * random.random()), "numbers by Python's rand"),
        (lambda: Network(nn.Tanh(), lambda s, x: x * np.random.rand()), "numbers by NumPy: draw"),
        (
            lambda: Network(nn.Tanh(), lambda s, x: x * time.perf_counter()),
            "differs from run to run",
        ),
        (
            lambda: Network(Part(takes_a_number, inner=Part(gives_a_number, calls=0))),
            r"differs from run to run, at 'part\.inner'",
        ),
    ],
)
def test_state_that_no_stage_can_keep_is_refused_by_name(model, reason):
    before = random.getstate()
    with pytest.raises(ValueError, match=reason):
        cut(model(), [1, 1], image_size=SIZE)
    assert random.getstate() == before


def test_an_object_that_two_blocks_share_keeps_them_together():
    schedule = Schedule()
    blocks = [Part(scheduled, schedule=schedule), Part(scheduled, schedule=schedule)]

    def forward(self, x):
        return self.blocks[1](self.blocks[0](self.conv(x)).tanh())

    model = Network(Part(forward, blocks=nn.ModuleList(blocks))).double()
    free, _ = places_of(model)
    assert "part" in stages_of(copy.deepcopy(model), free)[3].paths
    check_cut(model, *free)
    with pytest.raises(ValueError, match=r"changes the attribute '0\.schedule'"):
        cut(nn.Sequential(*blocks), [1, 1], image_size=(4, 9, 7))


def test_ranks_with_samples_of_their_own_cannot_count():
    with pytest.raises(ValueError, match=r"Network changes part\.\w+ each time, which replicas"):
        cut(Network(KEPT["scheduled"]()), [1], image_size=SIZE, divided=True)


def test_attributes_that_are_set_from_outside_are_followed():
    torch.manual_seed(0)
    model = Network(Part(lambda self, x: self.conv(x) * self.factor, factor=1.0)).double()
    whole = copy.deepcopy(model)
    stages = stages_of(model, [2, 4])
    x = torch.randn(2, *SIZE, dtype=torch.float64)
    for factor in (1.0, 0.5, 0.25):
        model.part.factor = whole.part.factor = factor
        for stage in stages:
            stage.train()
        assert torch.equal(run_stages(stages, x), whole(x))


# --- memory


class SharesMemory(nn.Module):
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


def part_of_a_map(self, x):
    u = self.first(x) * 1
    part = u[:, :2]
    y = self.second(u.tanh())
    part.mul_(0.5)
    return y + u


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


CUT = {one.__name__: one for one in (part_of_a_map, overwritten, without_version, no_grad, counted)}
CUT |= {one.__name__: one for one in (view_of_state, shared_buffer, in_place_alone)}
TOGETHER = {"part_of_a_map": 4, "no_grad": 1, "shared_buffer": 0, "in_place_alone": 0}


@pytest.mark.parametrize("name", CUT)
def test_a_network_cut_wherever_it_may_be_is_itself(name):
    torch.manual_seed(0)
    model = SharesMemory(CUT[name]).double()
    free, together = places_of(model)
    assert free
    assert len(together) == TOGETHER.get(name, len(together))
    check_cut(copy.deepcopy(model), free[len(free) // 2])
    check_cut(model, *free)


def test_a_cut_between_a_view_and_what_writes_into_it_is_refused():
    model = SharesMemory(part_of_a_map)
    with pytest.raises(ValueError, match=r"'__getitem__' and 'mul_' share memory that is written"):
        cut(model, [1, 1], ["second"], (3, 9, 7))
    first, second = cut(model, [1, 1], None, (3, 9, 7))
    assert [first.paths, second.paths] in ([["first"], ["second"]], [["first", "second"], []])


def test_a_network_of_which_all_parts_share_a_weight_is_refused():
    def twice(self, x):
        return self.first(F.pad(self.first(x), (0, 0, 0, 0))[:, :3])

    with pytest.raises(ValueError, match=r"into 2 stages: 'first' and 'first' share a weight"):
        cut(SharesMemory(twice), [1, 1], None, (3, 9, 7))


@pytest.mark.parametrize(
    "change", [lambda x: setattr(x, "data", x * 2), lambda x: x.register_hook(print)]
)
def test_changes_that_give_no_tensor_are_not_lost(change):
    def forward(self, x):
        x = self.first(x)
        change(x)
        return self.second(x.tanh())

    with pytest.raises(ValueError, match=r"cannot be cut into 2 stages"):
        cut(SharesMemory(forward), [1, 1], None, (3, 9, 7))
