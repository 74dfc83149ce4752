"""Under autocast every operation gives the type that PyTorch gives, and so does its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import Mesh, SpatialTensor, shard
from tests.mpi.equality import every_mesh, functional

ones = torch.ones
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "convolution": lambda x, y, c: F.conv2d(x, ones(3, 5, 3, 3), ones(3), padding=1),
    "strided": lambda x, y, c: F.conv2d(x, ones(3, 5, 3, 3), stride=4),
    "transposed": lambda x, y, c: F.conv_transpose2d(x, ones(5, 3, 3, 3)),
    "pixels": lambda x, y, c: F.linear(x.permute(0, 2, 3, 1), ones(3, 5)),
    "flattened": lambda x, y, c: F.linear(x.flatten(1), ones(3, 360), ones(3)),
    "flattened product": lambda x, y, c: x.flatten(1) @ ones(360, 3),
    "product": lambda x, y, c: x.flatten(2) @ y.flatten(2).transpose(1, 2),
    "einsum": lambda x, y, c: torch.einsum("nchw,cd->ndhw", x, ones(5, 3)),
    "batch norm": lambda x, y, c: F.batch_norm(x, None, None, ones(5), ones(5), True),
    "group norm": lambda x, y, c: F.group_norm(x, 5, ones(5), ones(5)),
    "layer norm": lambda x, y, c: F.layer_norm(x, (5, 9, 8)),
    "instance norm": lambda x, y, c: F.instance_norm(x),
    "softmax": lambda x, y, c: x.softmax(2),
    "average": lambda x, y, c: F.avg_pool2d(x, 3, 2, 1),
    "adaptive": lambda x, y, c: F.adaptive_avg_pool2d(x, 1),
    "maximum": lambda x, y, c: F.max_pool2d(x, 3, 2, 1),
    "bilinear": lambda x, y, c: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "nearest": lambda x, y, c: F.interpolate(x, size=(5, 6)),
    "reflect": lambda x, y, c: F.pad(x, (1, 1, 1, 1), "reflect"),
    "replicate": lambda x, y, c: F.pad(x, (2, 0, 1, 1), "replicate"),
    "zeros": lambda x, y, c: F.pad(x, (1, 1, 1, 1)),
    "sum": lambda x, y, c: x.sum((2, 3)),
    "mean": lambda x, y, c: x.mean((2, 3)),
    "prod": lambda x, y, c: x.prod(2),
    "norm": lambda x, y, c: x.norm(),
    "variance": lambda x, y, c: x.var((2, 3)),
    "join": lambda x, y, c: torch.cat([x, y], 1),
    "add": lambda x, y, c: x + y,
    "power": lambda x, y, c: x.pow(2),
    "dropout": lambda x, y, c: F.dropout(x, 0.5),
    "cross entropy": lambda x, y, c: F.cross_entropy(x, c),
    "by pixel": lambda x, y, c: F.cross_entropy(x, c, reduction="none"),
    "likelihood": lambda x, y, c: F.nll_loss(x, c),
    "squares": lambda x, y, c: F.mse_loss(x, y),
    "logits": lambda x, y, c: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
}
NHWC = ("pixels", "einsum", "product")  # the gradient of a split leaf has its strides


@pytest.mark.parametrize("mixed", [torch.bfloat16, torch.float16])
def test_types_are_those_of_one_process(mixed: torch.dtype, meshes: dict[str, Mesh]) -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(2, 5, 9, 8, generator=draw)
    classes = torch.randint(5, (2, 9, 8), generator=draw)
    for mesh in meshes.values():
        for name, operation in OPERATIONS.items():
            for dtype in (mixed, torch.float32):
                plain = images.clone().to(dtype).requires_grad_()
                ours = shard(images.to(dtype), mesh).detach().requires_grad_()
                with torch.autocast("cpu", mixed):
                    expected = operation(plain, images, classes)
                    found = operation(ours, shard(images, mesh), shard(classes, mesh))
                what = f"{name} of {dtype} on {mesh.grid}"
                assert found.dtype == expected.dtype, what
                if isinstance(found, SpatialTensor):
                    assert found.to_local().dtype == expected.dtype, what
                if name not in NHWC:
                    expected.float().sum().backward()
                    found.float().sum().backward()
                    assert plain.grad is not None
                    assert ours.grad is not None
                    assert ours.grad.to_local().dtype == plain.grad.dtype, what


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    """Also near the numbers of one process, as far as half precision tells."""
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(2, 4, *(9, 8, 7)[:dims], generator=draw)
    weight = 0.1 * torch.randn(3, 4, *(3, 3, 3)[:dims], generator=draw)

    def operation(x: Tensor) -> list[Tensor]:
        y = functional("conv", dims)(x, weight, padding=1)
        normed = F.batch_norm(y, None, None, training=True)
        pools = [functional(name, dims)(normed, 2) for name in ("avg_pool", "max_pool")]
        pads = [F.pad(y, (1, 1) * dims, mode) for mode in ("reflect", "replicate", "circular")]
        return [y, normed, *pools, *pads, y.softmax(1), y.flatten(2).mT]

    with torch.autocast("cpu", torch.bfloat16):
        expected = operation(image)
        for mesh in every_mesh(dims).values():
            for ours, plain in zip(operation(shard(image, mesh)), expected, strict=True):
                assert ours.to_local().dtype == ours.dtype == plain.dtype
                error = (ours.full_tensor().float() - plain.float()).abs().max()
                assert error < 0.02 * plain.float().abs().max()
