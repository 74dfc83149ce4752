"""Windows over tiles: a tile alone, plus strips, gives what the whole signal or image gives."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor
from spatialdl.comm.plan import plan_for
from spatialdl.parallel.layout import Layout, Window, even_bounds, needed_boxes, strided_bounds
from spatialdl.spatial.bands import parts_of
from spatialdl.spatial.conv_window import Convolution
from spatialdl.spatial.halo_geometry import Cut, Strip, cut_dim
from spatialdl.spatial.transposed import TransposedConvolution


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
    """Parts without pixels or outputs are left to the copy."""
    tiles, outputs, window = case
    parts = cut_dim(tiles, outputs, window)
    if any(stop == start for bounds in (tiles, outputs) for start, stop in pairwise(bounds)):
        assert parts is None
    assume(parts is not None)
    for cut, tile, output in zip(parts, pairwise(tiles), pairwise(outputs), strict=True):
        start, stop = window.needs(*output)
        reads = range(max(start, 0), min(stop, tiles[-1]))
        assert (cut.before is not None) == any(place < tile[0] for place in reads)
        assert (cut.after is not None) == any(place >= tile[1] for place in reads)


# --- bands of images


def _drawn(seed: int, dims: int) -> tuple[Layout, Layout, tuple[Window, ...]]:
    """A layout, that of the outputs, and windows that PyTorch takes."""
    rng = random.Random(seed)
    windows = tuple(
        Window(kernel, rng.randint(1, 4), rng.randint(0, kernel // 2), rng.randint(1, 2))
        for kernel in (rng.randint(1, 5) for _ in range(dims))
    )
    size = [window.reach + rng.randint(0, 25) for window in windows]
    layout = Layout.even(2, size, [rng.randint(1, 3) for _ in range(dims)])
    out = tuple(w.output_size(n, rng.random() < 0.3) for w, n in zip(windows, size, strict=True))
    return layout, layout.strided([window.stride for window in windows], out), windows


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_tiles_and_bands_give_what_the_whole_image_gives(dims: int) -> None:
    """Every output once; sums of whole numbers, so that every pixel counts, and exactly."""
    for seed in range(20):
        check_bands(dims, seed)


def check_bands(dims: int, seed: int) -> None:
    layout, output, windows = _drawn(seed, dims)
    image = torch.randint(-99, 99, (2, 1, *layout.size)).double()
    wanted = _sums(_around(image, output, windows), windows, [0] * dims)
    for part, (own, outputs) in enumerate(zip(layout.boxes, output.boxes, strict=True)):
        plan = plan_for(layout.boxes, needed_boxes(output, windows), part)
        tile = BoxedTensor(image, layout.whole).view(own)
        arrivals = [
            BoxedTensor(BoxedTensor(image, layout.whole).view(box), box) for _, box in plan.receives
        ]
        parts = parts_of(own, outputs, layout.size, windows)
        found = torch.full((2, 1, *outputs.shape[1:]), torch.nan, dtype=torch.float64)
        times = torch.zeros(outputs.shape[1:])
        assert len(parts.bands) == 2 * dims
        if parts.alone is not None:
            times[parts.alone.outputs] += 1
            alone = _sums(tile, windows, parts.alone.padding)
            assert tuple(alone.shape[2:]) == parts.alone.size
            found[..., *parts.alone.outputs] = alone[..., *parts.alone.computed]
        for band in parts.bands:
            if band is not None:
                band.of(times).add_(1)
                window = band.window(tile, plan, arrivals, 0.0)
                band.of(found).copy_(_sums(window, windows, [0] * dims))
        assert bool((times == 1).all())
        assert torch.equal(found, BoxedTensor(wanted, output.whole).view(outputs))


def _around(image: torch.Tensor, output: Layout, windows: tuple[Window, ...]) -> torch.Tensor:
    """The image with the zeros that the windows of all outputs read around it."""
    padding: list[int] = []
    for window, size, pixels in zip(windows, output.size, image.shape[2:], strict=True):
        _, stop = window.needs(0, size)
        padding = [window.padding, stop - pixels, *padding]
    return F.pad(image, padding)


def _sums(x: torch.Tensor, windows: tuple[Window, ...], padding: object) -> torch.Tensor:
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(windows)]
    ones = torch.ones(1, 1, *(window.kernel for window in windows), dtype=x.dtype)
    strides = [window.stride for window in windows]
    return convolve(x, ones, None, strides, padding, [window.dilation for window in windows])


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
    conv = Convolution((2, 2), (1, 1), 1)
    found = conv.forward(x, weight, None, (padding, padding))
    exact = conv.forward(x.double(), weight.double(), None, (padding, padding))
    assert found.shape[-1] == 1
    _near(found, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_of_one_column_are_enlarged_right_in_half_precision(dtype: torch.dtype) -> None:
    """The gradient of what is enlarged is a convolution with a stride, to one column."""
    torch.manual_seed(0)
    tile = torch.randn(2, 8, 13, 1).to(dtype)
    weight = torch.randn(8, 16, 3, 3).to(dtype)
    up = TransposedConvolution((2, 2), (1, 1), 1, (0, 0), (0, 0, 0, 0), (2, 27, 3))
    grad = torch.randn(2, 16, 27, 3).to(dtype)
    found, of_weight = up.backward(grad, tile, weight, (True, True))
    exact = up.backward(grad.double(), tile.double(), weight.double(), (True, True))
    _near(found, exact[0])
    _near(of_weight, exact[1])


def _near(found: Tensor | None, exact: Tensor | None) -> None:
    assert found is not None
    assert exact is not None
    assert found.shape == exact.shape
    assert float((found.double() - exact).abs().max()) < 0.02 * float(exact.abs().max())
