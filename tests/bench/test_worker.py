"""The side of a benchmark that trains: the same images on every side, whatever its tile."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

import spatialdl
from spatialdl.bench import worker
from spatialdl.comm.mesh import dry_mesh


@pytest.mark.parametrize(
    ("model", "grid", "shape"),
    [
        ("resnet18", (2, 2), (1, 3, 9, 9)),
        ("unet", (1, 3), (1, 3, 9, 9)),
        ("unet3d", (2, 1, 3), (1, 1, 9, 9, 9)),
        (worker.CONVOLUTIONS, (3, 1), (1, 64, 9, 9)),
    ],
)
def test_tiles_are_those_of_the_whole_image(model, grid, shape):
    options, cpu = Namespace(model=model, size=9, batch=1), torch.device("cpu")
    whole, labels = worker._images(options, None, cpu), worker._labels(options, None, cpu)
    assert whole.shape == shape
    assert labels.shape == ((1, *shape[2:]) if model.startswith("unet") else (1,))
    for part in range(4):
        mesh = dry_mesh(grid, part % torch.Size(grid).numel())
        bounds = mesh.box(shape[2:])
        own = [slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        tile = worker._images(options, mesh, cpu)
        assert isinstance(tile, spatialdl.SpatialTensor)
        assert torch.equal(tile.to_local(), whole[(..., *own)])
        assert worker._labels(options, mesh, cpu).shape == labels.shape


def test_the_stack_of_convolutions_is_halved_once():
    model = worker.convolutions(5)
    assert model[:8](torch.zeros(1, 64, 12, 10)).shape == (1, 64, 6, 5)
    assert model(torch.zeros(2, 64, 12, 10)).shape == (2, 5)


@pytest.mark.parametrize(
    ("model", "name"),
    [("resnet18", "resnet18"), ("a/b.c/net.py:build", "build"), ("library.nets.Net", "Net")],
)
def test_a_result_is_named_after_the_network(model, name):
    assert worker.name_of(model) == name


def test_a_network_may_be_that_of_others(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n\n\ndef net(num_classes):\n    return nn.Linear(3, num_classes)\n"
    )
    options = Namespace(model=f"{file}:net", recompute=False, ddp=False)
    network = worker._network(options, torch.device("cpu"))
    assert network.out_features == worker.CLASSES
