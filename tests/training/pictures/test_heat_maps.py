"""Maps of which a class's score is the mean, and their pictures."""

from __future__ import annotations

import logging
from collections import OrderedDict

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from torch import Tensor, nn

from spatialdl.data.loader import to_input
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.parts import RunParts
from spatialdl.training.pictures import thumbnails
from spatialdl.training.pictures.activation import Activations
from spatialdl.training.pictures.gallery import Example
from spatialdl.training.pictures.heat_maps import OPACITY, faint, heated
from spatialdl.training.pictures.orthogonal_slices import draw_planes
from spatialdl.training.pictures.thumbnails import drawn_signal
from spatialdl.training.tasks.predictions import extremes
from tests.fitting import make_parts, validated
from tests.mpi.training.small import small
from tests.training.pictures.whole_volumes import planes_of

HERE = "tests.training.pictures.test_heat_maps"
SMALL = "tests.mpi.training.small.small"
DRAW = torch.Generator().manual_seed(0)
IMAGES = torch.rand(5, 3, 23, 19, dtype=torch.float64, generator=DRAW)


def parts(network: str, *words: str) -> RunParts:
    given = ("~model.width", "data.num_classes=3", "trainer.precision=float64", "device=cpu")
    return make_parts(f"++model._target_={network}", *given, "trainer.max_steps=1", *words)


def looked_at(network: str, *words: str) -> tuple[RunParts, list[Example]]:
    given = ("data.image_size=[40,36]", "data.validation_samples=11", "data.batch_size=4")
    ours = parts(network, *given, *words)
    validated(ours)
    return ours, ours.validation.examples()


def evaluated(network: str, all_classes: bool) -> tuple[Activations, Tensor]:
    """After a bias has been set by which classes differ from image to image."""
    pipeline = parts(network, "data.image_size=[23,19]").pipeline
    batch = Microbatch(len(IMAGES), 1.0, IMAGES, torch.zeros(len(IMAGES)))
    if hasattr(pipeline.stages[0], "fc"):
        pipeline.stages[0].fc.bias.data -= pipeline.evaluate([batch])[0].mean(0)
    watch = Activations(pipeline, all_classes=all_classes)
    return watch, pipeline.evaluate([batch])[0]


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x * x)


def nested(num_classes: int, in_channels: int) -> nn.Sequential:
    """Its last map is an input only, of a layer of a layer."""
    body = nn.Sequential(nn.Conv2d(in_channels, 6, 3), Squared(), nn.Flatten())
    return nn.Sequential(OrderedDict(body=body, fc=nn.Linear(6, num_classes)))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


class Second(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[1].mean((2, 3))


def of_a_pair(num_classes: int, in_channels: int) -> nn.Sequential:
    layers = [nn.Conv2d(in_channels, 6, 3), Twice(), Second(), nn.Linear(6, num_classes)]
    return nn.Sequential(OrderedDict(zip("abcd", layers, strict=True)))


@pytest.mark.parametrize(
    ("network", "size"),
    [(SMALL, (6, 5)), (f"{HERE}.nested", (21, 17)), (f"{HERE}.of_a_pair", (21, 17))],
)
def test_the_mean_of_a_map_is_the_logit(network, size):
    watch, output = evaluated(network, all_classes=True)
    seen = watch.take(output)
    assert (seen.size, seen.values.shape) == (size, (5, 3, *size))
    torch.testing.assert_close(seen.values.mean((2, 3)), output, rtol=0, atol=1e-12)
    assert not seen.is_split
    assert not watch.refusal
    watch, output = evaluated(network, all_classes=False)
    only, classes = watch.take(output), output.argmax(1)
    assert torch.equal(only.logits, output)
    assert network != SMALL or len(set(classes.tolist())) > 1
    torch.testing.assert_close(only.values, seen.values[range(5), classes], rtol=0, atol=1e-12)


def test_a_closed_one_sees_nothing():
    pipeline = parts(SMALL, "data.image_size=[23,19]").pipeline
    watch = Activations(pipeline, all_classes=False)
    watch.close()
    assert watch.take(pipeline.evaluate([Microbatch(5, 1.0, IMAGES, torch.zeros(5))])[0]) is None
    assert not any(module._forward_hooks for module in pipeline.stages[0].modules())


def ends_with_a_map(num_classes: int, in_channels: int) -> nn.Sequential:
    head = [nn.Conv2d(in_channels, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*head)


def flattens(num_classes: int, in_channels: int) -> nn.Sequential:
    head = nn.Linear(4 * 21 * 17, num_classes)
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.Flatten(), head)


def pools_the_most(num_classes: int, in_channels: int) -> nn.Sequential:
    network = small(num_classes, in_channels)
    network.pool = nn.AdaptiveMaxPool2d(1)
    return network


def has_two_layers(num_classes: int, in_channels: int) -> nn.Sequential:
    end = nn.Sequential(nn.ReLU(), nn.Linear(6, num_classes))
    return nn.Sequential(OrderedDict(body=small(6, in_channels), end=end))


def goes_on(num_classes: int, in_channels: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(body=small(num_classes, in_channels), end=nn.Softplus()))


@pytest.mark.parametrize(
    ("network", "why"),
    [
        ("ends_with_a_map", "the last stage has no linear layer"),
        ("flattens", "the input of its last linear layer is not one number per map channel"),
        ("pools_the_most", "the input of its last linear layer is not the mean of a feature map"),
        ("has_two_layers", "the input of its last linear layer is not the mean of a feature map"),
        ("goes_on", "its output is not that of its last linear layer"),
    ],
)
def test_networks_without_such_an_end_are_refused(network, why):
    watch, output = evaluated(f"{HERE}.{network}", all_classes=False)
    assert watch.take(output) is None
    assert watch.refusal == why


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((f"{HERE}.ends_with_a_map",), "has no linear layer"),
        ((SMALL, "data.image_size=[4,4]"), "its last map has only one position"),
        ((SMALL, "task=regression"), ""),
    ],
)
def test_runs_without_are_told_so_once_but_for_numbers(words, why, caplog):
    with caplog.at_level(logging.INFO):
        ours, examples = looked_at(*words)
        ours.validation.examples()
    assert [list(one.pictures) for one in examples] == [["image"]] * 8
    said = [one.getMessage() for one in caplog.records if "heat maps" in one.getMessage()]
    assert len(said) == bool(why)
    assert all(why in text for text in said)


def of_volumes(num_classes: int, in_channels: int) -> nn.Sequential:
    layers = [nn.Conv3d(in_channels, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, num_classes))


def of_signals(num_classes: int, in_channels: int) -> nn.Sequential:
    layers = [nn.Conv1d(in_channels, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, num_classes))


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (SMALL, ["task=classification"]),
        (SMALL, ["task=multilabel"]),
        (f"{HERE}.of_volumes", ["data.image_size=[7,20,16]"]),
        (f"{HERE}.of_signals", ["data.image_size=[50]"]),
    ],
)
def test_pictures_are_those_of_the_plain_network(network, words):
    ours, examples = looked_at(network, *words)
    plain = ours.pipeline.stages[0].eval()
    assert len(examples) == 8
    for one in examples:
        pixels = ours.sources.validation.read(one.sample)
        image = to_input(torch.from_numpy(pixels[None]), torch.float64, torch.device("cpu"))
        with torch.no_grad():
            features, best = plain[:-3](image), int(plain(image).argmax())
            values = torch.einsum("nc...,c->...", features, plain[-1].weight[best])
            values = (values + plain[-1].bias[best]).numpy()
        if values.ndim == 3:
            planes = planes_of(pixels[..., 0])
            expected = draw_planes(planes, heat=planes_of(values), side=200)
            assert (expected != draw_planes(planes, side=200)).mean() > 0.5
        elif values.ndim == 1:
            expected = heated(drawn_signal(pixels), values[None])
        else:
            expected = heated(pixels, values)
        assert list(one.pictures) == ["image", f"heat map of {best}"]
        np.testing.assert_array_equal(one.pictures[f"heat map of {best}"], expected)
    # or any would be equal
    assert len({one.pictures[name].tobytes() for one in examples for name in one.pictures}) == 16


def test_only_those_that_may_be_shown_are_kept_as_small_as_they_are_drawn(monkeypatch):
    monkeypatch.setattr(thumbnails, "SIDE", 5)
    ours, examples = looked_at(SMALL, "data.validation_samples=30")
    kept = ours.validation._heat_maps._parts
    assert sorted(kept) == sorted(one.sample for one in examples)
    values, labels = ours.validation._predictions.values, ours.validation._predictions.labels
    errors = [(n, float(1 - values[n, labels[n]])) for n in range(30)]
    assert [one.sample for one in examples] == [sample for sample, _ in extremes(errors)]
    assert [[one.values.shape for one in part.patches] for part in kept.values()] == [
        [(5, 4, 1)]
    ] * 8


def test_colours_go_from_0_to_the_most():
    image = np.full((5, 4, 3), 100, np.uint8)
    picture = heated(image, np.array([[-3.0, 0.0], [2.0, 4.0]]))
    grey, low = faint(image)[0, 0], np.array(colormaps["turbo"](0.0)[:3])
    expected = ((1 - OPACITY) * grey + OPACITY * 255 * low).round()
    assert picture.shape == (5, 4, 3)
    assert (picture[:2, :] == expected).all()
    assert (picture[3:, 2:] == picture[4, 3]).all()
    assert picture[4, 3, 0] > picture[4, 3, 2]  # red
    assert not (picture[4, 0] == picture[4, 3]).all()
    assert (heated(image, np.array([[-1.0]])) == expected).all()
