"""Unmodified networks of `transformers` and `monai` on split images, against one process.

Outputs, loss, all gradients and all buffers of a training step. What a network needs that cannot
be done on a split image is refused by name; which networks those are is written down here, so that
a refusal cannot hide what has worked before.
"""

from __future__ import annotations

import copy

import pytest
import torch
from mpi4py import MPI

from spatialdl import UnsupportedSpatialOp, init_mesh
from spatialdl.checking.compare import differences, one_step
from tests.mpi.zoo import NETWORKS

GRIDS = {2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (5, 1), 6: (2, 3)}

FAST = {
    "transformers ResNet bottleneck",
    "transformers ConvNext",
    "transformers RegNet Y",
    "transformers MobileNetV1",
    "transformers SegFormer",
    "monai SegResNet deconvolution",
    "monai HighResNet",
    "monai AutoEncoder",
}

REFUSED = {
    "transformers PVT": "class token",
    "transformers CvT class token": "class token",
    "transformers DINOv3 ConvNext": "class token",
    "transformers ViT": "class token",
    "transformers DINOv2": "class token",
    "transformers SuperPoint": "max_pool2d on a split image takes",
    "monai Classifier": "gather_before",
    "monai VarAutoEncoder": "gather_before",
    "monai Quicknat": "places within a split image",
}
"""The networks that are refused, and what the refusal says."""


def _marked(name: str) -> object:
    return name if name in FAST else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [_marked(name) for name in NETWORKS if name not in REFUSED])
def test_a_training_step_equals_that_of_one_process(name: str) -> None:
    mesh = init_mesh(GRIDS[MPI.COMM_WORLD.size])
    entry = NETWORKS[name]
    network = entry.network()
    torch.manual_seed(2)  # stochastic depth draws a number per sample, the same on every rank
    plain = one_step(copy.deepcopy(network), entry.image(), tuple(entry.arguments))
    assert max(float(grad.abs().max()) for grad in plain.gradients.values() if grad is not None) > 0
    torch.manual_seed(2)
    ours = one_step(network, entry.image(), tuple(entry.arguments), mesh)
    assert [str(difference) for difference in differences(ours, plain)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    mesh = init_mesh(GRIDS[MPI.COMM_WORLD.size])
    entry = NETWORKS[name]
    with pytest.raises(UnsupportedSpatialOp, match=REFUSED[name]):
        one_step(entry.network(), entry.image(), tuple(entry.arguments), mesh)


def test_the_lists_name_networks_that_are_there() -> None:
    assert FAST | set(REFUSED) <= set(NETWORKS)
    assert not FAST & set(REFUSED)
    assert len(NETWORKS) - len(REFUSED) >= 45
