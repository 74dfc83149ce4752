from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spatialdl.slides.batch.picture import save_overview, save_picture
from spatialdl.slides.cutting.tiling import plan_tiles
from spatialdl.slides.finding.regions import Region
from spatialdl.slides.finding.tissue import Tissue, find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

BLUE, RED, ORANGE, GREEN = (30, 80, 220), (220, 30, 30), (240, 150, 0), (0, 150, 60)


def test_tiles_and_outline_are_drawn(tmp_path: Path, synthetic: dict[str, Path]) -> None:
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


def test_frames_at_the_edge_are_whole(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 1610, 0.5, 0.0)  # by 0.6 % too large
    zoom = save_overview(tmp_path / "b.png", plan.thumbnail, plan.tissue)
    save_picture(tmp_path / "a.png", tmp_path / "b.png", zoom, (plan.step, plan.step), plan.places)
    pixels = np.asarray(Image.open(tmp_path / "a.png"))
    right = round(1610 * zoom) - 1
    for line in (pixels[0, :right], pixels[-1, :right], pixels[:, 0], pixels[:, right - 1]):
        assert (line == BLUE).all(-1).mean() > 0.99


def test_annotations_are_drawn(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 0.5)
    inner, outer = (np.array([(a, a), (b, a), (b, b)], float) for a, b in [(900, 990), (288, 1440)])
    regions = [Region(outer, (inner,)), Region(outer * 9)]
    save_overview(tmp_path / "a.png", plan.thumbnail, plan.tissue, regions)
    pixels = np.asarray(Image.open(tmp_path / "a.png"))
    purple = (pixels == (140, 0, 200)).all(-1)
    assert purple[144, 150:710].all()  # a pixel spans 2
    assert purple[150:710, 719:721].any(1).all()
    assert purple[450, 455:490].all()


def test_small_pictures_are_enlarged(tmp_path: Path) -> None:
    thumbnail = Thumbnail(np.zeros((30, 40, 3), np.uint8), np.zeros((30, 40), bool), 2.0)
    tissue = Tissue(thumbnail.missing, thumbnail.missing, 0.0)
    assert save_overview(tmp_path / "a.png", thumbnail, tissue) == pytest.approx(800 / 80)
    assert Image.open(tmp_path / "a.png").size == (800, 600)


def test_dark_slides_are_stretched_to_their_tissue(tmp_path: Path) -> None:
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
