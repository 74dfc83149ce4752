from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spatialdl.models import resnet18, resnet50, resnet110_v2, unet
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.stage import OUTPUT, Stage, run_stage
from spatialdl.pipeline.steps import IMAGE


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return resnet18(num_classes=4, width=4, **options).double()


def run(stages, x: torch.Tensor):
    values = {IMAGE: x}
    for stage in stages:
        values |= run_stage(stage, {v: values[v] for v in stage.takes}, len(x))
    return values[OUTPUT]


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
    "resnet50": lambda: resnet50(num_classes=4, width=4).double(),
    "resnet110_v2": lambda: resnet110_v2(num_classes=4, width=4).double(),
    "unet": lambda: unet(width=2).double(),
    "own forward": lambda: Classifier().double(),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1))), nn.Tanh()
    ).double(),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("stages", [2, 4])
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
    assert torch.equal(run(parts, x), model(x))


def test_a_stage_loads_what_the_whole_network_saved():
    saved, parts = small().state_dict(), cut(small(), [1, 1])
    for part in parts:
        missing, unexpected = part.load_state_dict(saved, strict=False)
        assert not missing
        assert set(unexpected) == saved.keys() - part.state_dict().keys()


@pytest.mark.parametrize("model", [nn.Bilinear(2, 2, 2), Classifier(), small()])
def test_one_stage_is_the_network_itself_whatever_its_forward(model):
    assert cut(model, [4]) == [model]


@pytest.mark.parametrize(("name", "first"), [("layer3", "layer3.0"), ("layer2.1", "layer2.1")])
def test_cut_by_a_name_begins_there(name, first):
    _, second = cut(small(), [1, 1], [name])
    assert second.paths[0] == first


def test_cut_by_a_name_inside_of_what_has_a_forward_of_its_own():
    first, second, third = cut(Classifier(), [1] * 3, ["backbone.body", "head"])
    assert first.paths == ["backbone.stem", "backbone.norm"]
    assert second.paths == ["backbone.body.0", "backbone.body.1.0", "backbone.body.1.1"]
    assert third.paths == ["head"]
    assert "backbone.left_out.weight" in first.state_dict()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["layer2", "layer3"], r"names 2 places \(layer2, layer3\), but 2 stages need 1"),
        (["layer9"], "calls no module 'layer9'; it can be cut before bn1, relu"),
        (["layer"], "no module 'layer'"),  # a beginning of a name is no name
        (["conv1"], r"without layers.*first layer 'conv1'"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, sentence):
    with pytest.raises(ValueError, match=sentence):
        cut(small(), [1, 1], names)


def test_names_out_of_order_are_refused():
    with pytest.raises(ValueError, match="in the order of the network"):
        cut(small(), [1, 1, 1], ["layer3", "layer2"])


def test_places_may_be_numbers_or_one_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    for names in (2, [2], "2", ["2"]):
        assert [stage.paths for stage in cut(model, (1, 1), names)] == [["0", "1"], ["2"]]


def test_one_pixel_is_enough_to_find_out_costs():
    """Images of 32x32 leave one pixel, on which BatchNorm cannot train with one sample."""
    first, _ = cut(small(), [1, 1], image_size=(3, 32, 32))
    assert first.training


def test_a_layer_that_is_called_twice_is_called_twice_after_the_cut():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 3, 1), relu, nn.Conv2d(3, 3, 1), relu)
    parts = cut(model, [1, 1], ["2"])
    x = torch.randn(5, 3, 4, 4)
    assert torch.equal(run(parts, x), model(x))


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
