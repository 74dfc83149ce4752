"""Indexing of split images against one process: slices, single rows, channels, writing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, init_mesh, shard
from spatialdl.comm.communicator import Communicator
from tests.mpi.equality import (
    Operation,
    check,
    check_keyed,
    close,
    draw,
    drawn,
    every_mesh,
    in_all_dims,
    parameter,
    same,
    several_ranks,
)
from tests.mpi.spatial.shared import Cases, near, tokens

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


@pytest.mark.tiles
@in_all_dims(9, 800)
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


def test_a_full_slice_is_the_tensor_itself_and_a_crop_keeps_the_cut(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(2, 3, 8, 6), mesh)
        for index in (ALL, ..., (ALL, ...), (..., slice(0, 8), slice(0, 6)), (ALL, slice(0, 99))):
            assert x[index] is x
        x = shard(torch.zeros(1, 1, 40, 40), mesh)
        cropped = x[..., :39, :38].spatial_layout
        for ours, before in zip(cropped.cuts, x.spatial_layout.cuts, strict=True):
            assert ours[:-1] == before[:-1]


def test_labels_and_single_rows(meshes: dict) -> None:
    """A row is the same on every rank."""
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.bfloat16):
        whole = (torch.arange(2 * 9 * 7) % 5).view(2, 9, 7).to(dtype)
        for mesh in meshes.values():
            x = shard(whole, mesh)
            for index in ((0,), (..., slice(2, 7), slice(1, None, 3))):
                close(x[index].full_tensor(), whole[index], f"{dtype} {index} on {mesh.grid}")
            for index in ((ALL, 3), (..., -1), (1, 2, 5), (1, ALL, 4), (..., 4, slice(1, 5, 2))):
                assert type(x[index]) is Tensor
                assert torch.equal(x[index], whole[index])


def merged(x: Tensor) -> Tensor:
    """Swin (Liu et al., 2021): every second pixel, four times, put side by side as channels."""
    x = x.permute(0, 2, 3, 1)
    a, b, c, d = (x[:, row::2, col::2, :] for row in (0, 1) for col in (0, 1))
    return a.sin() + 2 * b.cos() + c * d


def added(x: Tensor, values: Tensor) -> Tensor:
    """To some channels, in place."""
    y = x * 2
    part = y[:, 1:3] + values[:, None, None]
    y[:, 1:3] = part
    y[...] = y.exp()
    return y * y


def queries(x: Tensor) -> Tensor:
    q, k = tokens(x).chunk(2, -1)
    return q * k.sin()


N, C, H, W = 2, 3, 7, 5


def of_tokens(x: Tensor) -> Tensor:
    """The neighbours of each token, of which the first windows of `near` are not in order."""
    rows, columns = near(H), near(W)
    index = (rows[:, None, :, None] * W + columns[None, :, None, :]).view(H * W, 9)
    return tokens(x)[:, index]


ROWS, COLUMNS = torch.tensor([6, 0, 0, -1, 3, 2]), torch.tensor([4, 1])
PICKED: dict[str, Operation] = {
    "rows": lambda x: x[:, :, ROWS],
    "rows of channels-last maps": lambda x: x.permute(0, 2, 3, 1)[:, ROWS],
    "both at once": lambda x: x[..., ROWS[:, None], COLUMNS],
    "windows of columns": lambda x: x[..., near(W)],
    "windows": lambda x: x[..., near(H)[:, :, None, None], near(W)].square(),
    "neighbours of tokens": of_tokens,
    "tokens in another order": lambda x: tokens(x)[:, torch.arange(H * W).flip(0)],
}


def places(*shape: int) -> Tensor:
    return torch.randint(4, shape, generator=torch.Generator().manual_seed(0))


def taken(*shape: int) -> Operation:
    """Values along a dim that is not split."""
    chosen = places(*shape)

    def take(x: Tensor) -> Tensor:
        both = torch.take_along_dim(x, chosen, 1) * x.cos().take_along_dim(indices=chosen, dim=-3)
        return both + torch.take_along_dim(x.cos(), x.argsort(1), 1).mean(1, keepdim=True)

    return take


MAP = (2, 4, 7, 6)
CASES: Cases = {
    **{f"merged patches of {n}": (merged, (2, 3, *n), []) for n in ((8, 8), (10, 14), (22, 6))},
    "added to channels": (added, (2, 4, 5, 6), [(2,)]),
    "queries": (queries, (2, 4, 7, 5), []),
    **{name: (pick, (N, C, H, W), []) for name, pick in PICKED.items()},
    **{
        f"taken by {chosen}": (taken(*chosen), MAP, [])
        for chosen in ((2, 2, 7, 6), (2, 9, 7, 6), (1, 3, 7, 6))  # fewer, more, for all samples
    },
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


def test_whole_numbers_are_picked(meshes: dict) -> None:
    labels, image = torch.arange(N * H * W).view(N, H, W), drawn(2, *MAP)
    same(lambda x: x[:, ROWS], labels, meshes, "labels ")
    same(lambda x: (x % 3 == 0)[..., near(W)], labels, meshes, "truths ")
    chosen = places(2, 2, 7, 6)
    for mesh in meshes.values():
        split_places = torch.take_along_dim(image, shard(chosen, mesh), 1)
        assert torch.equal(split_places.full_tensor(), torch.take_along_dim(image, chosen, 1))


def test_ranks_with_other_indices_are_noticed(world: Communicator) -> None:
    mesh = init_mesh((world.size, 1))
    if world.size > 1:
        x = shard(drawn(0, N, C, H, W), mesh)
        with pytest.raises(ValueError, match="tensor beside a split image"):
            x[:, :, torch.tensor([mesh.part, 0])]


# --- slices by other names

PARTS: dict[str, Callable[[Tensor], Any]] = {
    "narrow rows": lambda x: x.narrow(2, 2, 5),
    "select row": lambda x: torch.select(x, 2, 4),
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: torch.split(x, 2, 1),
    "tensor_split rows": lambda x: torch.tensor_split(x, (2, 5), 2),
    "vsplit": lambda x: torch.vsplit(x, [1]),
    "dsplit": lambda x: x.dsplit(3),
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0, 2])),
    "index_select of columns": lambda x: x.index_select(3, torch.tensor([2, 0, 2])),
    "diff of rows": lambda x: torch.diff(x, n=2, dim=-2),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", PARTS)
def test_every_part(name: str, meshes: dict) -> None:
    image = drawn(0, 2, 4, 9, 11)
    parts = PARTS[name](image)
    count = 1 if isinstance(parts, Tensor) else len(parts)
    for number in range(count):

        def one(x: Tensor, number: int = number) -> Tensor:
            result = PARTS[name](x)
            return result if isinstance(result, Tensor) else result[number]

        check(one, image, [], meshes, f"{name} {number}")


# --- writing


@pytest.mark.tiles
@in_all_dims(6, 200)
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
