from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from spatialdl.slides.batch.preview import Preview, Small, preview_name

GREY = 208


def plain(size: tuple[int, int], colour: int) -> npt.NDArray[np.uint8]:
    return np.full((*size, 3), colour, np.uint8)


@pytest.mark.parametrize(
    ("size", "step", "longest"),
    [
        ((9973, 7001), 513.0, 2048),
        ((9973, 7001), 255.7, 511),
        ((1003, 777), 37.3, 300),
        ((1501, 1001), 12.0, 60),  # tiles smaller than a pixel
        ((300, 200), 64.0, 2048),  # not enlarged
        ((1, 1), 1.0, 2048),
    ],
)
def test_tiles_meet_without_gaps(size: tuple[int, int], step: float, longest: int) -> None:
    preview = Preview(size, longest)
    zoom = min(1.0, longest / max(size))
    assert preview.pixels.shape == (*(max(1, int(n * zoom + 0.5)) for n in size), 3)
    rows, cols = (int(n / step) + 1 for n in size)  # the last ones reach beyond the slide
    small = preview.shrunk(plain((64, 64), 77), step, step)
    for row, col in product(range(rows), range(cols)):
        preview.paste(col * step, row * step, small)
    assert (preview.pixels == 77).all()


def test_a_tile_covers_its_own_pixels_only() -> None:
    step, zoom = 100.7, 0.1
    for x, y in product((0.0, 301.0, 604.2, 906.3), (0.0, 503.5, 905.0)):
        preview = Preview((1000, 1000), 100)
        preview.paste(x, y, preview.shrunk(plain((50, 50), 5), step, step))
        expected = np.full((100, 100), GREY)
        edges = [int(n * zoom + 0.5) for n in (y, y + step, x, x + step)]
        expected[edges[0] : edges[1], edges[2] : edges[3]] = 5
        assert (preview.pixels == expected[..., None]).all()


def test_a_place_with_a_pixel_more_is_filled() -> None:
    preview = Preview((100, 100))
    preview.paste(-1, 90, Small(plain((8, 9), 5), 10, 10))
    expected = np.full((100, 100), GREY)
    expected[90:, :9] = 5
    assert (preview.pixels == expected[..., None]).all()
    preview.paste(500, -500, Small(plain((8, 9), 6), 10, 10))  # outside
    assert (preview.pixels == expected[..., None]).all()


def test_later_tiles_lie_on_top() -> None:
    preview = Preview((100, 200))
    for x, colour in ((0, 10), (32, 20), (180, 30), (-40, 40)):
        preview.paste(x, 0, preview.shrunk(plain((64, 64), colour), 64, 64))
    row = preview.pixels[50, :, 0]
    assert row.tolist() == [40] * 24 + [10] * 8 + [20] * 64 + [GREY] * 84 + [30] * 20
    assert (preview.pixels[64:] == GREY).all()


@pytest.mark.parametrize("size", [(256, 256), (251, 263), (1024, 768), (10, 300)])
def test_a_small_tile_is_the_mean_of_areas(size: tuple[int, int]) -> None:
    ramp = np.add.outer(np.linspace(0, 120, size[0]), np.linspace(0, 120, size[1]))
    image = np.stack([ramp, 255 - ramp, ramp / 2], -1).round().astype(np.uint8)
    small = Preview((4000, 4000), 400).shrunk(image, 256, 256)
    assert small.pixels.shape == (26, 26, 3)
    exact = np.asarray(Image.fromarray(image).resize((26, 26), Image.Resampling.BOX)).astype(int)
    assert np.abs(small.pixels - exact).max() <= 6  # of 120 over 26 pixels
    for stripes in (np.s_[::2], np.s_[:, ::2]):
        image = plain(size, 0)
        image[stripes] = 255
        pixels = Preview((4000, 4000), 64).shrunk(image, 256, 256).pixels
        assert pixels.shape == (5, 5, 3)
        assert np.abs(pixels - 127.5).max() < 50  # of three rows one is another


def test_previews_are_saved(tmp_path: Path) -> None:
    preview = Preview((100, 300))
    colours = np.zeros((100, 100, 3), np.uint8)
    colours[..., 0] = 200
    preview.paste(100, 0, preview.shrunk(colours, 100, 100))
    path = tmp_path / "pictures" / preview_name("a.b")
    assert path.name == "a.b.stitched.jpg"
    for where, kind, off in ((path, "JPEG", 6), (tmp_path / "a.png", "PNG", 0)):
        preview.save(where)
        with Image.open(where) as image:
            assert image.format == kind
            seen = np.asarray(image).astype(int)
        assert seen.shape == (100, 300, 3)
        assert np.abs(seen[50, 150] - (200, 0, 0)).max() <= off
        assert np.abs(seen[50, 50] - GREY).max() <= off
    assert list(path.parent.iterdir()) == [path]


def test_a_preview_has_pixels() -> None:
    for size, longest in [((0, 5), 9), ((5, 5), 0)]:
        with pytest.raises(ValueError, match="preview"):
            Preview(size, longest)
