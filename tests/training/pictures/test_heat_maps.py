from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from matplotlib import colormaps
from torch import nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.loader import to_input
from spatialdl.training.parts import RunParts
from spatialdl.training.pictures import thumbnails
from spatialdl.training.pictures.gallery import Example
from spatialdl.training.pictures.heat_maps import OPACITY, faint, heated
from spatialdl.training.pictures.orthogonal_slices import draw_planes
from spatialdl.training.pictures.thumbnails import drawn_signal
from spatialdl.training.tasks.predictions import extremes
from tests.training.pictures.whole_volumes import planes_of

SMALL = "tests.mpi.training.small.small"
NETWORKS = "tests.training.pictures.test_activation"
TINY = [
    *("~model.width", "data.image_size=[40,36]", "data.num_classes=3", "device=cpu"),
    *("data.validation_samples=11", "data.batch_size=4", "trainer.max_steps=1"),
    "trainer.precision=float64",
]


def looked_at(network: str, *overrides: str) -> tuple[RunParts, list[Example]]:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", [f"++model._target_={network}", *TINY, *overrides])
    ours = RunParts(config, SingleProcess())
    loader = ours.validation_loader
    ours.validation.scores(ours.validation.own(map(loader.microbatches, loader.batches())))
    return ours, ours.validation.examples()


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_they_are_those_of_the_plain_network(task):
    ours, examples = looked_at(SMALL, f"task={task}")
    plain = ours.pipeline.stages[0].eval()
    assert len(examples) == 8
    for one in examples:
        pixels = ours.sources.validation.read(one.sample)
        image = to_input(torch.from_numpy(pixels[None]), torch.float64, torch.device("cpu"))
        with torch.no_grad():
            features, best = plain[:-3](image), int(plain(image).argmax())
            values = torch.einsum("nchw,c->hw", features, plain.fc.weight[best])
            values += plain.fc.bias[best]
        expected = heated(pixels, values.numpy())
        assert list(one.pictures) == ["image", f"heat map of {best}"]
        np.testing.assert_array_equal(one.pictures[f"heat map of {best}"], expected)
    # or any would be equal
    assert len({one.pictures[name].tobytes() for one in examples for name in one.pictures}) == 16


def of_volumes(num_classes: int, in_channels: int) -> nn.Sequential:
    layers = [nn.Conv3d(in_channels, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, num_classes))


def of_signals(num_classes: int, in_channels: int) -> nn.Sequential:
    layers = [nn.Conv1d(in_channels, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, num_classes))


@pytest.mark.parametrize(("network", "size"), [("of_volumes", (7, 20, 16)), ("of_signals", (50,))])
def test_those_of_volumes_and_signals(network, size):
    ours, examples = looked_at(
        f"tests.training.pictures.test_heat_maps.{network}", f"data.image_size={list(size)}"
    )
    plain = ours.pipeline.stages[0].eval()
    for one in examples:
        pixels = ours.sources.validation.read(one.sample)
        image = to_input(torch.from_numpy(pixels[None]), torch.float64, torch.device("cpu"))
        with torch.no_grad():
            features, best = plain[:2](image), int(plain(image).argmax())
            values = torch.einsum("nc...,c->...", features, plain[4].weight[best])
            values = (values + plain[4].bias[best]).numpy()
        if len(size) == 3:
            planes = planes_of(pixels[..., 0])
            expected = draw_planes(planes, heat=planes_of(values), side=200)
            assert (expected != draw_planes(planes, side=200)).mean() > 0.5
        else:
            expected = heated(drawn_signal(pixels), values[None])
        np.testing.assert_array_equal(one.pictures[f"heat map of {best}"], expected)


def test_only_those_that_may_be_shown_are_kept():
    ours, examples = looked_at(SMALL, "data.validation_samples=30")
    assert sorted(ours.validation._heat_maps._parts) == sorted(one.sample for one in examples)
    values, labels = ours.validation._predictions.values, ours.validation._predictions.labels
    errors = [(n, float(1 - values[n, labels[n]])) for n in range(30)]
    assert [one.sample for one in examples] == [sample for sample, _ in extremes(errors)]


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (f"{NETWORKS}.pools_the_most", "is not the mean of a feature map"),
        (f"{NETWORKS}.ends_with_a_map", "has no linear layer"),
        (SMALL, "its last map has only one position"),
    ],
)
def test_networks_without_are_said_once(network, why, caplog):
    size = ["data.image_size=[4,4]"] if network == SMALL else []
    with caplog.at_level(logging.INFO):
        ours, examples = looked_at(network, *size)
        ours.validation.examples()
    assert [list(one.pictures) for one in examples] == [["image"]] * 8
    (said,) = (one.getMessage() for one in caplog.records if "heat maps" in one.getMessage())
    assert why in said


def test_there_are_none_of_numbers(caplog):
    with caplog.at_level(logging.INFO):
        _, examples = looked_at(SMALL, "task=regression")
    assert [list(one.pictures) for one in examples] == [["image"]] * 8
    assert not any("heat maps" in one.getMessage() for one in caplog.records)


def test_a_map_is_not_larger_than_a_thumbnail(monkeypatch):
    monkeypatch.setattr(thumbnails, "SIDE", 5)
    ours, _ = looked_at(SMALL)
    patches = [part.patches for part in ours.validation._heat_maps._parts.values()]
    assert [[one.values.shape for one in own] for own in patches] == [[(5, 4, 1)]] * 8


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
    nothing = heated(image, np.array([[-1.0]]))
    assert (nothing == expected).all()
