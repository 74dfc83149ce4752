from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spatialdl.models import resnet18, unet
from spatialdl.pipeline.partition import StepCosts, balance, cut, estimated
from spatialdl.pipeline.stage import Stage
from spatialdl.pipeline.steps import Recording, Step, Value
from tests.pipeline.cutting import run_in_turn
from tests.pipeline.test_recording import recorded


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return resnet18(num_classes=4, width=4, **options).double()


class Backbone(nn.Module):
    """A stem, a body and a head, called by a forward of their own; one head is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.norm = nn.BatchNorm2d(4)
        self.left_out = nn.Linear(3, 3)
        self.body = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 1)))

    def forward(self, x):
        return self.body(F.relu(self.norm(self.stem(x) * self.scale)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.backbone(x), 1), 1))


NETWORKS = {
    "resnet18": small,
    "unet": lambda: unet(width=2).double(),
    "own forward": lambda: Classifier().double(),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1))), nn.Tanh()
    ).double(),
}


@pytest.mark.parametrize(("name", "stages"), zip(NETWORKS, (2, 4, 2, 4), strict=True))
def test_the_stages_together_are_the_network_under_its_own_names(name, stages):
    model = NETWORKS[name]()
    parts = cut(model, [1] * stages, image_size=(3, 33, 35))
    assert len(parts) == stages
    together: dict[str, torch.Tensor] = {}
    for part in parts:
        own = part.state_dict()
        assert not own.keys() & together.keys()
        together |= own
    whole = model.state_dict()
    assert sorted(together) == sorted(whole)
    assert all(together[name].data_ptr() == whole[name].data_ptr() for name in whole)
    x = torch.randn(2, 3, 33, 35, dtype=torch.float64)
    for part in (model, *parts):
        part.eval()
    assert torch.equal(run_in_turn(parts, x), model(x))


@pytest.mark.parametrize("model", [nn.Bilinear(2, 2, 2), Classifier(), small()])
def test_one_stage_is_the_network_itself_whatever_its_forward(model):
    assert cut(model, [4]) == [model]


def test_cut_by_a_name_inside_of_what_has_a_forward_of_its_own():
    first, second, third = cut(Classifier(), [1] * 3, ["backbone.body", "head"])
    assert first.paths == ["backbone.stem", "backbone.norm"]
    assert second.paths == ["backbone.body.0", "backbone.body.1.0", "backbone.body.1.1"]
    assert third.paths == ["head"]
    assert "backbone.left_out.weight" in first.state_dict()


@pytest.mark.parametrize(
    ("stages", "names", "sentence"),
    [
        (2, ["layer2", "layer3"], r"names 2 places \(layer2, layer3\), but 2 stages need 1"),
        (2, ["layer9"], "calls no module 'layer9'; it can be cut before bn1, relu"),
        (2, ["layer"], "no module 'layer'"),  # a beginning of a name is no name
        (2, ["conv1"], r"without layers.*first layer 'conv1'"),
        (3, ["layer3", "layer2"], "in the order of the network"),
    ],
)
def test_names_that_do_not_fit_are_refused(stages, names, sentence):
    with pytest.raises(ValueError, match=sentence):
        cut(small(), [1] * stages, names)


def test_places_may_be_numbers_or_one_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    for names in (2, [2], "2", ["2"]):
        assert [stage.paths for stage in cut(model, (1, 1), names)] == [["0", "1"], ["2"]]


def test_a_weight_in_two_stages_is_refused():
    # it was trained apart in each of them, without a word
    layer = nn.Conv2d(3, 3, 1)
    with pytest.raises(ValueError, match="share a weight, but are in stages 0 and 1"):
        cut(nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU()), (1, 1), ["1"])
    tied = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1))
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match="'0' and '2' share a weight, but are in stages 0 and 1"):
        cut(tied, (1, 1), ["2"])
    assert {"0.weight", "2.weight"} <= cut(tied, [1])[0].state_dict().keys()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.ReLU()), r"into 2 stages: its forward has only 1 step \(0\)"),
        (nn.Bilinear(2, 2, 2), r"Bilinear cannot be cut.*missing 1 required positional argument"),
        (nn.Sequential(nn.Flatten(), nn.Linear(7, 2)), "must have same reduction dim"),
    ],
)
def test_what_cannot_be_cut_says_why_and_what_else_there_is(model, reason):
    with pytest.raises(ValueError, match=rf"{reason}.*parallel=sp or dp"):
        cut(model, [1, 1], image_size=(3, 4, 4))


def test_loose_random_numbers_cannot_be_cut():
    class Drops(nn.Module):
        def forward(self, x):
            return F.dropout(x.relu(), 0.5, self.training)

    with pytest.raises(ValueError, match=r"by 'dropout' outside of a module: use nn\.Dropout"):
        cut(Drops(), [1, 1])
    model = Drops()
    assert cut(model, [1]) == [model]


def test_layers_to_recompute_make_a_stage_of_a_chain():
    (stage,) = cut(small(), [1], recompute=True)
    assert isinstance(stage, Stage)
    assert list(stage.state_dict()) == list(small().state_dict())
    (network,) = cut(unet(width=2), [1], recompute=True, image_size=(3, 32, 32))
    assert not isinstance(network, Stage)


def test_a_network_without_blocks_cannot_recompute():
    with pytest.raises(ValueError, match=r"finds no blocks in Classifier"):
        cut(Classifier(), [1], recompute=True)


# --- balance


def steps(*takes: tuple[int, ...]) -> Recording:
    """Step n takes what the given steps have made."""
    made = [
        Step(str(n), tuple(Value(one) for one in given), {}, (Value(n),), "")
        for n, given in enumerate(takes)
    ]
    last = Value(len(made) - 1)
    return Recording(tuple(made), last, frozenset(), frozenset(), "")


def cost_of(costs: StepCosts, recording: Recording, start: int, stop: int) -> float:
    """Word for word: what the steps cost, what they take, what they give."""
    inside = range(start, stop)
    total = sum(costs.steps[n] for n in inside)
    for value, cost in costs.values.items():
        users = [n for n, step in enumerate(recording.steps) if value in step.takes]
        taken = value.step < start and any(n in inside for n in users)
        given = value.step in inside and any(n >= stop for n in users)
        total += cost * (taken + given)
    return total


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=7).flatmap(
        lambda costs: st.tuples(
            st.just([float(c) for c in costs]),
            st.lists(st.integers(1, 4), min_size=1, max_size=min(4, len(costs))),
            st.tuples(*(st.lists(st.integers(0, n), max_size=2) for n in range(len(costs)))),
            st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)),
        )
    )
)
def test_as_good_as_the_best_of_all_cuts(case):
    numbers, widths, takes, passing = case
    recording = steps(*(tuple({n - 1 for n in one}) for one in takes))
    costs = StepCosts(numbers, {Value(n): float(cost) for n, cost in enumerate(passing)})

    def heaviest(bounds) -> float:
        return max(
            cost_of(costs, recording, start, stop) / width
            for (start, stop), width in zip(pairwise(bounds), widths, strict=True)
        )

    found = balance(costs, recording, widths)
    every = (
        (0, *inner, len(numbers)) for inner in combinations(range(1, len(numbers)), len(widths) - 1)
    )
    assert (found[0], found[-1], len(found)) == (0, len(numbers), len(widths) + 1)
    assert all(start < stop for start, stop in pairwise(found))
    assert heaviest(found) == pytest.approx(min(map(heaviest, every)))


def test_estimated_costs_are_those_of_the_layers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    costs = estimated(model, recorded(model, size=(3, 8, 8)), (1, 3, 8, 8))
    conv, relu, _, linear = costs.steps
    assert conv - relu == 3 * 8 * 9 * 64  # multiply-adds
    assert linear == pytest.approx(1024, rel=0.05)
