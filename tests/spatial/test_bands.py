from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from spatialdl.comm.boxed import BoxedTensor
from spatialdl.comm.plan import plan_for
from spatialdl.parallel.layout import Layout, Window, needed_boxes
from spatialdl.spatial.bands import parts_of


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


@pytest.mark.parametrize(("dims", "seed"), list(product((1, 2, 3), range(40))))
def test_every_output_comes_once(dims: int, seed: int) -> None:
    layout, output, windows = _drawn(seed, dims)
    for own, outputs in zip(layout.boxes, output.boxes, strict=True):
        times = torch.zeros(outputs.shape[1:])
        parts = parts_of(own, outputs, layout.size, windows)
        assert len(parts.bands) == 2 * dims
        if parts.alone is not None:
            times[parts.alone.outputs] += 1
        for band in parts.bands:
            if band is not None:
                band.of(times).add_(1)
        assert bool((times == 1).all())


@pytest.mark.parametrize(("dims", "seed"), list(product((1, 2, 3), range(40))))
def test_tiles_and_bands_give_what_the_whole_image_gives(dims: int, seed: int) -> None:
    """Sums over windows of whole numbers, so that every pixel counts, and exactly."""
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
        found = torch.full((2, 1, *outputs.shape[1:]), float("nan"), dtype=torch.float64)
        if parts.alone is not None:
            given = _sums(tile, windows, parts.alone.padding)
            assert tuple(given.shape[2:]) == parts.alone.size
            found[..., *parts.alone.outputs] = given[..., *parts.alone.computed]
        for band in parts.bands:
            if band is not None:
                window = band.window(tile, plan, arrivals, 0.0)
                band.of(found).copy_(_sums(window, windows, [0] * dims))
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
