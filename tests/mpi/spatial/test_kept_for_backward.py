"""What autograd keeps of operations on split images: no more than for one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import Mesh, shard
from tests.mpi.equality import Operation, kept_for_backward, storage

KEPT: dict[str, tuple[Operation, int]] = {
    "average": (lambda x: F.avg_pool2d(x, 2), 0),
    "average, stride": (lambda x: F.avg_pool2d(x, 3, 2, 1), 0),
    "average of what there is": (lambda x: F.avg_pool2d(x, 5, 1, 2, True, False), 0),
    "adaptive average to one": (lambda x: F.adaptive_avg_pool2d(x, 1), 8),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, 3), 8),
    "adaptive average of rows": (lambda x: F.adaptive_avg_pool2d(x, (4, None)), 8),
    "adaptive maximum": (lambda x: F.adaptive_max_pool2d(x, 3), 4 * 3 * 3 * 8),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), 0),
    "fold": (lambda x: F.fold(x.flatten(2), (33, 37), 2), 0),
}
"""And the most bytes that are kept of an image."""


@pytest.mark.parametrize("name", KEPT)
def test_no_pixel_is_kept(name: str, meshes: dict) -> None:
    operation, most = KEPT[name]
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 32, 36), mesh).requires_grad_()
        assert sum(kept_for_backward(operation, x).values()) <= most


def test_max_pooling_keeps_its_places_only(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 32, 36), mesh).requires_grad_()
        places = kept_for_backward(lambda x: F.max_pool2d(x, 3, 2, 1), x)
        outputs = F.max_pool2d(x, 3, 2, 1).to_local()
        border = 4 * 2 * sum(outputs.shape[2:])  # whose windows reach to other tiles: twice
        assert 8 * outputs.numel() <= sum(places.values()) <= 8 * (outputs.numel() + border)


NORMS: list[Operation] = [
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    lambda x, w, b: F.group_norm(x, 2, w, b),
    lambda x, w, b: F.instance_norm(x, None, None, w, b),
]


def test_norms_keep_the_input_and_a_few_statistics(meshes: dict) -> None:
    weight, bias = (torch.rand(4).double().requires_grad_() for _ in range(2))
    for mesh in meshes.values():
        x = shard(torch.rand(2, 4, 32, 32).double(), mesh).requires_grad_()
        for norm in NORMS:
            kept = kept_for_backward(norm, x, weight, bias)
            assert sum(kept.values()) < x.to_local().nbytes + 64 * 8


@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_transposed_convolutions_keep_the_tile_and_thin_strips(kernel: int, meshes: dict) -> None:
    """Where nobody talks, which is so for a kernel of 2, the tile alone."""

    def raised(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv_transpose2d(x, weight, None, 2, kernel // 2 if kernel > 2 else 0)

    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 24, 36), mesh).requires_grad_()
        weight = torch.rand(4, 4, kernel, kernel).requires_grad_()
        kept = kept_for_backward(raised, x, weight)
        assert {storage(x.to_local()), storage(weight)} <= set(kept)
        _, _, height, width = x.to_local().shape
        around = 4 * 2 * kernel * (height + width + 2 * kernel)  # channels x 2 sides x ...
        strips = sum(kept.values()) - x.to_local().nbytes - weight.nbytes
        assert 0 <= strips <= (4 * around if kernel > 2 else 0)
        frozen = kept_for_backward(raised, x, weight.detach())
        assert set(frozen) == {storage(weight)}  # the gradient of the image reads no pixel


def a_line(channels: int, mesh: Mesh) -> Tensor:
    """One row of 36 pixels, or a column on a grid of one row: some ranks have none."""
    rows, cols = mesh.grid
    shape, kernel = ((rows, 36), (rows, 1)) if rows > 1 else ((36, cols), (1, cols))
    image = shard(torch.rand(1, channels, *shape, dtype=torch.float64), mesh)
    return F.max_pool2d(image, kernel).detach().requires_grad_()


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def test_where_ranks_have_no_pixels_the_copied_halo_is_not_kept(meshes: dict) -> None:
    for mesh in meshes.values():
        line = a_line(4, mesh)
        weight = torch.rand(4, 4, 3, 3, dtype=torch.float64).requires_grad_()
        kept = kept_for_backward(convolve, line, weight)
        others = sum(kept.values()) - line.to_local().nbytes - weight.nbytes
        assert 0 <= others <= 8 * 4 * 2  # a pixel at either end
        frozen = kept_for_backward(convolve, line, weight.detach())
        assert set(frozen) == {storage(weight)}  # the gradient of the image reads no pixel


def test_beside_large_weights_only_what_other_ranks_sent_is_kept(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 32, 12, 12, dtype=torch.float64), mesh).detach().requires_grad_()
        weight = torch.rand(64, 32, 3, 3, dtype=torch.float64).requires_grad_()
        rows, cols = (12 // n for n in mesh.grid)
        strips = 2 * 32 * (rows + cols + 2) * 8
        kept = kept_for_backward(convolve, x, weight)
        assert sum(kept.values()) - x.to_local().nbytes - weight.nbytes <= strips
