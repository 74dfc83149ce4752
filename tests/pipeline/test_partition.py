from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spatialdl.models import resnet18, resnet50, resnet110_v2, unet
from spatialdl.pipeline.partition import (
    Stage,
    balance,
    chain,
    cut,
    layer_costs,
    meta_copy,
    pieces,
)
from spatialdl.random import keyed, scope


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return resnet18(num_classes=4, width=4, **options).double()


NETWORKS = {
    "resnet18": small,
    "resnet50": lambda: resnet50(num_classes=4, width=4).double(),
    "resnet110_v2": lambda: resnet110_v2(num_classes=4, width=4).double(),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1))), nn.Tanh()
    ).double(),
}


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8).flatmap(
        lambda costs: st.tuples(
            st.just([float(c) for c in costs]),
            st.lists(st.integers(1, 4), min_size=1, max_size=min(4, len(costs))),
        )
    )
)
def test_balance_is_as_good_as_the_best_of_all_cuts(case):
    costs, widths = case

    def slowest(bounds) -> float:
        return max(
            sum(costs[start:stop]) / width
            for (start, stop), width in zip(pairwise(bounds), widths, strict=True)
        )

    found = balance(costs, widths)
    every = (
        (0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), len(widths) - 1)
    )
    assert (found[0], found[-1], len(found)) == (0, len(costs), len(widths) + 1)
    assert all(start < stop for start, stop in pairwise(found))
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_a_wider_stage_gets_more():
    assert balance([1.0] * 8, [1, 1]) == [0, 4, 8]
    assert balance([1.0] * 8, [3, 1]) == [0, 6, 8]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("stages", [2, 3])
def test_the_stages_together_are_the_network_under_its_own_names(name, stages):
    model = NETWORKS[name]()
    parts = cut(model, [1] * stages, input_shape=(1, 3, 32, 32))
    assert len(parts) == stages
    together: dict[str, torch.Tensor] = {}
    for part in parts:
        own = part.state_dict()
        assert not own.keys() & together.keys()
        together |= own
    whole = model.state_dict()
    assert sorted(together) == sorted(whole)
    assert all(together[name].data_ptr() == whole[name].data_ptr() for name in whole)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = x
    model.eval()
    for part in parts:
        y = part.eval()(y)
    assert torch.equal(y, model(x))


def test_a_stage_loads_what_the_whole_network_saved():
    saved, parts = small().state_dict(), cut(small(), [1, 1])
    for part in parts:
        missing, unexpected = part.load_state_dict(saved, strict=False)
        assert not missing
        assert set(unexpected) == saved.keys() - part.state_dict().keys()


def test_one_stage_is_the_network_itself_whatever_its_forward():
    model = nn.Bilinear(2, 2, 2)
    assert cut(model, [4]) == [model]


def test_a_layer_that_is_called_twice_is_called_twice_after_the_cut():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu).double()
    assert [path for path, _ in chain(model)] == ["0", "1", "2", "3"]
    first, second = cut(model, [1, 1], ["2"])
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(second(first(x)), model(x))


def test_chain_goes_as_deep_as_there_is_no_forward():
    paths = [path for path, _ in chain(small())]
    assert paths[:6] == ["conv1", "bn1", "relu", "maxpool", "layer1.0", "layer1.1"]
    assert paths[-3:] == ["avgpool", "flatten", "fc"]
    assert chain(nn.ReLU()) != []


def test_a_chain_with_a_hook_or_a_weight_of_its_own_stays_whole():
    hooked, weighted, inner = (nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3))
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    weighted.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model = nn.Sequential(hooked, weighted, inner)
    assert [path for path, _ in chain(model)] == ["0", "1", "2.0", "2.1"]
    x = torch.randn(2, 3)
    for stages in ([1], [1, 1]):
        y = x
        for stage in cut(model, stages, input_shape=(2, 3)):
            y = stage(y)
        assert torch.equal(y, model(x))


def test_layers_draw_the_same_numbers_in_every_stage():
    drop = nn.Dropout()  # called twice, it draws twice
    model = nn.Sequential(nn.ReLU(), drop, nn.Sequential(nn.Dropout2d()), drop)
    x = torch.rand(4, 9, 5, 5)
    found = []
    for names in (None, ["1"], ["2"], ["3"]):
        y = x
        for stage in cut(model, [1] * (2 if names else 1), names):
            with keyed(seed=3, step=1):
                y = stage(y)
        found.append(y)
    assert all(torch.equal(y, found[0]) for y in found)
    with keyed(seed=3, step=1), scope("1"):
        masks = [drop(x)]
    with keyed(seed=3, step=1), scope("3"):
        masks.append(drop(x))
    assert not torch.equal(*masks)


@pytest.mark.parametrize(("name", "first"), [("layer3", "layer3.0"), ("layer2.1", "layer2.1")])
def test_cut_by_a_name_begins_there(name, first):
    _, second = cut(small(), [1, 1], [name])
    assert second.paths[0] == first


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["layer2", "layer3"], r"names 2 places \(layer2, layer3\), but 2 stages need 1"),
        (["layer9"], "no layer 'layer9'; it can be cut before bn1, relu"),
        (["layer"], "no layer 'layer'"),  # a beginning of a name is no name
        (["conv1"], "without layers.*first layer 'conv1'"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, sentence):
    with pytest.raises(ValueError, match=sentence):
        cut(small(), [1, 1], names)


def test_names_out_of_order_are_refused():
    with pytest.raises(ValueError, match="in the order of the network"):
        cut(small(), [1, 1, 1], ["layer3", "layer2"])


class Custom(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(("model", "found"), [(Custom(), 1), (nn.Sequential(nn.ReLU()), 1)])
def test_what_is_no_long_enough_chain_cannot_be_cut(model, found):
    with pytest.raises(ValueError, match=rf"cannot be cut into 2 stages.*\(found {found}\)"):
        cut(model, [1, 1])


def test_a_stage_of_layers_with_their_own_names():
    stage = Stage([("a.0", nn.Linear(2, 3)), ("a.1", nn.ReLU()), ("b", nn.Linear(3, 1))])
    assert list(stage.state_dict()) == ["a.0.weight", "a.0.bias", "b.weight", "b.bias"]
    assert stage(torch.zeros(4, 2)).shape == (4, 1)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_meta_copy_keeps_shapes_and_takes_no_memory(name):
    model = NETWORKS[name]()
    model.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shadow = meta_copy(model)
    shapes = {key: (value.shape, value.dtype) for key, value in shadow.state_dict().items()}
    assert shapes == {key: (value.shape, value.dtype) for key, value in before.items()}
    assert {value.device.type for value in shadow.state_dict().values()} == {"meta"}
    assert not any(p.requires_grad for p in shadow.parameters())
    x = torch.empty(2, 3, 32, 32, dtype=torch.float64, device="meta")
    assert shadow(x).device.type == "meta"
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_meta_copy_with_a_cumulative_average_runs_and_leaves_the_original():
    norm = nn.BatchNorm2d(3, momentum=None)
    meta_copy(norm)(torch.empty(2, 3, 4, 4, device="meta"))
    assert norm.momentum is None
    assert int(norm.num_batches_tracked) == 0


def test_one_sample_on_one_pixel_is_enough_to_find_out_costs():
    """Images of 32x32 leave one pixel, on which BatchNorm cannot train with a batch of one."""
    first, _ = cut(small(), [1, 1], input_shape=(1, 3, 32, 32))
    assert first.training


def test_tied_weights_stay_tied_in_a_meta_copy():
    layer = nn.Linear(3, 3)
    shadow = meta_copy(nn.Sequential(layer, nn.ReLU(), layer))
    assert shadow[0].weight is shadow[2].weight


def test_costs_are_those_of_the_layers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    conv, relu, _, linear = layer_costs(model, chain(model), (1, 3, 8, 8))
    assert conv - relu == 3 * 8 * 9 * 64  # multiply-adds
    assert linear == pytest.approx(1024, rel=0.05)


def test_places_may_be_numbers_or_one_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    for names in ([2], "2", ["2"]):
        assert [stage.paths for stage in cut(model, (1, 1), names)] == [["0", "1"], ["2"]]


def test_a_weight_in_two_stages_is_refused():
    # it was trained apart in each of them, without a word
    layer = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="'0' and '2' share a weight, but lie in stages 0 and 1"):
        cut(nn.Sequential(layer, nn.ReLU(), layer), (1, 1), ["2"])


def kinds(found: list[list[tuple[str, nn.Module]]]) -> list[str]:
    return [" ".join(type(layer).__name__ for _, layer in piece) for piece in found]


def test_loose_layers_run_again_in_pieces_of_two_convolutions():
    layers = [
        *(nn.ReLU(), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Conv2d(1, 1, 1), nn.ReLU()),
        *(nn.Conv2d(1, 1, 1), nn.Sigmoid()),
    ]
    named = chain(nn.Sequential(*layers))
    assert kinds(pieces(named)) == ["ReLU", "Conv2d BatchNorm2d Conv2d ReLU", "Conv2d Sigmoid"]


def test_blocks_run_again_by_themselves():
    model = resnet18(num_classes=2, width=2)
    (stage,) = cut(model, [1], recompute=True)
    assert kinds(pieces(chain(model))) == [
        "Conv2d BatchNorm2d ReLU MaxPool2d",
        *["BasicBlock"] * 8,
        *("AdaptiveAvgPool2d", "Flatten", "Linear"),
    ]
    assert list(stage.state_dict()) == list(resnet18(num_classes=2, width=2).state_dict())


def test_a_network_without_blocks_cannot_recompute():
    with pytest.raises(ValueError, match=r"finds no blocks in Bilinear"):
        cut(nn.Bilinear(1, 1, 1), [1], recompute=True)


def test_a_network_that_is_no_chain_is_told_what_else_there_is():
    with pytest.raises(ValueError, match=r"UNet cannot be cut into 2 stages.*parallel=sp or dp"):
        cut(unet(width=2), [1, 1])
