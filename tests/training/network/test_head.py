"""Networks whose outputs are not the classes of the data, before and in the first step."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.network.building import seed_generators
from spatialdl.training.network.head import check_head
from spatialdl.training.settings import open_sources
from spatialdl.training.tasks.task import task_of
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit

DATA = "data.image_size=[16,12] data.num_classes=3 data.samples=6 data.batch_size=2 device=cpu"


class Net(nn.Module):
    """Any number of outputs; may read a value, which fails on the meta device."""

    def __init__(self, outputs: int, maps: bool = False, looks: bool = False) -> None:
        super().__init__()
        self.conv, self.maps, self.looks = nn.Conv2d(3, outputs, 3, padding=1), maps, looks

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and float(x.sum()) > 1e9:
            return x
        x = self.conv(x)
        return x if self.maps else x.mean((2, 3))


class Wrapped(Net):
    """As networks of transformers give it."""

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(x))


WRONG = [
    ("task=classification", Wrapped(3), r"SimpleNamespace \(wrap it .* returns only \.logits"),
    ("task=classification", Net(1000), "has 1000 outputs for the 3 classes of the data.*=1000"),
    ("task=classification", Net(2), "has 2 outputs for the 3 classes"),
    ("task=classification", Net(3, maps=True), "but task=classification needs"),
    ("task=segmentation", Net(5, maps=True), "has 5 outputs for the 3 classes"),
    ("task=segmentation", Net(3), "but task=segmentation needs"),
    ("task=multilabel data.targets=x", Net(4), r"expected \(2, 3\)"),
    ("task=regression data.targets=x", Net(1), r"expected \(2, 3\)"),
    (
        "task=classification task.loss._target_=torch.nn.CrossEntropyLoss",
        *(Net(1000), "has 1000 outputs for the 3 classes"),
    ),
]


def check(words: str, model: nn.Module) -> None:
    words = words.replace(" data.targets=x", "")  # of synthetic data there are no files
    config = composed("train", f"{DATA} {words}".replace("task.loss", "++task.loss"))
    sources = open_sources(config.data, 0, config.task.name)
    check_head(model, task_of(config.task, sources.num_classes, sources.train), sources)


@pytest.mark.parametrize(("words", "model", "sentence"), WRONG)
def test_another_number_of_outputs_is_refused(words, model, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(words, model)
    check(words, Net(3, maps="segmentation" in words))


def test_a_network_that_looks_at_values_is_checked_by_its_first_loss(tmp_path):
    check("", Net(1000, looks=True))
    words = f"{DATA} ++model._target_={__name__}.looking trainer.max_steps=1"
    trainer = Trainer(composed("train", words), SingleProcess())
    weights = [p.detach().clone() for p in trainer.parts.pipeline.parameters()]
    with pytest.raises(ValueError, match="has 1000 outputs for the 3 classes of the data"):
        fit(trainer, tmp_path)
    pairs = zip(weights, trainer.parts.pipeline.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def looking(num_classes: int, in_channels: int, width: int) -> Net:
    return Net(1000, looks=True)


def test_more_outputs_than_classes_can_be_asked_for(tmp_path):
    words = f"{DATA} data.num_classes=1000 ++model._target_={__name__}.looking trainer.max_steps=1"
    fit(Trainer(composed("train", f"{words}"), SingleProcess()), tmp_path)


def test_the_network_and_the_generators_stay_as_they_are():
    class Draws(Net):
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


def test_a_run_is_refused_before_its_first_step():
    words = f"{DATA} ++model._target_={__name__}.many trainer.max_steps=1"
    with pytest.raises(ValueError, match="has 1000 outputs for the 3 classes of the data"):
        Trainer(composed("train", words), SingleProcess())


def many(num_classes: int, in_channels: int, width: int) -> Net:
    return Net(1000)
