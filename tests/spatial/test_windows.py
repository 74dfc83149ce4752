"""Windows over tiles: a tile alone, plus strips, gives what the whole signal or image gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spatialdl.layout.layout import Window, even_bounds, strided_bounds
from spatialdl.spatial.halo_geometry import Cut, Strip, cut_dim
from spatialdl.spatial.transposed import TransposedConvolution
from spatialdl.spatial.window_function import Convolution


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


@settings(max_examples=120)
@example(((0, 1, 2, 3), (0, 1, 2, 4), Window(2, 1, 2, 3)))  # [1, 2) reads -1 and 2, and gets 0 too
@given(signals())
def test_tile_and_strips_give_the_whole_convolution(case):
    tiles, outputs, window = case
    parts = cut_dim(tiles, outputs, window)
    assume(parts is not None)
    signal, weight, whole = whole_convolution(tiles[-1], window)
    for cut, tile, output in zip(parts, pairwise(tiles), pairwise(outputs), strict=True):
        ours = convolve_tile(signal, weight, cut, tile, window)
        torch.testing.assert_close(ours, whole[..., slice(*output)], rtol=0, atol=1e-12)


# --- strips of one output

NARROW = [(13, width, kernel, 0) for width, kernel in ((2, 2), (3, 3), (4, 3))] + [(13, 1, 3, 1)]


@pytest.mark.parametrize(
    ("case", "channels", "dtype"),
    [
        (case, channels, dtype)
        for case in NARROW
        for channels, dtype in ((3, torch.float16), (16, torch.bfloat16))
    ],
)
def test_strips_of_one_output_are_right_in_half_precision(
    case: tuple[int, int, int, int], channels: int, dtype: torch.dtype
) -> None:
    """On CPUs with AMX a convolution with a stride gave anything at all for one column."""
    height, width, kernel, padding = case
    torch.manual_seed(0)
    x = torch.randn(2, channels, height, width).to(dtype)
    weight = torch.randn(4, channels, kernel, kernel).to(dtype)
    conv = Convolution((2, 2), (1, 1), 1, (padding, padding))
    found = conv.forward(x, weight, None)
    exact = conv.forward(x.double(), weight.double(), None)
    assert found.shape[-1] == 1
    _near(found, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_of_one_column_are_enlarged_right_in_half_precision(dtype: torch.dtype) -> None:
    """The gradient of what is enlarged is a convolution with a stride, to one column."""
    torch.manual_seed(0)
    tile = torch.randn(2, 8, 13, 1).to(dtype)
    weight = torch.randn(8, 16, 3, 3).to(dtype)
    up = TransposedConvolution((2, 2), (1, 1), 1, (0, 0), (0, 0, 0, 0))
    grad = torch.randn(2, 16, 27, 3).to(dtype)
    needs = (True, True, False)
    found, of_weight, _ = up.backward(grad, tile, weight, needs)
    exact = up.backward(grad.double(), tile.double(), weight.double(), needs)
    _near(found, exact[0])
    _near(of_weight, exact[1])


def _near(found: Tensor | None, exact: Tensor | None) -> None:
    assert found is not None
    assert exact is not None
    assert found.shape == exact.shape
    assert float((found.double() - exact).abs().max()) < 0.02 * float(exact.abs().max())
