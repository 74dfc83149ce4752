"""Indexing of split images against one process: slices, single rows, channels, writing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from spatialdl.spatial import SpatialTensor
from tests.mpi.equality import check, close, draw, every_mesh, in_all_dims, parameter, several_ranks

ALL = slice(None)


def any_slice(rng: random.Random, size: int) -> slice:
    """Not empty; often all of it."""
    while True:
        start, stop = rng.randint(-size - 2, size), rng.randint(-size, size + 3)
        chosen = slice(rng.choice((None, start)), rng.choice((None, stop)), rng.choice((None, 2)))
        if range(*chosen.indices(size)):
            return chosen


def any_item(rng: random.Random, size: int, is_split: bool) -> Any:
    kind = rng.random()
    if kind < 0.3:
        return ALL
    if kind < 0.8:
        return any_slice(rng, size)
    if kind < 0.9 or is_split:
        return rng.randint(-size, size - 1)
    return rng.choice(
        (
            torch.tensor([rng.randint(-size, size - 1) for _ in range(2)]),
            [rng.randint(0, size - 1), 0],
            torch.arange(size) > 0,
        )
    )


@in_all_dims(25, 800)
def test_any_index(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    last = tuple(range(2, 2 + dims))
    order = rng.choice(((0, 1, *last), (0, 1, *last), (0, *last, 1), (2, 0, 1, *last[1:])))
    sizes = [s.image.shape[dim] for dim in order]
    items = [
        any_item(rng, size, dim > 1)
        for dim, size in zip(order, sizes[: rng.randint(1, 2 + dims)], strict=False)
    ]
    if isinstance(items[-1], slice) and items[-1] == ALL and rng.random() < 0.5:
        items[-1] = ...
    if rng.random() < 0.2:
        items.insert(rng.randint(0, len(items)), None)
    index = items[0] if len(items) == 1 else tuple(items)

    def read(x: Tensor) -> Tensor:
        return x.permute(order)[index]

    try:
        drawn = read(s.image)
    except IndexError:  # two lists of unequal lengths, which PyTorch refuses
        return
    if drawn.numel():
        check(read, s.image, [], s.mesh, f"{s}, {order}, {index}")


def test_a_full_slice_is_the_tensor_itself(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(2, 3, 8, 6), mesh)
        for index in (ALL, ..., (ALL, ...), (..., slice(0, 8), slice(0, 6)), (ALL, slice(0, 99))):
            assert x[index] is x


def test_a_crop_keeps_the_cut_where_it_is(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(1, 1, 40, 40), mesh)
        cropped = x[..., :39, :38].spatial_layout
        assert cropped.cuts[0][:-1] == x.spatial_layout.cuts[0][:-1]
        assert cropped.cuts[1][:-1] == x.spatial_layout.cuts[1][:-1]


def test_one_row_is_the_same_on_every_rank(meshes: dict) -> None:
    whole = torch.arange(2 * 7 * 6).view(2, 7, 6)
    for mesh in meshes.values():
        x = shard(whole, mesh)
        for index in ((ALL, 3), (..., -1), (1, 2, 5), (..., 4, slice(1, 5, 2))):
            assert type(x[index]) is Tensor
            assert torch.equal(x[index], whole[index])


def test_patch_merging(meshes: dict) -> None:
    """Liu et al. (2021), Swin: every second pixel, four times, put side by side as channels."""

    def merge(x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        a, b, c, d = (x[:, row::2, col::2, :] for row in (0, 1) for col in (0, 1))
        return a.sin() + 2 * b.cos() + c * d

    rng = random.Random(0)
    for mesh in meshes.values():
        for size in ((8, 8), (10, 14), (22, 6)):
            check(merge, parameter(rng, 2, 3, *size), [], mesh, f"{size} on {mesh.grid}")


@pytest.mark.parametrize(
    "index",
    [
        (ALL, ALL, torch.tensor([0, 2]), torch.tensor([1, 2])),
        (ALL, ALL, torch.ones(9, dtype=torch.bool)),
        torch.ones(2, 3, 9, 7, dtype=torch.bool),
        (ALL, True),
    ],
)
def test_pixels_are_not_chosen_by_pairs_or_masks(index: Any, meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(2, 3, 9, 7), mesh)
        with pytest.raises(UnsupportedSpatialOp, match=r"^__getitem__ .* 9x7.*masked_fill"):
            x[index]


def test_a_split_mask_is_refused_but_fills(meshes: dict) -> None:
    whole = torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    for mesh in meshes.values():
        x = shard(whole, mesh)
        with pytest.raises(UnsupportedSpatialOp, match="masked_fill"):
            x[x > 0]
        x[x > 0] = 0.0
        assert torch.equal(x.full_tensor(), whole.clamp(max=0))


@pytest.mark.parametrize("index", [(5,), (ALL, ALL, 9), (ALL, ALL, ALL, ALL, 0), (..., -8)])
def test_an_index_out_of_range(index: Any, meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(2, 3, 9, 7), mesh)
        with pytest.raises(IndexError):
            x[index]


# --- writing


@in_all_dims(12, 200)
def test_write_into_channels_and_samples(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    items = [any_item(rng, size, False) for size in s.image.shape[: rng.randint(1, 2)]]
    target = s.image[tuple(items)]
    if target.numel() == 0:
        return
    kind = rng.choice(("number", "scalar", "channels", "whole", "split"))

    def write(x: Tensor, values: Tensor) -> Tensor:
        y = x * 2
        region = y[tuple(items)]
        value = {
            "number": 1.5,
            "scalar": values.sum(),
            "channels": values[(slice(region.shape[-dims - 1]), *(None,) * dims)]
            if region.dim() > dims
            else 0.5,
            "whole": s.image[tuple(items)],
            "split": region * 3 + values.sum(),
        }[kind]
        del region
        y[tuple(items)] = value
        return y * x + values.sum()

    check(write, s.image, [parameter(rng, 4)], s.mesh, f"{s}, {items}, {kind}")


def test_add_to_some_channels_in_place(meshes: dict) -> None:
    def add(x: Tensor, values: Tensor) -> Tensor:
        y = x * 2
        part = y[:, 1:3] + values[:, None, None]
        y[:, 1:3] = part
        y[...] = y.exp()
        return y * y

    rng = random.Random(0)
    for mesh in meshes.values():
        image, values = parameter(rng, 2, 4, 5, 6), parameter(rng, 2)
        check(add, image, [values], mesh, f"add on {mesh.grid}")


def test_writing_into_part_of_the_image_is_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(2, 3, 9, 7), mesh)
        for index in ((ALL, ALL, slice(1, 4)), (..., 3), (ALL, ALL, torch.tensor([1]))):
            with pytest.raises(UnsupportedSpatialOp, match=r"^__(set|get)item__ .* 9x7"):
                x[index] = 1.0
        with pytest.raises(UnsupportedSpatialOp, match="in place"):
            torch.zeros(2, 3, 9, 7)[:] = x
        assert not x.full_tensor().any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writing_into_a_slice_that_has_moved_is_refused(mode: type, meshes: dict) -> None:
    """PyTorch would write into its base too; here they do not lie in the same memory."""
    for mesh in meshes.values():
        with mode():
            x = shard(torch.ones(1, 2, 12, 12), mesh)
        for index in ((..., slice(3, None), ALL), (..., slice(5, None)), (..., slice(2, 4), ALL)):
            with mode():
                part = x[index]
                moved = part._apart
                for value in (part, part.view(part.shape), part.detach(), part[:, :1], x):
                    if moved:
                        with pytest.raises(UnsupportedSpatialOp, match="clone"):
                            value.add_(1)
                if not moved:
                    part.zero_()
                    assert not x[index].full_tensor().any()
                del part, value
                x.mul_(2)
                F.relu_(x[index].clone())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_selected_row_is_no_view_and_must_not_be_written(mode: type, meshes: dict) -> None:
    """It once took the number, and the image kept its own, without a word."""
    for mesh in several_ranks(meshes):
        for select in (lambda x: x[:, :, 3], lambda x: x.select(3, -1), lambda x: x[0, :, 1, 2:4]):
            with mode():
                x = shard(torch.ones(1, 2, 9, 7), mesh) * 1
                untouched = select(x)
                copied = untouched.clone().zero_()
                assert x[:, :1].sum() == 63
                with pytest.raises(UnsupportedSpatialOp, match=r"add_ .*still in use; clone"):
                    x.add_(1)
                del untouched
                assert x.add_(1).sum() == 2 * 126
                select(x[:, :]).view(-1).add_(1)
                for read in (lambda x: x * 1, lambda x: x.sum(), lambda x: x.full_tensor()):
                    with pytest.raises(UnsupportedSpatialOp, match=r"row or column .* modified"):
                        read(x)
                assert not copied.any()


def test_labels_and_half_precision(meshes: dict) -> None:
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float32):
        whole = (torch.arange(2 * 9 * 7) % 5).view(2, 9, 7).to(dtype)
        for mesh in meshes.values():
            x = shard(whole, mesh)
            for index in ((0,), (..., slice(2, 7), slice(1, None, 3)), (1, ALL, 4)):
                ours = x[index]
                full = ours.full_tensor() if isinstance(ours, SpatialTensor) else ours
                close(full, whole[index], f"{dtype} {index} on {mesh.grid}")
