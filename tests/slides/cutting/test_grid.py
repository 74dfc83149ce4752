from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.slides.cutting.grid import EDGES, TileGrid, _fitting, tile_starts


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.3, 15), st.integers(0, 2**32 - 1))
def test_fractions_are_exact_parts_of_tiles(rows: int, cols: int, step: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    mask = random.random((rows, cols)) < 0.5
    extent = rows - random.uniform(0, 0.9), cols - random.uniform(0, 0.9)
    starts = tuple(np.sort(random.uniform(0, length, 4)) for length in extent)
    fractions = TileGrid((starts[0], starts[1]), step, extent).fractions(mask)
    for i, row in enumerate(starts[0]):
        for j, col in enumerate(starts[1]):
            down, across = (
                np.clip(np.minimum(first + step, most) - np.arange(count), 0, 1)
                - np.clip(first - np.arange(count), 0, 1)
                for first, count, most in ((row, rows, extent[0]), (col, cols, extent[1]))
            )
            area = [step if side < 0.99 * step else side for side in (down.sum(), across.sum())]
            assert fractions[i, j] == pytest.approx(down @ mask @ across / np.prod(area), abs=2e-6)


def test_a_tile_of_nothing_but_tissue_has_all_of_it() -> None:
    starts = np.arange(30) * 7.3
    tiles = TileGrid((starts, starts), 7.3, (219.0, 218.95))
    assert (tiles.fractions(np.ones((219, 219), bool)) == 1).all()


@given(st.integers(20, 900), st.integers(1, 64), st.integers(0, 63), st.floats(1, 5), st.booleans())
def test_tiles_that_overlap_fit_as_often_as_they_can(
    length: int, tile: int, overlap: int, scale: float, beyond: bool
) -> None:
    overlap = min(overlap, tile - 1)
    step, stride = tile * scale, (tile - overlap) * scale
    over = 0.01 * step if beyond else 0.0  # that a tile may lie beyond the edge
    count = _fitting(length, step - over, stride)
    if count:
        assert (count - 1) * stride + step <= length + over + 1e-3 * step
    assert count * stride + step > length + over - 1e-3 * step


@given(
    st.integers(20, 900),
    st.integers(1, 64),
    st.integers(0, 63),
    st.sampled_from([1.0, 2.0, 4.0, 1.37, 3.9997]),
)
def test_padded_and_moved_tiles_reach_the_edge(
    length: int, tile: int, overlap: int, scale: float
) -> None:
    step, stride = tile * scale, (tile - min(overlap, tile - 1)) * scale
    spans, needed = (step, stride, scale), 0.99 * step
    drop, pad, shift = (tile_starts(length, needed, spans, edge) for edge in EDGES)
    assert drop.tolist() == pad[: len(drop)].tolist() == shift[: len(drop)].tolist()
    assert len(pad) - len(drop) in (0, 1)
    assert pad[-1] < length
    assert length - (pad[-1] + step) < max(scale, 0.01 * step + 1e-6)
    if len(drop):
        assert shift[-1] + step <= length + 0.01 * step + 1e-6
        assert length - (shift[-1] + step) < max(scale, 1.0)
        assert (np.diff(shift) > 0).all()
        assert (np.diff(shift) <= stride + 1e-6).all()
        if scale in (1, 2, 4):
            assert (shift % scale == 0).all()
    else:
        assert len(shift) == 0
    assert length - (drop[-1] + step if len(drop) else 0) >= scale or len(pad) == len(drop)


def test_shares_are_of_the_slide_and_of_its_tissue() -> None:
    mask = np.zeros((11, 10), bool)
    mask[4:11, 2:8] = True  # the slide ends in the middle of the last row
    tiles = TileGrid((np.array([0.0, 4.0]), np.array([0.0, 3.0])), 4.0, (10.5, 10.0))
    part, outside = tiles.shares(mask)
    assert part == pytest.approx(6.5 * 6 / 105)
    assert outside == pytest.approx(1 - 4 * 5 / (6.5 * 6), abs=1e-6)
    assert TileGrid((np.array([]), np.array([0.0])), 4.0, (10.5, 10.0)).shares(mask)[1] == 1
    assert tiles.shares(np.zeros_like(mask)) == (0, 0)
