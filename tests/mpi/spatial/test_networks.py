"""Unmodified networks of `transformers` and `monai` on split images, against one process.

Outputs, loss, all gradients and all buffers of a training step. What a network needs that cannot
be done on a split image is refused by name; which networks those are is written down here, so that
a refusal cannot hide what has worked before.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable

import pytest
import torch
from mpi4py import MPI

from spatialdl import UnsupportedSpatialOp, init_mesh
from spatialdl.checking.compare import differences, one_step
from tests.mpi.equality import slow_cases
from tests.mpi.zoo import NETWORKS, Entry
from tests.mpi.zoo_attention import ATTENTION, SIGNALS, TUBES
from tests.mpi.zoo_vision_transformers import VISION_TRANSFORMERS
from tests.mpi.zoo_volumes import VOLUMES
from tests.mpi.zoo_windows import WINDOWS

GRIDS = {2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (5, 1), 6: (2, 3)}
ALL_GRIDS = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2)], 5: [(5, 1)], 6: [(2, 3)]}
GRIDS_OF_VOLUMES: dict[int, list[tuple[int, ...]]] = {
    2: [(2, 1, 1)],
    3: [(1, 3, 1)],
    4: [(1, 2, 2), (2, 2, 1)],
    5: [(1, 1, 5)],
    6: [(3, 1, 2)],
}

FAST = {
    "transformers ResNet bottleneck",
    "transformers ConvNext",
    "transformers RegNet Y",
    "transformers MobileNetV1",
    "transformers SegFormer",
    "transformers DINOv2",
    "monai SegResNet deconvolution",
    "monai HighResNet",
    "monai AutoEncoder",
    "monai Classifier",
    "monai Regressor",
    "monai Discriminator",
}

REFUSED = {
    "transformers SuperPoint": "max_pool2d on a split image takes",
    "monai Quicknat": "indices into a split image",
}
"""The networks that are refused, and what the refusal says."""

FAST_VOLUMES = {"UNet residual, batch norm", "DynUNet", "HighResNet", "SegResNetDS", "Classifier"}

FAST_TRANSFORMERS = {
    "transformers BEiT",
    "transformers DINOv2 registers",
    "transformers SAM",
    "transformers SigLIP attention pooling",
    "transformers Hiera",
}

REFUSED_TRANSFORMERS = {
    "transformers EoMT": "a split tensor cannot be written to a whole one in place",
    "transformers Mask2Former": "cat is not supported",
}


def _exact(networks: Iterable[str], fast: set[str], refused: Container[str] = ()) -> list[object]:
    kept = [name for name in networks if name not in refused]
    return [*(n for n in kept if n in fast), *slow_cases(n for n in kept if n not in fast)]


ALL = {**NETWORKS, **VISION_TRANSFORMERS}


@pytest.mark.parametrize(
    "name",
    [
        *_exact(NETWORKS, FAST, REFUSED),
        *_exact(VISION_TRANSFORMERS, FAST_TRANSFORMERS, REFUSED_TRANSFORMERS),
    ],
)
def test_a_training_step_equals_that_of_one_process(name: str) -> None:
    _compare(ALL[name], GRIDS[MPI.COMM_WORLD.size])


@pytest.mark.parametrize("name", _exact(VOLUMES, FAST_VOLUMES))
def test_a_training_step_on_volumes_equals_that_of_one_process(name: str) -> None:
    _compare(VOLUMES[name], *GRIDS_OF_VOLUMES[MPI.COMM_WORLD.size])


SMALL = {**ATTENTION, **WINDOWS}
ALIKE = {
    "class attention, fused",
    "cross-covariance, fused",
    "global queries, fused",
    "pooled windows",
    "mask units",
    "neighbourhoods by views",
    "neighbourhoods by slices",
}


@pytest.mark.parametrize("name", _exact(SMALL, set(SMALL) - ALIKE))
def test_steps_of_small_transformers_equal_those_of_one_process(name: str) -> None:
    for grid in ALL_GRIDS[MPI.COMM_WORLD.size]:
        _compare_steps(SMALL[name], grid)


@pytest.mark.parametrize("name", _exact([*SIGNALS, *TUBES], {"a signal", "tubes, mean"}))
def test_steps_on_signals_and_tubes_equal_those_of_one_process(name: str) -> None:
    size = MPI.COMM_WORLD.size
    for grid in [(size,)] if name in SIGNALS else GRIDS_OF_VOLUMES[size]:
        _compare_steps({**SIGNALS, **TUBES}[name], grid)


def _compare_steps(entry: Entry, grid: tuple[int, ...]) -> None:
    plain, mesh = entry.network(), init_mesh(grid)
    ours = copy.deepcopy(plain)
    for step in range(2):
        image = entry.image() * (1 + step)
        numbers = one_step(ours, image, (), mesh), one_step(plain, image)
        assert [str(difference) for difference in differences(*numbers)] == [], (grid, step)
        for network in (ours, plain):
            torch.optim.SGD(network.parameters(), 0.01).step()


def _compare(entry: Entry, *grids: tuple[int, ...]) -> None:
    network = entry.network()
    torch.manual_seed(2)  # stochastic depth draws a number per sample, the same on every rank
    plain = one_step(copy.deepcopy(network), entry.image(), tuple(entry.arguments))
    assert max(float(grad.abs().max()) for grad in plain.gradients.values() if grad is not None) > 0
    for grid in grids:
        torch.manual_seed(2)
        arguments = tuple(entry.arguments)
        ours = one_step(copy.deepcopy(network), entry.image(), arguments, init_mesh(grid))
        assert [str(difference) for difference in differences(ours, plain)] == [], grid


@pytest.mark.parametrize("name", slow_cases([*REFUSED, *REFUSED_TRANSFORMERS]))
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    entry, mesh = ALL[name], init_mesh(GRIDS[MPI.COMM_WORLD.size])
    with pytest.raises(UnsupportedSpatialOp, match={**REFUSED, **REFUSED_TRANSFORMERS}[name]):
        one_step(entry.network(), entry.image(), tuple(entry.arguments), mesh)


def test_the_lists_name_networks_that_are_there() -> None:
    assert FAST | set(REFUSED) <= set(NETWORKS)
    assert not FAST & set(REFUSED)
    assert FAST_TRANSFORMERS | set(REFUSED_TRANSFORMERS) <= set(VISION_TRANSFORMERS)
    assert set(VOLUMES) >= FAST_VOLUMES
    assert set(SMALL) >= ALIKE
