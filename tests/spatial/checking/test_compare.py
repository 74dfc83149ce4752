"""What counts as a difference, of which numbers, and how a network of the user is built."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spatialdl import models
from spatialdl.spatial.checking.compare import TOLERANCES, Numbers, differences, one_step
from spatialdl.spatial.checking.network import build, find_builder, switch_off_dropout

NAN, INF = math.nan, math.inf


def numbers(dtype: torch.dtype = torch.float64) -> Numbers:
    def tensor(*values: float) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    outputs = {".map": tensor(4, -8, NAN, INF, -INF), ".classes": torch.tensor([1, 2])}
    gradients = {"image": tensor(2, 1), "weight": tensor(1, 4), "unused": None}
    buffers = {"mean": tensor(1, 2), "batches": torch.tensor(3), "none": tensor()}
    return Numbers(outputs, torch.tensor(2.0, dtype=torch.float64), gradients, buffers)


def changed(kind: str, name: str, value: Tensor | None) -> Numbers:
    ours = numbers()
    if kind == "loss":
        return ours._replace(loss=value)
    getattr(ours, f"{kind}s")[name] = value
    return ours


@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        ("output", ".map", [4, -8 + 1e-7, NAN, INF, -INF], "off by up to 1e-07 where the largest "),
        ("output", ".map", [4, -8, 0, INF, -INF], "off by up to inf"),
        ("output", ".map", [4, -8, NAN, -INF, -INF], "off by up to inf"),
        ("output", ".classes", torch.tensor([1, 3]), "differs"),
        ("output", ".classes", torch.tensor([1.0, 2.0]), "(2,) float32 instead of (2,) int64"),
        ("output", ".map", [[4, -8, NAN, INF, -INF]], "(1, 5) float64 instead of (5,) float64"),
        ("loss", "", torch.tensor(2 + 1e-7, dtype=torch.float64), "off by up to 1e-07"),
        ("gradient", "image", [2, 1.1], "off by up to 0.1 where the largest value is 2, 1 values"),
        ("gradient", "weight", None, "missing"),
        ("gradient", "unused", [0, 0], "present, but missing in a single process"),
        ("gradient", "more", [1], "present, but missing in a single process"),
        ("buffer", "mean", [1.1, 2.1], "off by up to 0.1 where the largest value is 2, 2 values"),
        ("buffer", "batches", torch.tensor(4), "differs"),
    ],
)
def test_whatever_differs_is_told(kind, name, value, said):
    if isinstance(value, list):
        value = torch.tensor(value, dtype=torch.float64)
    (found,) = differences(changed(kind, name, value), numbers())
    assert (found.kind, found.name) == (kind, name)
    assert said in found.what
    assert str(found).startswith(f"{kind} {name}:" if kind in ("gradient", "buffer") else kind)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_error_counts_beside_the_largest_value(dtype):
    plain = numbers(dtype)
    for factor, differ in ((0, False), (0.5, False), (2, True)):
        ours, error = numbers(dtype), factor * TOLERANCES.get(dtype, 1e-2)
        ours.gradients["weight"] = plain.gradients["weight"] + 4 * error
        ours.buffers["mean"] = plain.buffers["mean"] + 2 * error
        names = [found.name for found in differences(ours, plain)]
        assert names == ["weight", "mean"] * differ


def test_gradients_of_rounding_alone_do_not_differ():
    """Beside large ones; and a network whose gradients are all small is compared all the same."""
    plain, ours = numbers(), numbers()
    plain.gradients["bias"], ours.gradients["bias"] = torch.tensor([[1e-14], [-1e-14]]).double()
    assert differences(ours, plain) == []
    only = [one._replace(gradients={"bias": one.gradients["bias"]}) for one in (ours, plain)]
    assert [found.name for found in differences(*only)] == ["bias"]


@dataclass
class Answer:
    pair: tuple[Tensor, list[Tensor]]
    found: dict[str, Tensor]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
        self.norm, self.left_out = nn.BatchNorm2d(2), nn.Linear(2, 2)

    def forward(self, x: Tensor, factor: float = 1.0) -> Answer:
        inner = self.first(x) * factor
        outer = self.norm(self.second(inner))
        return Answer((inner, [outer]), {"places": outer.argmax(1), "largest": outer.amax()})


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network().double()


IMAGE = torch.linspace(-1, 1, 2 * 3 * 6 * 5, dtype=torch.float64).view(2, 3, 6, 5).sin()


def test_a_step_gives_every_output_gradient_and_buffer(network):
    found = one_step(network, IMAGE)
    assert list(found.outputs) == [".pair[0]", ".pair[1][0]", ".found.places", ".found.largest"]
    assert not any(output.requires_grad for output in found.outputs.values())
    assert found.gradients.keys() == {"image", *dict(network.named_parameters())}
    assert found.gradients["image"].shape == IMAGE.shape
    # also those in front of the normalisation, on which its mean and variance do not depend
    trained = {name: grad for name, grad in found.gradients.items() if "left_out" not in name}
    small = [name for name, grad in trained.items() if grad.abs().max() < 1e-6]
    assert small == ["second.bias"]
    assert found.gradients["left_out.weight"] is None
    assert int(found.buffers["norm.num_batches_tracked"]) == 1
    assert found.buffers["norm.running_var"].equal(network.norm.running_var)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_each_output_has_a_part_in_the_loss(number, network):
    before = one_step(copy.deepcopy(network), IMAGE)

    def changed(module: nn.Module, inputs: object, answer: Answer) -> Answer:
        inner, (outer,) = answer.pair
        values = [inner, outer, None, answer.found["largest"]]
        values[number] = 2 * values[number]
        return Answer((values[0], [values[1]]), {**answer.found, "largest": values[3]})

    network.register_forward_hook(changed)
    names = [str(found) for found in differences(one_step(network, IMAGE), before)]
    assert any(name.startswith("loss") for name in names)
    assert any(name.startswith("gradient image") for name in names)


def test_a_step_does_not_see_the_one_before_and_hands_arguments_on(network):
    one, two, again = (copy.deepcopy(one_step(network, IMAGE, (f,))) for f in (1.0, 2.0, 1.0))
    torch.testing.assert_close(two.outputs[".pair[0]"], 2 * one.outputs[".pair[0]"])
    for name, grad in one.gradients.items():
        torch.testing.assert_close(again.gradients[name], grad, rtol=1e-12, atol=1e-14)


def test_a_network_without_numbers_to_compare_is_refused():
    class Places(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1)

    with pytest.raises(ValueError, match="no floating point tensor that depends on its input"):
        one_step(Places(), IMAGE)


FILE = """\
from dataclasses import dataclass
import beside_the_network
from torch import nn

@dataclass
class Options:  # dataclasses look for their module
    width: "int" = beside_the_network.WIDTH

def network():
    return nn.Linear(Options().width, 2)

def broken():
    return nn.Linear("three", 2)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "beside_the_network.py").write_text("WIDTH = 7")
    (tmp_path / "network_of_a_user.py").write_text(FILE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path / "network_of_a_user.py"


def test_a_file_finds_what_lies_beside_it(file):
    assert build(f"{file}:network", 0).in_features == 7
    with pytest.raises(TypeError):  # a defect of the network, told as it is
        build(f"{file}:broken", 0)


def test_all_ranks_build_the_same_network(file):
    def weight(seed: int) -> torch.Tensor:
        torch.rand(seed + 3)  # whatever they have drawn before
        return build(f"{file}:network", seed).weight

    assert torch.equal(weight(0), weight(0))
    assert not torch.equal(weight(0), weight(1))


def test_what_is_installed_needs_no_file():
    assert find_builder("torch.nn.Identity") is find_builder("torch.nn:Identity") is nn.Identity
    # also where its module has the same name
    assert find_builder("spatialdl.models.unet") is models.unet


def test_dropout_that_drops_is_switched_off_and_counted():
    kinds = (nn.Dropout(0.5), nn.Dropout2d(0.1), nn.AlphaDropout(0.3), nn.Dropout(0.0), nn.ReLU())
    network = nn.Sequential(nn.Sequential(*kinds), nn.FeatureAlphaDropout(1.0))
    assert switch_off_dropout(network.train()) == 4
    x = torch.rand(2, 3, 4, 5)
    assert torch.equal(network(x), x)
    assert switch_off_dropout(network) == 0
