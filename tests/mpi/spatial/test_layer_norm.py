"""LayerNorm and RMSNorm with another epsilon than PyTorch's, over the image and beside it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from tests.mpi.equality import Operation, check, parameter

EPS = 0.3
SHAPES = {"everything": (4, 9, 7), "columns": (7,)}
FUNCTIONS: dict[str, Operation] = {
    "layer_norm": lambda x, shape: F.layer_norm(x, shape, eps=EPS),
    "torch.layer_norm": lambda x, shape: torch.layer_norm(x, shape, None, None, EPS),
    "rms_norm": lambda x, shape: F.rms_norm(x, shape, None, EPS),
    "torch.rms_norm": lambda x, shape: torch.rms_norm(x, shape, eps=EPS),
    "rms_norm without one": lambda x, shape: F.rms_norm(1e-8 * x, shape),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_given_epsilon_is_taken(name: str, meshes: dict) -> None:
    function, image = FUNCTIONS[name], parameter(random.Random(3), 2, 4, 9, 7)
    for mesh in meshes.values():
        for over, shape in SHAPES.items():
            what = f"{name} of {over} on {mesh.grid} "
            check(lambda x, s=shape: function(x, s), image, [], mesh, what)
        what = f"{name} of channels on {mesh.grid} "
        check(lambda x: function(x.permute(0, 2, 3, 1), (4,)), image, [], mesh, what)
