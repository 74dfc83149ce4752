"""Networks of a user's own files; how mistakes are told, the test of the command shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from spatialdl import models
from spatialdl.checking.network import build, find_builder, switch_off_dropout

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
    assert find_builder("torch.nn.Identity") is nn.Identity
    assert find_builder("torch.nn:Identity") is nn.Identity


@pytest.mark.parametrize("name", ["unet", "vit", "wide_view"])
def test_a_function_is_found_where_its_module_has_the_same_name(name):
    assert find_builder(f"spatialdl.models.{name}") is getattr(models, name)


def test_dropout_that_drops_is_switched_off_and_counted():
    kinds = (nn.Dropout(0.5), nn.Dropout2d(0.1), nn.AlphaDropout(0.3), nn.Dropout(0.0), nn.ReLU())
    network = nn.Sequential(nn.Sequential(*kinds), nn.FeatureAlphaDropout(1.0))
    assert switch_off_dropout(network.train()) == 4
    x = torch.rand(2, 3, 4, 5)
    assert torch.equal(network(x), x)
    assert switch_off_dropout(network) == 0
