from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from spatialdl.layout import (
    EMPTY_BOX,
    LOPSIDED,
    Box,
    Layout,
    Window,
    even_bounds,
    needed_boxes,
    scaled_bounds,
    strided_bounds,
    transposed_boxes,
)

sizes = st.integers(1, 60)
parts = st.integers(1, 7)
starts, ends = st.integers(-3, 2), st.integers(0, 4)  # now and then a box is empty
boxes = st.builds(Box, starts, ends, starts, ends, starts, ends)


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
    """A layout as it is after some strided operations."""
    size = draw(st.tuples(st.integers(1, 3), sizes, sizes))
    layout = Layout.even(size, (draw(parts), draw(parts)))
    for _ in range(draw(st.integers(0, 4))):
        stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
        smaller = [
            max(1, -(-pixels // step) + draw(st.integers(-1, 1)))
            for pixels, step in zip(layout.size[1:], stride, strict=True)
        ]
        layout = layout.strided(stride, (smaller[0], smaller[1]))
    return layout


@given(sizes, parts)
def test_even_bounds_partition_the_dim_and_differ_by_at_most_one_pixel(size, count):
    bounds = even_bounds(size, count)
    extents = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(extents)) == (0, size, count)
    assert max(extents) - min(extents) <= 1
    assert min(extents) >= 0


def test_even_bounds_are_the_documented_formula():
    assert even_bounds(10, 3) == (0, 3, 6, 10)
    assert even_bounds(2, 4) == (0, 0, 1, 1, 2)


@given(layouts())
def test_boxes_partition_the_image_in_row_major_order(layout):
    samples, height, width = layout.size
    owners = torch.zeros(samples, height, width, dtype=torch.int64)
    for box in layout.boxes:
        batch, rows, cols = box.slices_in(layout.whole)
        owners[batch, rows, cols] += 1
    assert bool((owners == 1).all())
    rows, cols = layout.grid
    assert len(layout.boxes) == rows * cols
    for part, box in enumerate(layout.boxes):
        row, col = divmod(part, cols)
        assert (box.row0, box.row1) == layout.rows[row : row + 2]
        assert (box.col0, box.col1) == layout.cols[col : col + 2]
        assert (box.batch0, box.batch1) == (0, samples)


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


def test_the_same_cut_comes_out_whatever_led_to_it():
    layout = Layout.even((2, 70, 93), (2, 2))
    conv = layout.strided((2, 2), (35, 47))
    assert conv == layout.strided((2, 2), (35, 47))
    assert hash(conv) == hash(Layout(conv.batch, conv.rows, conv.cols))


def test_describe_names_grid_and_size():
    assert Layout.even((4, 70, 93), (2, 1)).describe() == "2x1 over 70x93"


@given(sizes, windows(), st.booleans())
def test_output_size_is_pytorchs(size, window, ceil_mode):
    assume(size + 2 * window.padding >= window.reach)
    pooled = F.max_pool1d(
        torch.zeros(1, 1, size),
        window.kernel,
        window.stride,
        window.padding,
        window.dilation,
        ceil_mode,
    )
    assert window.output_size(size, ceil_mode) == pooled.shape[-1]
    if not ceil_mode:
        weight = torch.zeros(1, 1, window.kernel)
        convolved = F.conv1d(
            torch.zeros(1, 1, size), weight, None, window.stride, window.padding, window.dilation
        )
        assert window.output_size(size) == convolved.shape[-1]


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


@given(layouts(), st.integers(1, 4), st.integers(1, 4), st.data())
def test_scaled_layouts_partition_the_output_and_are_never_lopsided(layout, rows, cols, data):
    sizes_up = (layout.size[1] * rows, layout.size[2] * cols)
    size = tuple(max(1, n + data.draw(st.integers(-3, 3))) for n in sizes_up)
    scaled = layout.scaled((rows, cols), size)
    assert (scaled.batch, scaled.size[1:]) == (layout.batch, size)
    for bounds, n, count in zip((scaled.rows, scaled.cols), size, scaled.grid, strict=True):
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


@given(sizes, windows(), st.integers(0, 3))
def test_the_transposed_size_is_pytorchs(size, window, extra):
    assume(extra < max(window.stride, window.dilation))
    assume(window.transposed_size(size, extra) >= 1)
    weight = torch.zeros(1, 1, window.kernel)
    y = F.conv_transpose1d(
        torch.zeros(1, 1, size),
        weight,
        None,
        window.stride,
        window.padding,
        extra,
        1,
        window.dilation,
    )
    assert window.transposed_size(size, extra) == y.shape[-1]


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


@given(windows(), st.integers(0, 9))
def test_an_empty_output_needs_nothing(window, start):
    assert window.needs(start, start) == (0, 0)
    assert window.transposed_needs(start, start, 9) == (0, 0)


@given(layouts(), windows(), windows())
def test_transposed_boxes_lie_inside_the_image(layout, rows, cols):
    size = [
        window.transposed_size(n) for window, n in zip((rows, cols), layout.size[1:], strict=True)
    ]
    assume(min(size) >= 1)
    output = layout.scaled((rows.stride, cols.stride), (size[0], size[1]))
    needed = transposed_boxes(layout, output, rows, cols)
    assert len(needed) == len(output.boxes)
    for box, need in zip(output.boxes, needed, strict=True):
        assert need.is_empty or need == need.intersect(layout.whole)
        if box.is_empty:
            assert need == EMPTY_BOX
        elif not need.is_empty:
            height, width = layout.size[1:]
            assert (need.row0, need.row1) == rows.transposed_needs(box.row0, box.row1, height)
            assert (need.col0, need.col1) == cols.transposed_needs(box.col0, box.col1, width)


def test_doubling_with_a_kernel_of_two_needs_the_own_tile_only():
    layout = Layout.even((1, 35, 22), (2, 2))
    output = layout.scaled((2, 2), (70, 44))
    assert transposed_boxes(layout, output, Window(2, 2), Window(2, 2)) == layout.boxes


@given(layouts(), windows(), windows())
def test_needed_boxes_are_the_windows_of_the_boxes_and_empty_for_empty_outputs(layout, rows, cols):
    needed = needed_boxes(layout, rows, cols)
    assert len(needed) == len(layout.boxes)
    for box, need in zip(layout.boxes, needed, strict=True):
        if box.is_empty:
            assert need == EMPTY_BOX
        else:
            assert (need.batch0, need.batch1) == (box.batch0, box.batch1)
            assert (need.row0, need.row1) == rows.needs(box.row0, box.row1)
            assert (need.col0, need.col1) == cols.needs(box.col0, box.col1)


def pixels(box: Box) -> set[tuple[int, int, int]]:
    return {
        (n, row, col)
        for n in range(box.batch0, box.batch1)
        for row in range(box.row0, box.row1)
        for col in range(box.col0, box.col1)
    }


@given(boxes, boxes)
def test_intersect_is_the_intersection_of_the_pixels(one, other):
    common = one.intersect(other)
    assert pixels(common) == pixels(one) & pixels(other)
    assert common.is_empty == (not pixels(common))


@given(boxes, boxes)
def test_without_leaves_every_other_pixel_once(one, other):
    left = [pixel for box in one.without(other) for pixel in pixels(box)]
    assert len(left) == len(set(left))
    assert set(left) == pixels(one) - pixels(other)
    assert not any(box.is_empty for box in one.without(other))


@given(boxes)
def test_shape_counts_the_pixels(box):
    samples, rows, cols = box.shape
    assert samples * rows * cols == len(pixels(box))
    assert min(box.shape) >= 0


@given(boxes, boxes)
def test_slices_in_find_a_box_within_another(one, other):
    outer = Box(
        min(one.batch0, other.batch0),
        max(one.batch1, other.batch1),
        min(one.row0, other.row0),
        max(one.row1, other.row1),
        min(one.col0, other.col0),
        max(one.col1, other.col1),
    )
    assume(not one.is_empty)
    where = {pixel: number for number, pixel in enumerate(sorted(pixels(outer)))}
    batch, rows, cols = one.slices_in(outer)
    found = torch.arange(len(where)).view(outer.shape)[batch, rows, cols]
    assert found.shape == one.shape
    assert found.flatten().tolist() == [where[pixel] for pixel in sorted(pixels(one))]


def test_the_empty_box_is_empty():
    assert EMPTY_BOX.is_empty
    assert EMPTY_BOX.shape == (0, 0, 0)


@pytest.mark.parametrize(("outputs", "expected"), [((0, 1), (-3, 4)), ((5, 8), (7, 18))])
def test_needs_of_a_seven_by_seven_stem(outputs, expected):
    assert Window(7, 2, 3).needs(*outputs) == expected
