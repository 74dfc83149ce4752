from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from spatialdl.slides.picture import save_picture
from spatialdl.slides.reader import Slide
from spatialdl.slides.tiling import plan_tiles


def test_tiles_and_outline_are_drawn(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 0.5)
    save_picture(tmp_path / "pictures" / "a.png", plan, plan.places[1:], plan.places[:1])
    pixels = np.asarray(Image.open(tmp_path / "pictures" / "a.png")).astype(int)
    assert pixels.shape == plan.thumbnail.image.shape
    for colour, low, high in [((30, 80, 220), 200, 9000), ((220, 30, 30), 40, 80)]:
        assert low < (pixels == colour).all(-1).sum() < high
    assert (pixels == (0, 150, 60)).all(-1).sum() > 100
    x, y = (int(n / plan.thumbnail.scale) for n in plan.places[0])
    assert pixels[y, x].tolist() == [220, 30, 30]
