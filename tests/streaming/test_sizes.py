from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor, nn

from spatialdl.models import resnet18, unet
from spatialdl.streaming.memory import Memory
from spatialdl.streaming.sizes import SHARE, ImageSizes, sizes_of, stored, tiles_within
from spatialdl.streaming.store import DiskStore


def really(model: nn.Module, shape: tuple[int, ...]) -> int:
    """What tensors take at most while an image is trained on."""
    memory = Memory(10**12, DiskStore())
    with memory.watch():
        output = model(torch.rand(shape))
        output.backward(torch.ones_like(output))
    return memory.peak


@pytest.mark.parametrize(("build", "recompute"), [(resnet18, False), (unet, False), (unet, True)])
def test_what_a_network_takes_is_known_without_data(build, recompute):
    from spatialdl.spatial.recompute import recompute_blocks

    model = build(num_classes=3) if build is resnet18 else build(num_classes=3, width=8, depth=2)
    shape = (2, 3, 128, 96)
    found = sizes_of(model, shape, torch.float32, recompute=recompute)
    if recompute:
        recompute_blocks(model)
    assert found is not None
    assert found.live == pytest.approx(really(model, shape), rel=0.2)
    assert model.training  # and it is as it was
    assert not any(one.grad is None for one in model.parameters())
    assert next(model.parameters()).device.type == "cpu"


def test_evaluation_takes_less_than_training():
    model = unet(num_classes=2, width=4, depth=2)
    trained, evaluated = (
        sizes_of(model, (1, 3, 64, 64), torch.float64, trains=trains) for trains in (True, False)
    )
    assert trained is not None
    assert evaluated is not None
    assert evaluated.live < trained.live / 2
    # the last upsampled map and its skip, and both together
    assert evaluated.largest == 2 * (2 * 4) * 64 * 64 * 8


def test_a_network_that_reads_values_is_not_known():
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.mean())

    assert sizes_of(Reads(), (1, 3, 8, 8), torch.float32) is None


@pytest.mark.parametrize(
    ("size", "grid"),
    [((1000, 1000), (1, 1)), ((1000, 90), (1, 1)), ((300, 200, 100), (1, 1, 1)), ((999,), (3,))],
)
def test_tiles_are_as_few_as_fit_and_nearly_square(size, grid):
    sizes, limit = ImageSizes(10**9, 4 * 10**8), 10**8
    found = tiles_within(sizes, limit, size, grid)
    per_tile = sizes.largest / prod(found) / prod(grid)
    assert per_tile <= SHARE * limit
    fewer = [tuple(n - (i == at) for i, n in enumerate(found)) for at in range(len(found))]
    assert any(sizes.largest / max(1, prod(few)) / prod(grid) > SHARE * limit for few in fewer)
    sides = [extent / (own * parts) for extent, own, parts in zip(size, found, grid, strict=True)]
    assert max(sides) <= 2.5 * min(sides)


def test_one_tile_is_enough_where_all_fits():
    assert tiles_within(ImageSizes(10, 10), 1000, (64, 64), (1, 1)) == [1, 1]


def test_pixels_are_not_cut():
    assert tiles_within(ImageSizes(10**9, 10**9), 1, (4, 2), (1, 1)) == [3, 2]


def test_what_is_stored_is_what_the_limit_leaves():
    assert stored(ImageSizes(1000, 10), 300, 2) == 200
    assert stored(ImageSizes(1000, 10), 2000, 1) == 0
