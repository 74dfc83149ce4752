from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from spatialdl.layout.layout import (
    LOPSIDED,
    Box,
    Layout,
    Window,
    even_bounds,
    finer_parts,
    nearly_cubic,
    scaled_bounds,
    strided_bounds,
)

sizes = st.integers(1, 60)
parts = st.integers(1, 7)
starts, ends = st.integers(-3, 2), st.integers(0, 4)  # now and then a box is empty


@st.composite
def boxes(draw, dims=None):
    """Of one to three spatial dims, now and then empty."""
    dims = draw(st.integers(1, 3)) if dims is None else dims
    return Box((draw(starts), draw(ends)) for _ in range(1 + dims))


@st.composite
def two_boxes(draw):
    dims = draw(st.integers(1, 3))
    return draw(boxes(dims)), draw(boxes(dims))


@st.composite
def windows(draw, max_dilation=3):
    kernel = draw(st.integers(1, 7))
    return Window(
        kernel,
        draw(st.integers(1, 5)),
        draw(st.integers(0, kernel // 2)),
        draw(st.integers(1, max_dilation)),
    )


@st.composite
def layouts(draw):
    """A layout of one to three spatial dims, as it is after some strided operations."""
    dims = draw(st.integers(1, 3))
    size = draw(st.tuples(*[st.integers(1, (60, 60, 12)[dims - 1])] * dims))
    layout = Layout.even(draw(st.integers(1, 3)), size, draw(st.tuples(*[parts] * dims)))
    for _ in range(draw(st.integers(0, 4))):
        stride = draw(st.tuples(*[st.integers(1, 4)] * dims))
        smaller = [
            max(1, -(-pixels // step) + draw(st.integers(-1, 1)))
            for pixels, step in zip(layout.size, stride, strict=True)
        ]
        layout = layout.strided(stride, smaller)
    return layout


@given(sizes, parts)
def test_even_bounds_partition_the_dim_and_differ_by_at_most_one_pixel(size, count):
    bounds = even_bounds(size, count)
    extents = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(extents)) == (0, size, count)
    assert max(extents) - min(extents) <= 1
    assert min(extents) >= 0


@given(layouts())
def test_boxes_partition_the_image_in_row_major_order(layout):
    owners = torch.zeros(layout.samples, *layout.size, dtype=torch.int64)
    for box in layout.boxes:
        owners[box.slices_in(layout.whole)] += 1
    assert bool((owners == 1).all())
    assert len(layout.boxes) == prod(layout.grid)
    for part, box in enumerate(layout.boxes):
        place = tuple(int(number) for number in np.unravel_index(part, layout.grid))
        assert layout.part_at(part) == place
        assert box[0] == (0, layout.samples)
        for interval, number, bounds in zip(box.spatial, place, layout.cuts, strict=True):
            assert interval == bounds[number : number + 2]


@given(sizes, parts, st.lists(st.integers(1, 4), max_size=5))
def test_strided_layouts_stay_balanced(size, count, strides):
    bounds = even_bounds(size, count)
    for stride in strides:
        size = -(-size // stride)
        bounds = strided_bounds(bounds, stride, size)
        extents = [stop - start for start, stop in pairwise(bounds)]
        assert (bounds[0], bounds[-1], len(extents)) == (0, size, count)
        assert min(extents) >= 0
        assert max(extents) <= LOPSIDED * -(-size // count)


def test_an_output_goes_where_its_input_pixel_is():
    assert strided_bounds((0, 35, 70), 2, 35) == (0, 18, 35)  # output 17 reads pixel 34
    assert strided_bounds((0, 23, 46, 70), 1, 70) == (0, 23, 46, 70)


def test_a_lopsided_layout_is_rebalanced():
    assert strided_bounds((0, 4, 12), 1, 12) == (0, 6, 12)
    assert strided_bounds((0, 5, 12), 1, 12) == (0, 5, 12)  # 7 is within a quarter of 6


def test_describe_names_grid_and_size():
    assert Layout.even(4, (70, 93), (2, 1)).describe() == "2x1 over 70x93"
    assert Layout.even(4, (9, 70, 93), (1, 2, 1)).describe() == "1x2x1 over 9x70x93"


@given(sizes, windows(), st.data())
def test_needs_are_the_pixels_on_which_the_outputs_depend(size, window, data):
    count = window.output_size(size)
    assume(count >= 1)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    x = torch.zeros(1, 1, size + 2 * window.padding, requires_grad=True)  # padding made visible
    y = F.conv1d(x, torch.ones(1, 1, window.kernel), stride=window.stride, dilation=window.dilation)
    y[..., start:stop].sum().backward()
    used = x.grad.flatten().nonzero().flatten() - window.padding
    assert window.needs(start, stop) == (int(used[0]), int(used[-1]) + 1)


@given(layouts(), st.data())
def test_scaled_layouts_partition_the_output_and_are_never_lopsided(layout, data):
    scale = [data.draw(st.integers(1, 4)) for _ in layout.cuts]
    size = tuple(
        max(1, n * factor + data.draw(st.integers(-3, 3)))
        for n, factor in zip(layout.size, scale, strict=True)
    )
    scaled = layout.scaled(scale, size)
    assert (scaled.batch, scaled.size) == (layout.batch, size)
    for bounds, n, count in zip(scaled.cuts, size, scaled.grid, strict=True):
        extents = [stop - start for start, stop in pairwise(bounds)]
        assert min(extents) >= 0
        assert max(extents) <= LOPSIDED * -(-n // count)


@given(st.integers(1, 8), parts, st.integers(1, 4), st.integers(1, 4))
def test_down_and_up_again_meet_on_the_same_cut(unit, count, down, up):
    """As a U-Net does on sizes that can be halved as often as it halves them."""
    bounds = even_bounds(unit * count * down * up, count)
    small = strided_bounds(bounds, down, unit * count * up)
    smaller = strided_bounds(small, up, unit * count)
    assert scaled_bounds(smaller, up, unit * count * up) == small
    assert scaled_bounds(small, down, bounds[-1]) == bounds


def test_scaled_bounds_end_where_the_output_ends():
    assert scaled_bounds((0, 3, 6), 2, 12) == (0, 6, 12)
    assert scaled_bounds((0, 3, 5), 2, 11) == (0, 6, 11)
    assert scaled_bounds((0, 1, 2, 2), 3, 5) == (0, 1, 3, 5)  # cut anew: (0, 3, 5, 5) is lopsided


@given(sizes, windows(), st.data())
def test_transposed_needs_are_the_pixels_on_which_the_outputs_depend(size, window, data):
    count = window.transposed_size(size)
    assume(count >= 1)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    x = torch.zeros(1, 1, size, requires_grad=True)
    weight = torch.ones(1, 1, window.kernel)
    y = F.conv_transpose1d(x, weight, None, window.stride, window.padding, 0, 1, window.dilation)
    y[..., start:stop].sum().backward()
    used = x.grad.flatten().nonzero().flatten().tolist()
    first, last = window.transposed_needs(start, stop, size)
    assert 0 <= first <= last <= size
    assert all(first <= pixel < last for pixel in used)
    if window.dilation == 1:  # else pixels between the taps are counted in
        assert (first, last) == ((used[0], used[-1] + 1) if used else (0, 0))


def pixels(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(*interval) for interval in box)))


@given(two_boxes())
def test_boxes_are_sets_of_pixels(both):
    one, other = both
    common, own, theirs = one.intersect(other), pixels(one), pixels(other)
    assert pixels(common) == own & theirs
    assert common.is_empty == (not own & theirs)
    left = [pixel for box in one.without(other) for pixel in pixels(box)]
    assert len(left) == len(set(left))
    assert set(left) == own - theirs
    assert not any(box.is_empty for box in one.without(other))
    if one.is_empty:
        return
    outer = Box(
        (min(start, first), max(stop, last))
        for (start, stop), (first, last) in zip(one, other, strict=True)
    )
    where = {pixel: number for number, pixel in enumerate(sorted(pixels(outer)))}
    found = torch.arange(len(where)).view(outer.shape)[one.slices_in(outer)]
    assert found.shape == one.shape
    assert found.flatten().tolist() == [where[pixel] for pixel in sorted(own)]


@pytest.mark.parametrize(
    ("ranks", "grid"), [(1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (3, 2)), (12, (3, 2, 2))]
)
def test_grids_are_as_square_as_can_be(ranks, grid):
    assert nearly_cubic(ranks, len(grid)) == grid


def test_boxes_of_other_dims_are_not_compared():
    image, volume = Box([(0, 1), (0, 4), (0, 5)]), Box([(0, 1), (0, 4), (0, 5), (0, 6)])
    for compared in (Box.intersect, Box.without, Box.slices_in):
        for pair in ((image, volume), (volume, image)):
            with pytest.raises(ValueError, match="zip"):
                compared(*pair)
    with pytest.raises(ValueError, match="zip"):
        finer_parts((2, 1), (3, 4, 1), 0)
    with pytest.raises(ValueError, match="zip"):
        Layout.even(1, (4, 5), (2, 1)).scaled((2, 2, 2), (8, 10))


def test_another_number_of_pixels_along_one_dim_is_cut_evenly():
    layout = Layout((0, 2), ((0, 1, 7), (0, 5)))
    assert layout.resized(0, 7) is layout
    assert layout.resized(0, 9) == Layout((0, 2), ((0, 4, 9), (0, 5)))


@given(
    st.lists(st.tuples(sizes, st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_parts_of_a_finer_layout_make_up_those_of_the_coarser(dims, samples):
    size, grid, factors = zip(*dims, strict=True)
    tiles = [parts * factor for parts, factor in zip(grid, factors, strict=True)]
    fine = Layout.even(samples, size, tiles)
    coarse = fine.coarser(factors)
    assert (coarse.grid, coarse.size, coarse.samples) == (grid, tuple(size), samples)
    seen = []
    for part, box in enumerate(coarse.boxes):
        own = finer_parts(grid, factors, part)
        assert list(own) == sorted(own)
        seen += own
        places = [place for one in own for place in pixels(fine.boxes[one])]
        assert len(places) == len(set(places))
        assert set(places) == pixels(box)
    assert sorted(seen) == list(range(prod(tiles)))


def test_what_was_rebalanced_is_as_coarse_as_it_is_fine():
    """The bounds of the coarser layout are some of the finer one's, even or not."""
    layout = Layout((0, 2), ((0, 3, 4, 9, 13), (0, 5, 6)))
    assert layout.coarser((2, 1)) == Layout((0, 2), ((0, 4, 13), (0, 5, 6)))
    assert layout.coarser((4, 2)) == Layout((0, 2), ((0, 13), (0, 6)))
    with pytest.raises(ValueError, match="shorter"):
        layout.coarser((2,))
