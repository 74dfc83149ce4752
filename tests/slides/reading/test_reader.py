"""Pixels at any place and resolution, thumbnails, and which resolution that is."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import numpy as np
import pytest
import tifffile

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.grid import Wanted
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.resolution import mpp_of, power_of


def test_other_resolutions_are_resampled_from_a_finer_level(synthetic):
    with Slide(synthetic["strand"]) as slide:
        native = slide.read(512, 512, (600, 900), 0.5).astype(float)
        got = slide.read(512, 512, (200, 300), 1.5)
        assert got.shape == (200, 300, 3)
        mean = native.reshape(200, 3, 300, 3, 3).mean((1, 3))
        assert np.abs(got - mean).mean() < 4
        enlarged = slide.read(512, 512, (64, 32), 0.25)
        assert enlarged.shape == (64, 32, 3)


def test_a_large_read_is_the_same_in_parts(synthetic, monkeypatch):
    # each part was resampled by itself once: its first and last rows differed by up to 60 levels
    for scale in (3.0, 3.37, 0.71):
        with monkeypatch.context() as small, Slide(synthetic["ring"]) as slide:
            whole = slide.read_scaled(64, 32, (300, 400), scale)
            rows = [
                slide.read_box(64, 32, (300, 400), scale, (*k, 0, 400))
                for k in [(0, 77), (77, 300)]
            ]
            small.setattr("spatialdl.slides.reading.reader._AT_A_TIME", 50_000)
            parts = slide.read_scaled(64, 32, (300, 400), scale)
        assert np.abs(whole.astype(int) - np.concatenate(rows)).max() <= 1
        assert np.abs(whole.astype(int) - parts).max() <= 1


def says(x: str | None, y: str | None = None, power: str | None = None) -> dict[str, str]:
    """What openslide tells of a slide."""
    names = ("openslide.mpp-x", "openslide.mpp-y", "openslide.objective-power")
    return {name: value for name, value in zip(names, (x, y, power), strict=True) if value}


def test_pixels_nearly_square_have_the_mean_and_a_remark():
    assert mpp_of(says("0.25", "0.25"), PATH) == (0.25, "")
    assert mpp_of(says("0.25", "0.2510"), PATH).remark == ""
    mpp, remark = mpp_of(says("0.25", "0.26"), PATH)
    assert mpp == pytest.approx(0.255)
    assert "0.25 micrometres horizontally, 0.26 vertically; using 0.255" in remark


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        *((wrong, wrong, r"a\.svs has .*--slide-mpp") for wrong in ("nan", "x")),
        ("353", "353", r"has 353 x 353 .* not between 0.05 and 20; .*--slide-mpp"),
        ("0.25", "0.27", r"0\.25 micrometres .* and 0\.27 vertically.*--slide-mpp"),
        ("0.5", None, r"has no micrometres per pixel .*--slide-mpp, or a column mpp"),
        (None, None, r"has no micrometres per pixel .*--slide-mpp"),
    ],
)
def test_what_cannot_be_right_is_refused(x, y, match):
    with pytest.raises(SlideError, match=match):
        mpp_of(says(x, y), PATH)


def test_resolutions_and_powers_of_slides(real, synthetic):
    good = real / "CMU-1-Small-Region.svs"
    with Slide(good) as slide:  # 0.499 at 20x
        assert (slide.mpp, slide.name, slide.objective_power) == (0.499, good.stem, 20)
        assert [Wanted(mag=power).scale(slide) for power in (20, 10, 20.1)] == [1, 2, 1]
        assert Wanted(mpp=0.5).scale(slide) == 1  # within 1 %: its own pixels
        with pytest.raises(SlideError, match="taken at 20x and cannot give 40x; set 20 or"):
            Wanted(mag=40).scale(slide)
        with pytest.raises(SlideError, match=r"has 0.499 .* cannot give 0.25; .* 0.499 or more"):
            Wanted(mpp=0.25).scale(slide)
    with Slide(synthetic["ring"]) as slide:  # 0.5, and no objective named
        assert Wanted(mag=5).scale(slide) == 4
    with Slide(good, mpp=0.25) as slide:  # what is given counts
        assert slide.mpp == 0.25
        assert Wanted(mag=20).scale(slide) == 2
    with pytest.raises(ValueError, match="not between"):
        Slide(good, mpp=500)
    with Slide(real / "tcga-cr-7395-01a-01-ts1.svs") as slide:
        assert slide.known_mpp is None  # and a level needs none
        assert Wanted(level=1).scale(slide) == slide.downsamples[1]
        with pytest.raises(SlideError, match="levels 0 to 1, and no level 2"):
            Wanted(level=2).scale(slide)
        for wanted in (Wanted(mpp=0.5), Wanted(mag=20)):
            with pytest.raises(SlideError, match="--slide-mpp"):
                wanted.scale(slide)
    for power, right in {"40": 40, "0": None, "x": None, "nan": None, "100000": None}.items():
        assert power_of(says("1", "1", power)) == right


def test_a_bad_place_does_not_spoil_the_others(real):
    good = real / "CMU-1-Small-Region.svs"
    with Slide(real / "bad" / "corrupt-some-tiles.svs") as slide, Slide(good) as whole:
        places = [(x, y) for y in range(0, 2880, 240) for x in range(0, 2160, 240)]
        failed = [place for place in places if not same(slide, whole, *place)]
    assert len(failed) == 16


def same(slide: Slide, whole: Slide, x: int, y: int) -> bool:
    """Whether a place can be read; then its pixels are right."""
    try:
        tile = slide.read(x, y, (240, 240), 0.499)
    except SlideError:
        with pytest.raises(SlideError, match=f"at x={x}, y={y} .*damaged there"):
            slide.read(x, y, (240, 240), 0.499)
        return False
    assert (tile == whole.read(x, y, (240, 240), 0.499)).all()
    return True


def test_a_thumbnail_goes_around_bad_places(real):
    good = real / "CMU-1-Small-Region.svs"
    with Slide(real / "bad" / "corrupt-some-tiles.svs") as slide, Slide(good) as whole:
        thumbnail, right = slide.thumbnail(16.0), whole.thumbnail(16.0)
    assert thumbnail.image.shape == (186, 139, 3)
    assert not right.missing.any()
    assert 0.1 < thumbnail.missing.mean() < 0.5
    seen = ~thumbnail.missing
    difference = np.abs(thumbnail.image[seen].astype(int) - right.image[seen])
    assert difference.mean() < 5
    assert (thumbnail.image[thumbnail.missing] == 255).all()


@pytest.mark.parametrize("scale", [1.0, 5.3])
def test_a_thumbnail_shows_the_slide_up_to_its_edge_and_nothing_else(tmp_path, scale):
    for side in range(96, 113, 3):
        image = np.full((side, side + 5, 3), 7, np.uint8)
        tifffile.imwrite(tmp_path / "a.tiff", image, tile=(32, 32), photometric="rgb")
        with Slide(tmp_path / "a.tiff") as slide:
            thumbnail = slide.thumbnail(scale)
        shape = ceil(side / scale), ceil((side + 5) / scale)
        assert thumbnail.image.shape == (*shape, 3)
        assert (thumbnail.image == 7).all()
        assert thumbnail.seen.all()


def test_the_scanned_part(synthetic):
    with Slide(synthetic["ring"]) as slide:
        rows, cols = slide.size
        assert slide.scanned == (0, 0, rows, cols)
        slide._source.properties |= {"openslide.bounds-x": "320", "openslide.bounds-y": "64"}
        assert slide.scanned == (320, 64, rows - 64, cols - 320)
        slide._source.properties |= {"openslide.bounds-width": "99", "openslide.bounds-height": "9"}
        assert slide.scanned == (320, 64, 9, 99)
        slide._source.properties["openslide.bounds-y"] = "?"
        assert slide.scanned == (0, 0, 9, 99)


PATH = Path("a.svs")
