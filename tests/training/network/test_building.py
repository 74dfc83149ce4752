"""Networks whose outputs are not the classes of the data, before and in the first step."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from spatialdl.common.configuring.own_keys import fit_model_keys
from spatialdl.models import resnet18
from spatialdl.training.checkpoints.same_run import settings_of
from spatialdl.training.network.building import check_head, freeze, instantiate, seed_generators
from spatialdl.training.settings import open_sources
from spatialdl.training.tasks.task import task_of
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit, make_trainer


def test_the_seed_is_that_of_all_generators_a_network_may_draw_by():
    """A run that was killed before its first checkpoint began anew with other numbers of NumPy."""
    drawn = []
    for seed in (-1, -1, 7):
        seed_generators(seed)
        drawn.append((torch.rand(()).item(), np.random.random(), random.random()))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[1], drawn[2], strict=True))


class Net(nn.Module):
    """A network of a library's, strict about its arguments."""

    def __init__(self, num_classes: int = 1000, in_chans: int = 3, width: int = 4) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(in_chans, width, 3), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


def like_timm(model_name: str = "net", pretrained: bool = False, **kwargs: Any) -> Net:
    return Net(**{key: value for key, value in kwargs.items() if value is not None})


def like_torchvision(*, weights: object = None, progress: bool = True, **kwargs: Any) -> Net:
    def strict(num_classes: int = 1000, zero_init: bool = False) -> Net:
        return Net(num_classes)

    return strict(**kwargs)


def like_transformers(**kwargs: Any) -> Net:
    return Net(kwargs.get("num_labels", 2), kwargs.get("num_channels", 3))


def in_other_words(**kwargs: Any) -> Net:
    if kwargs.keys() - {"width"}:
        raise KeyError(f"no options {kwargs}")
    return Net(**kwargs)


def strict_about_lists(num_classes: int, size: list[int], heads: dict[str, list[int]]) -> Net:
    assert type(size) is list
    assert type(heads) is dict
    assert type(heads["late"]) is list
    return Net(num_classes, width=sum(size) + heads["late"][0])


def always_wrong(**kwargs: Any) -> Net:
    raise RuntimeError("no such weights")


def wrapped(*args: Any, **kwargs: Any) -> Net:
    return Net(*args, **kwargs)


pinned = functools.partial(like_timm, "other", width=6)


def built(name: str, *words: str) -> tuple[nn.Module, DictConfig]:
    """As a run builds it, and what a checkpoint records of it."""
    overrides = [f"++model._target_={name}", *(f"++{word}" for word in words)]
    more = ["data.num_classes=3", "data.channels=2"]
    config = composed("train", *overrides, *more)
    fit_model_keys(config, overrides)
    return instantiate(config), OmegaConf.create(settings_of(config))


def outputs(model: nn.Module, channels: int = 2) -> int:
    return model(torch.rand(2, channels, 9, 9)).shape[1]


@pytest.mark.parametrize("name", ["Net", "like_timm", "wrapped", "pinned"])
def test_classes_and_channels_of_the_data_go_through_keywords(name):
    model, recorded = built(f"{__name__}.{name}")
    assert outputs(model) == 3
    assert recorded.model == {"_target_": f"{__name__}.{name}", "num_classes": 3, "in_chans": 2}
    again = instantiate(recorded)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert [p.shape for p in again.parameters()] == [p.shape for p in model.parameters()]


def test_what_a_network_does_not_take_is_left_out():
    model, recorded = built(f"{__name__}.like_torchvision")
    assert outputs(model, channels=3) == 3
    assert set(recorded.model) == {"_target_", "num_classes"}
    model, recorded = built(f"{__name__}.like_transformers", "model.num_channels=2")
    assert outputs(model) == 3
    model, recorded = built(f"{__name__}.in_other_words", "model.width=5")
    assert outputs(model, channels=3) == 1000  # which check_head refuses
    assert recorded.model == {"_target_": f"{__name__}.in_other_words", "width": 5}


def test_lists_and_tables_reach_a_network_as_plain_ones():
    """Configurations of transformers refuse those of OmegaConf."""
    words = ("model.size=[2,3]", "model.heads={late:[4]}")
    model, recorded = built(f"{__name__}.strict_about_lists", *words)
    assert model.conv.out_channels == 9
    assert instantiate(recorded).conv.out_channels == 9


def test_the_error_of_a_network_is_the_first():
    with pytest.raises(ValueError, match=r"(?s)always_wrong cannot be built: .*no such weights"):
        built(f"{__name__}.always_wrong")
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'depth'"):
        built(f"{__name__}.like_timm", "model.depth=3")


DATA = "data.image_size=[16,12] data.num_classes=3 data.samples=6 data.batch_size=2 device=cpu"


class HeadNet(nn.Module):
    """Any number of outputs; may read a value, which fails on the meta device."""

    def __init__(self, outputs: int, maps: bool = False, looks: bool = False) -> None:
        super().__init__()
        self.conv, self.maps, self.looks = nn.Conv2d(3, outputs, 3, padding=1), maps, looks

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and float(x.sum()) > 1e9:
            return x
        x = self.conv(x)
        return x if self.maps else x.mean((2, 3))


class Wrapped(HeadNet):
    """As networks of transformers give it."""

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(x))


WRONG = [
    ("task=classification", Wrapped(3), r"SimpleNamespace \(wrap it .* returns only \.logits"),
    ("task=classification", HeadNet(1000), "has 1000 outputs for the 3 classes of the data.*=1000"),
    ("task=classification", HeadNet(3, maps=True), "but task=classification needs"),
    ("task=segmentation", HeadNet(5, maps=True), "has 5 outputs for the 3 classes"),
    ("task=segmentation", HeadNet(3), "but task=segmentation needs"),
    ("task=multilabel data.targets=x", HeadNet(4), r"expected \(2, 3\)"),
    ("task=regression data.targets=x", HeadNet(1), r"expected \(2, 3\)"),
    (
        "task=classification task.loss._target_=torch.nn.CrossEntropyLoss",
        *(HeadNet(1000), "has 1000 outputs for the 3 classes"),
    ),
]


def check(words: str, model: nn.Module) -> None:
    words = words.replace(" data.targets=x", "")  # of synthetic data there are no files
    config = composed("train", *f"{DATA} {words}".replace("task.loss", "++task.loss").split())
    sources = open_sources(config.data, 0, config.task.name)
    check_head(model, task_of(config.task, sources.num_classes, sources.train), sources)


@pytest.mark.parametrize(("words", "model", "sentence"), WRONG)
def test_another_number_of_outputs_is_refused(words, model, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(words, model)
    check(words, HeadNet(3, maps="segmentation" in words))


def looking(num_classes: int, in_channels: int, width: int) -> HeadNet:
    return HeadNet(1000, looks=True)


def many(num_classes: int, in_channels: int, width: int) -> HeadNet:
    return HeadNet(1000)


def run_of(network: str, *words: str) -> Trainer:
    given = f"{DATA} ++model._target_={__name__}.{network} trainer.max_steps=1"
    return make_trainer(*given.split(), *words)


def test_a_run_is_refused_before_its_first_step_or_by_its_first_loss(tmp_path):
    check("", HeadNet(1000, looks=True))
    with pytest.raises(ValueError, match="has 1000 outputs for the 3 classes of the data"):
        run_of("many")
    trainer = run_of("looking")
    weights = [p.detach().clone() for p in trainer.parts.pipeline.parameters()]
    with pytest.raises(ValueError, match="has 1000 outputs for the 3 classes of the data"):
        fit(trainer, tmp_path)
    pairs = zip(weights, trainer.parts.pipeline.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_network_and_the_generators_stay_as_they_are():
    class Draws(HeadNet):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            self.conv.weight.data.add_(1)
            noise = random.random() + np.random.random() + torch.rand((), device="cpu")
            return super().forward(x) * (noise > 0)

    model = Draws(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seed_generators(3)
    expected = random.random(), np.random.random(), torch.rand(())
    seed_generators(3)
    check("", model)
    assert (random.random(), np.random.random(), torch.rand(())) == expected
    assert not hasattr(model, "calls")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- freezing


def frozen(*patterns: str) -> set[str]:
    model = resnet18(3, width=2)
    freeze(model, patterns)
    return {name for name, one in model.named_parameters() if not one.requires_grad}


def test_patterns_choose_parameters_by_name():
    assert frozen() == set()
    assert frozen("conv1.*") == {"conv1.weight"}
    assert frozen("fc.bias", "bn1.*") == {"fc.bias", "bn1.weight", "bn1.bias"}
    layer = {name for name, _ in resnet18(width=1).named_parameters() if "layer1." in name}
    assert frozen("layer1.*") == layer
    assert len(frozen("layer[1-3].*", "*.bias")) > len(layer)


def test_patterns_that_match_nothing_or_everything_are_refused():
    with pytest.raises(ValueError, match=r"no parameter matches layer1; did you mean layer\d"):
        frozen("conv1.*", "layer1")
    with pytest.raises(ValueError, match=r"no parameter matches fc.wieght; .*fc.weight"):
        frozen("fc.wieght")
    with pytest.raises(ValueError, match=r"freezes all \d+ parameters: nothing is left"):
        frozen("*")
