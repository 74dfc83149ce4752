"""Pictures of slides: their tiles drawn, and tiles put together."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from spatialdl.slides.batch.picture import save_overview, save_picture
from spatialdl.slides.batch.preview import Preview
from spatialdl.slides.cutting.tiling import plan_tiles
from spatialdl.slides.finding.regions import Region
from spatialdl.slides.finding.tissue import Tissue, find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

BLUE, RED, ORANGE, GREEN = (30, 80, 220), (220, 30, 30), (240, 150, 0), (0, 150, 60)


def test_tiles_and_outline_are_drawn(tmp_path, synthetic):
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 0.5)
    path, overview = tmp_path / "a.png", tmp_path / "b.png"
    zoom = save_overview(overview, plan.thumbnail, plan.tissue)
    assert zoom == pytest.approx(1152 / 2304)
    places = plan.places
    save_picture(path, overview, zoom, (256, 256), places[2:], places[:1], places[1:2])
    pixels = np.asarray(Image.open(path)).astype(int)
    height, width, _ = plan.thumbnail.image.shape
    assert pixels.shape == (height, width, 3) == (800, 1152, 3)
    frame = 4 * 2 * 256 * zoom
    for colour, frames in [(BLUE, len(plan.places) - 2), (RED, 1), (ORANGE, 1)]:
        count = (pixels == colour).all(-1).sum()
        assert 0.8 * frames * frame < count < 1.1 * frames * frame
    assert (pixels == GREEN).all(-1).sum() > 100
    x, y = (int(n * zoom) + 1 for n in plan.places[0])
    assert pixels[y, x].tolist() == list(RED)


def test_annotations_are_drawn_and_small_pictures_enlarged(tmp_path, synthetic):
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 0.5)
    inner, outer = (np.array([(a, a), (b, a), (b, b)], float) for a, b in [(900, 990), (288, 1440)])
    regions = [Region(outer, (inner,)), Region(outer * 9)]
    save_overview(tmp_path / "a.png", plan.thumbnail, plan.tissue, regions)
    purple = (np.asarray(Image.open(tmp_path / "a.png")) == (140, 0, 200)).all(-1)
    assert purple[144, 150:710].all()  # a pixel spans 2
    assert purple[150:710, 719:721].any(1).all()
    assert purple[450, 455:490].all()
    thumbnail = Thumbnail(np.zeros((30, 40, 3), np.uint8), np.zeros((30, 40), bool), 2.0)
    tissue = Tissue(thumbnail.missing, thumbnail.missing, 0.0)
    assert save_overview(tmp_path / "a.png", thumbnail, tissue) == pytest.approx(800 / 80)
    assert Image.open(tmp_path / "a.png").size == (800, 600)


def test_dark_slides_are_stretched_to_their_tissue(tmp_path):
    image = np.zeros((900, 900, 3), np.uint8)
    image[100:800, 100:400] = (4, 8, 30)
    image[200:220, 200:220] = (4, 8, 60)
    seen = Thumbnail(image, np.zeros((900, 900), bool), 1.0)
    tissue = find_tissue(seen)
    save_overview(tmp_path / "a.png", seen, tissue)
    pixels = np.asarray(Image.open(tmp_path / "a.png"))
    assert tissue.dark
    assert pixels[210, 210, 2] == 255
    assert pixels[500, 250, 2] > 100
    assert pixels[500, 700].max() == 0
    save_overview(tmp_path / "a.png", seen, tissue._replace(dark=False))
    assert np.asarray(Image.open(tmp_path / "a.png"))[210, 210, 2] == 60


GREY = 208


def plain(size: tuple[int, int], colour: int) -> npt.NDArray[np.uint8]:
    return np.full((*size, 3), colour, np.uint8)


@pytest.mark.parametrize(
    ("size", "step", "longest"),
    [
        ((9973, 7001), 513.0, 2048),
        ((1003, 777), 37.3, 300),
        ((1501, 1001), 12.0, 60),  # tiles smaller than a pixel
        ((300, 200), 64.0, 2048),  # not enlarged
    ],
)
def test_tiles_meet_without_gaps(size, step, longest):
    preview = Preview(size, longest)
    zoom = min(1.0, longest / max(size))
    assert preview.pixels.shape == (*(max(1, int(n * zoom + 0.5)) for n in size), 3)
    rows, cols = (int(n / step) + 1 for n in size)  # the last ones reach beyond the slide
    small = preview.shrunk(plain((64, 64), 77), step, step)
    for row, col in product(range(rows), range(cols)):
        preview.paste(col * step, row * step, small)
    assert (preview.pixels == 77).all()


def test_a_tile_covers_its_own_pixels_only():
    step, zoom = 100.7, 0.1
    for x, y in product((0.0, 301.0, 604.2, 906.3), (0.0, 503.5, 905.0)):
        preview = Preview((1000, 1000), 100)
        preview.paste(x, y, preview.shrunk(plain((50, 50), 5), step, step))
        expected = np.full((100, 100), GREY)
        edges = [int(n * zoom + 0.5) for n in (y, y + step, x, x + step)]
        expected[edges[0] : edges[1], edges[2] : edges[3]] = 5
        assert (preview.pixels == expected[..., None]).all()


def test_later_tiles_lie_on_top():
    preview = Preview((100, 200))
    for x, colour in ((0, 10), (32, 20), (180, 30), (-40, 40)):
        preview.paste(x, 0, preview.shrunk(plain((64, 64), colour), 64, 64))
    row = preview.pixels[50, :, 0]
    assert row.tolist() == [40] * 24 + [10] * 8 + [20] * 64 + [GREY] * 84 + [30] * 20
    assert (preview.pixels[64:] == GREY).all()


@pytest.mark.parametrize("size", [(256, 256), (251, 263), (10, 300)])
def test_a_small_tile_is_the_mean_of_areas(size):
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
        assert np.abs(pixels - 127.5).max() < 50  # of three rows one is another
