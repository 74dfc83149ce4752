"""A convolution of the tile alone, plus strips, is the convolution of the whole signal."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spatialdl.parallel.layout import Window, even_bounds, strided_bounds
from spatialdl.spatial.halo_geometry import Cut, Strip, cut_dim


@st.composite
def signals(draw):
    """Sizes, tiles, outputs and window of a convolution in one dim."""
    window = Window(
        draw(st.integers(1, 7)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 6)),
        draw(st.integers(1, 3)),
    )
    size = draw(st.integers(1, 60))
    count = window.output_size(size)
    assume(count >= 1)
    parts = draw(st.integers(1, 5))
    if draw(st.booleans()):
        tiles = even_bounds(size, parts)
        outputs = strided_bounds(tiles, window.stride, count)
    else:
        tiles = draw(cuts(size, parts))
        outputs = draw(cuts(count, parts))
    return tiles, outputs, window


@st.composite
def cuts(draw, size, parts):
    return (0, *sorted(draw(st.integers(0, size)) for _ in range(parts - 1)), size)


def strip_of(signal: Tensor, strip: Strip, tile: tuple[int, int], before: bool) -> Tensor:
    """What travels: pixels of the image within the strip's buffer that are not the tile's."""
    held = signal.new_zeros(1, 1, strip.stop - strip.start)
    for position in range(strip.start, strip.stop):
        outside = position < tile[0] if before else position >= tile[1]
        if outside and 0 <= position < signal.shape[-1]:
            held[..., position - strip.start] = signal[..., position]
    return held


def convolve(x: Tensor, taps: Tensor, window: Window, padding: int) -> Tensor:
    return F.conv1d(x, taps, None, window.stride, padding, window.dilation)


def whole_convolution(size: int, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """A random signal, a kernel, and its convolution."""
    draw = torch.Generator().manual_seed(0)
    signal = torch.randn(1, 1, size, dtype=torch.float64, generator=draw)
    weight = torch.randn(1, 1, window.kernel, dtype=torch.float64, generator=draw)
    return signal, weight, convolve(signal, weight, window, window.padding)


def convolve_tile(
    signal: Tensor, weight: Tensor, cut: Cut, tile: tuple[int, int], window: Window
) -> Tensor:
    alone = convolve(signal[..., tile[0] : tile[1]], weight, window, cut.padding)
    y = alone[..., cut.skip : cut.skip + cut.outputs].clone()
    for strip, before in ((cut.before, True), (cut.after, False)):
        if strip is not None:
            held = strip_of(signal, strip, tile, before)
            y[..., strip.outputs] += convolve(
                held[..., strip.first : strip.last], weight[..., strip.taps], window, padding=0
            )
    return y


@settings(max_examples=250)
@given(signals())
def test_tile_and_strips_give_the_whole_convolution(case):
    tiles, outputs, window = case
    parts = cut_dim(tiles, outputs, window)
    assume(parts is not None)
    signal, weight, whole = whole_convolution(tiles[-1], window)
    for cut, tile, output in zip(parts, pairwise(tiles), pairwise(outputs), strict=True):
        ours = convolve_tile(signal, weight, cut, tile, window)
        torch.testing.assert_close(ours, whole[..., slice(*output)], rtol=0, atol=1e-12)


@given(signals())
def test_the_full_strip_has_all_outputs_and_taps(case):
    """Strips of other dims have it in this one: their outputs are those of the whole signal."""
    tiles, outputs, window = case
    parts = cut_dim(tiles, outputs, window)
    assume(parts is not None)
    signal, weight, whole = whole_convolution(tiles[-1], window)
    for cut, output in zip(parts, pairwise(outputs), strict=True):
        strip = cut.full
        held = strip_of(signal, strip, (tiles[-1], 0), before=True)  # no pixel is the tile's
        taps = weight[..., strip.taps]
        ours = convolve(held[..., strip.first : strip.last], taps, window, padding=0)
        expected = torch.zeros_like(whole[..., slice(*output)])
        expected[..., strip.outputs] += ours
        torch.testing.assert_close(expected, whole[..., slice(*output)], rtol=0, atol=1e-12)
        assert strip.outputs == slice(0, cut.outputs)
        assert strip.taps == slice(0, window.kernel)


@given(signals())
def test_a_strip_is_there_exactly_where_pixels_of_the_image_are_missing(case):
    tiles, outputs, window = case
    parts = cut_dim(tiles, outputs, window)
    assume(parts is not None)
    for cut, tile, output in zip(parts, pairwise(tiles), pairwise(outputs), strict=True):
        start, stop = window.needs(*output)
        assert (cut.before is not None) == any(p < tile[0] for p in range(max(start, 0), stop))
        assert (cut.after is not None) == any(
            p >= tile[1] for p in range(start, min(stop, tiles[-1]))
        )


@given(signals())
def test_parts_without_pixels_or_outputs_are_left_to_the_copy(case):
    tiles, outputs, window = case
    if any(stop == start for bounds in (tiles, outputs) for start, stop in pairwise(bounds)):
        assert cut_dim(tiles, outputs, window) is None


def test_ordinary_convolutions_are_not_odd():
    for window in (Window(3, 1, 1), Window(7, 2, 3), Window(1, 2), Window(3, 1, 2, 2)):
        for size in (32, 70, 93):
            for parts in (2, 3, 4):
                tiles = even_bounds(size, parts)
                outputs = strided_bounds(tiles, window.stride, window.output_size(size))
                assert cut_dim(tiles, outputs, window) is not None


def test_a_strip_may_hold_pixels_that_its_outputs_do_not_read():
    """The one output of tile [1, 2) reads pixels -1 and 2; pixel 0 came along with the box."""
    _, middle, _ = cut_dim((0, 1, 2, 3), (0, 1, 2, 4), Window(2, 1, 2, 3))
    assert (middle.before.start, middle.before.stop) == (-1, 1)
    assert (middle.before.first, middle.before.last) == (0, 1)


def test_a_three_tap_filter_keeps_one_pixel_a_side():
    left, right = cut_dim((0, 8, 16), (0, 8, 16), Window(3, 1, 1))
    assert (left.padding, left.skip, left.before) == (1, 0, None)
    assert (left.after.start, left.after.stop) == (8, 9)
    assert (right.before.start, right.before.stop, right.after) == (7, 8, None)
    assert (right.before.outputs, right.before.taps) == (slice(0, 1), slice(0, 1))
