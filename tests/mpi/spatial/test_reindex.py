"""Moving pixels along rows and columns by any map, against indexing on one process."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from spatialdl import shard
from spatialdl.parallel.layout import Bounds
from spatialdl.spatial.reindex import DimMap, Segment, reindex
from spatialdl.spatial.tensor import SpatialTensor
from tests.mpi.equality import check, draw, every_mesh, in_all_dims


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


@in_all_dims(20, 600)
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


@pytest.mark.parametrize("channels_last", [False, True])
def test_rows_and_columns_at_any_dims(channels_last: bool, meshes: dict) -> None:
    rng = random.Random(0)
    for mesh in meshes.values():
        for order in ((0, 2, 3, 1), (3, 0, 1, 2), (2, 1, 0, 3), (0, 3, 1, 2)):

            def turned(x: Tensor, order: tuple[int, ...] = order) -> Tensor:
                x = x.permute(order)
                rows, cols = order.index(2), order.index(3)
                if not isinstance(x, SpatialTensor):
                    return x.flip(rows).narrow(cols, 2, 4)
                layout = x.spatial_layout
                back = DimMap.of([Segment(7, 6, -1)], layout.cuts[0])
                return reindex(turned, x, (back, DimMap.of([Segment(4, 2)], layout.cuts[1])))

            image = draw(rng, {mesh.grid: mesh}).image.new_ones(2, 3, 7, 9).cumsum(3).cumsum(2)
            if channels_last:
                image = image.contiguous(memory_format=torch.channels_last)
            check(turned, image, [], mesh, f"{order} on {mesh.grid}")


def test_what_lies_outside_is_filled(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.ones(1, 1, 5, 6), mesh)
        layout = x.spatial_layout
        rows = DimMap.of([Segment(9, -2)], layout.cuts[0])
        y = reindex(reindex, x, (rows, DimMap.identity(layout.cuts[1])), fill=7.0).full_tensor()
        assert y[0, 0, :, 0].tolist() == [7, 7, 1, 1, 1, 1, 1, 7, 7]


def test_the_identity_is_the_tensor_itself(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.ones(1, 1, 5, 6), mesh)
        assert reindex(reindex, x, tuple(map(DimMap.identity, x.spatial_layout.cuts))) is x


@pytest.mark.parametrize(
    ("bounds", "segments", "output"),
    [
        ((0, 5, 10), [Segment(8, 0)], (0, 5, 8)),
        ((0, 5, 10), [Segment(4, 0)], (0, 2, 4)),
        ((0, 6, 11), [Segment(6, 0, 2)], (0, 3, 6)),
        ((0, 6, 11), [Segment(5, 1, 2)], (0, 3, 5)),
    ],
)
def test_outputs_are_cut_where_inputs_were(
    bounds: Bounds, segments: list[Segment], output: Bounds
) -> None:
    assert DimMap.of(segments, bounds, segments[0].step).bounds == output
