from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.normalise import BUILT_IN, own_colours, reference_colours, sampled
from spatialdl.slides.cutting.stains import (
    METHODS,
    LabColours,
    Method,
    StainColours,
    colours_of,
    recoloured,
)
from spatialdl.slides.cutting.tiling import cut_tiles, plan_tiles
from spatialdl.slides.reading.reader import Slide


def never(image: np.ndarray) -> bool:
    return False


def test_the_built_in_colours_are_those_of_the_slide_they_say(real: Path) -> None:
    with Slide(real / "CMU-1-Small-Region.svs") as slide:
        pixels = sampled(slide, plan_tiles(slide, 256, 0.5), never)
    own = colours_of(pixels, "macenko")
    found = colours_of(recoloured(pixels[None], own, BUILT_IN["macenko"])[0], "reinhard")
    for name, value in vars(reference_colours("reinhard", None)).items():
        # of a tile more or less
        assert getattr(found, name) == pytest.approx(value, abs=1.0)


def test_the_built_in_stains_are_stains() -> None:
    stains = vars(BUILT_IN["macenko"])["stains"]
    assert np.linalg.norm(stains, axis=1) == pytest.approx(1, abs=1e-3)
    assert stains[0, 0] > stains[1, 0]  # hematoxylin first


def test_the_sample_is_spread_over_the_tiles(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 128, 0.5)
        pixels = sampled(slide, plan, never)
        assert 24 * 3000 < len(pixels) < 24 * 5500
        assert (pixels == sampled(slide, plan, never)).all()
        asked: list[int] = []
        assert len(sampled(slide, plan, lambda image: asked.append(1) or True)) == 0
        assert len(asked) == len(plan.places)
        some = sampled(slide, plan, lambda image: asked.append(1) or len(asked) % 2)
        assert len(some) == len(pixels)  # others took the places of those refused
        few = replace(plan, places=plan.places[:3], labels=plan.labels[:3])
        assert len(sampled(slide, few, never)) == len(pixels) // 8
        assert len(sampled(slide, replace(plan, places=[], labels=[]), never)) == 0


def test_damaged_tiles_are_left_out_of_the_sample(real: Path) -> None:
    with Slide(real / "bad" / "corrupt-some-tiles.svs") as slide:
        pixels = sampled(slide, plan_tiles(slide, 256, 0.5), never)
    assert 3 * 3800 < len(pixels) < 20 * 3900


@pytest.mark.parametrize("method", METHODS)
def test_a_slide_comes_near_to_the_reference(real: Path, method: Method) -> None:
    reference = reference_colours(method, None)
    with Slide(real / "tcga-cr-7395-01a-01-ts1.svs", 0.25) as slide:
        plan = plan_tiles(slide, 256, 0.5)
        fitted = own_colours(slide, plan, method, never)
        some = replace(plan, places=plan.places[::3], labels=plan.labels[::3])
        tiles = [tile.image for tile in cut_tiles(slide, some) if tile.image is not None]
    moved = np.concatenate(
        [recoloured(tile, fitted, reference).reshape(-1, 3)[::17] for tile in tiles]
    )
    own = colours_of(np.concatenate([tile.reshape(-1, 3)[::17] for tile in tiles]), method)
    found = colours_of(moved, method)
    for name, value in vars(reference).items():
        before, after = (np.abs(getattr(k, name) - value).max() for k in (own, found))
        if name in ("stains", "mean"):
            assert after < 0.5 * before, name
        else:  # of other pixels than those that it was fitted on
            assert after < 0.25 * value.max(), name


def test_a_reference_from_a_file(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["strand"]) as slide:
        tile = slide.read(600, 400, (500, 600), 0.5)
    Image.fromarray(tile).save(tmp_path / "reference.png")
    for method, kind in [("macenko", StainColours), ("reinhard", LabColours)]:
        found = reference_colours(method, tmp_path / "reference.png")
        assert isinstance(found, kind)
        assert str(found) != str(BUILT_IN[method])
        whole = colours_of(tile.reshape(-1, 3), method)
        for name, value in vars(whole).items():
            assert getattr(found, name) == pytest.approx(value, rel=0.1, abs=0.05)


def test_a_reference_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("hello")
    Image.new("RGB", (50, 50), "white").save(tmp_path / "white.png")
    for name, says in [
        ("none.png", "cannot read stain reference .*none.png"),
        ("text.png", "cannot read stain reference .*text.png: cannot identify"),
        ("white.png", "stain reference .*white.png cannot be used: 0 of 2500 sampled pixels"),
    ]:
        with pytest.raises(ValueError, match=says):
            reference_colours("macenko", tmp_path / name)


def test_a_slide_without_stain_is_refused(real: Path) -> None:
    with Slide(real / "bad" / "all-white.svs") as slide:
        plan = plan_tiles(slide, 256, 0.5, 0.0)
        with pytest.raises(
            SlideError, match=r"cannot normalise the stains of slide .*all-white.svs"
        ):
            own_colours(slide, plan, "macenko", never)
