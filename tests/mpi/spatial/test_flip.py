"""Pixels moved along rows and columns, and between them and channels, against one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import shard
from spatialdl.spatial.reindex import DimMap, Segment, reindex
from spatialdl.spatial.tensor import SpatialTensor
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
    seeds,
)

TURNS: dict[str, Operation] = {
    "flip rows": lambda x: x.flip(2),
    "flip columns": lambda x: torch.flip(x, [-1]),
    "flip all": lambda x: torch.flip(x, dims=(0, 1, 2, 3)),
    "fliplr": torch.fliplr,
    "roll rows": lambda x: x.roll(3, 2),
    "roll both": lambda x: torch.roll(x, shifts=(-2, 5), dims=(2, 3)),
    "roll far": lambda x: torch.roll(x, (1, 57, -31), (1, -1, -2)),
    "roll of a shifted window": lambda x: x.permute(0, 2, 3, 1).roll((-2, -1), (1, 2)),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "rot90 twice": lambda x: torch.rot90(x, 2, (2, 3)),
    "rot90 the other way": lambda x: torch.rot90(x, 1, (3, 2)),
    "rot90 not at all": lambda x: torch.rot90(x, 4, (2, 3)),
    "rot90 of channels and rows": lambda x: torch.rot90(x, 1, (1, 2)),
}


@pytest.mark.parametrize("seed", seeds(1, 40))
@pytest.mark.parametrize("name", TURNS)
def test_turn(name: str, seed: int, meshes: dict) -> None:
    s = draw(random.Random(seed), meshes)
    check(TURNS[name], s.image, [], s.mesh, f"{s}, {name}")


def test_a_turned_image_may_be_written_to(meshes: dict) -> None:
    """Of labels, too."""
    whole = torch.arange(1 * 3 * 9 * 7).view(1, 3, 9, 7)
    for mesh in meshes.values():
        x = shard(whole, mesh)
        for name, turn in TURNS.items():
            y = turn(x)
            close(y.full_tensor(), turn(whole), name)
            y.mul_(3)
            assert torch.equal(x.full_tensor(), whole)


# --- pixels that become channels, and back


@pytest.mark.parametrize("seed", seeds(4, 100))
def test_pixel_shuffle_and_unshuffle(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    factor = 1 + (seed + 1) % 4
    both = nn.Sequential(nn.PixelShuffle(factor), nn.PixelUnshuffle(factor))
    for grid, mesh in meshes.items():
        height, width = (factor * rng.randint(max(1, -(-n // factor)), 9) for n in grid)
        image = parameter(rng, 2, 2 * factor * factor, height, width)
        if seed % 2:
            image = image.contiguous(memory_format=torch.channels_last)
        what = f"{tuple(image.shape)} by {factor} on {grid}"
        check(lambda x: F.pixel_shuffle(x, factor), image, [], mesh, what)
        check(lambda x: F.pixel_unshuffle(x, factor), image, [], mesh, what)
        check(both, image, [], mesh, what)


def squeeze(x: Tensor) -> Tensor:
    """Down to less pixels than ranks."""
    return F.pixel_shuffle(F.pixel_unshuffle(x, 4).sin(), 4)


SHUFFLED: dict[str, tuple[Operation, tuple[int, ...]]] = {
    "down to a pixel": (squeeze, (1, 1, 4, 4)),
    "down to a row": (squeeze, (1, 1, 4, 12)),
    **{f"channels in {n}": (nn.ChannelShuffle(n), (2, 6, 5, 7)) for n in (1, 2, 3, 6)},
}


@pytest.mark.parametrize("name", SHUFFLED)
def test_shuffled(name: str) -> None:
    operation, size = SHUFFLED[name]
    check_keyed(operation, size, [], every_mesh(len(size) - 2), name)


def test_shuffled_labels(meshes: dict) -> None:
    whole = torch.arange(2 * 4 * 6 * 8).view(2, 4, 6, 8)
    for mesh in meshes.values():
        for shuffle in (F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle):
            ours = shuffle(shard(whole, mesh), 2).full_tensor()
            close(ours, shuffle(whole, 2), shuffle.__name__)


# --- any map of rows and columns


def any_segments(rng: random.Random, size: int) -> list[Segment]:
    """Up to four segments, forwards, backwards, in steps or repeated, within `size` inputs."""
    segments = []
    for _ in range(rng.randint(1, 4)):
        step = rng.choice((1, 1, -1, 0, 2, -3))
        length = rng.randint(0, size if step in (0, 1, -1) else size // 3)
        span = abs(step) * max(length - 1, 0)
        lowest = rng.randint(0, size - 1 - span)
        segments.append(Segment(length, lowest + span if step < 0 else lowest, step))
    return segments if any(s.length for s in segments) else [Segment(1, 0)]


def read_by(segments: list[Segment]) -> list[int]:
    return [s.first + k * s.step for s in segments for k in range(s.length)]


@in_all_dims(6, 600)
def test_any_map_of_rows_and_columns(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    each = [any_segments(rng, size) for size in s.image.shape[2:]]

    def read(x: Tensor) -> Tensor:
        if not isinstance(x, SpatialTensor):
            for dim, segments in enumerate(each, start=2):
                x = x.index_select(dim, torch.tensor(read_by(segments)))
            return x
        layout = x.spatial_layout
        return reindex(read, x, tuple(map(DimMap.of, each, layout.cuts)))

    check(read, s.image, [], s.mesh, f"{s}, {each}")


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 0, 1, 2), (2, 1, 0, 3)])
def test_rows_and_columns_at_any_dims(order: tuple[int, ...], meshes: dict) -> None:
    rows, cols = order.index(2), order.index(3)

    def turned(x: Tensor) -> Tensor:
        x = x.permute(order)
        if not isinstance(x, SpatialTensor):
            return x.flip(rows).narrow(cols, 2, 4)
        layout = x.spatial_layout
        back = DimMap.of([Segment(7, 6, -1)], layout.cuts[0])
        return reindex(turned, x, (back, DimMap.of([Segment(4, 2)], layout.cuts[1])))

    for mesh in meshes.values():
        for memory_format in (torch.contiguous_format, torch.channels_last):
            image = drawn(0, 2, 3, 7, 9).contiguous(memory_format=memory_format)
            check(turned, image, [], mesh, f"{order} on {mesh.grid}")


def test_what_lies_outside_is_filled_and_the_identity_is_the_tensor_itself(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.ones(1, 1, 5, 6), mesh)
        layout = x.spatial_layout
        rows = DimMap.of([Segment(9, -2)], layout.cuts[0])
        y = reindex(reindex, x, (rows, DimMap.identity(layout.cuts[1])), fill=7.0).full_tensor()
        assert y[0, 0, :, 0].tolist() == [7, 7, 1, 1, 1, 1, 1, 7, 7]
        assert reindex(reindex, x, tuple(map(DimMap.identity, layout.cuts))) is x
