from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.resolution import Wanted, mpp_of, power_of

PATH = Path("a.svs")


def says(x: str, y: str | None = None, power: str | None = None) -> dict[str, str]:
    found = {"openslide.mpp-x": x, "openslide.mpp-y": y or x}
    return found if power is None else {**found, "openslide.objective-power": power}


def test_pixels_nearly_square_have_the_mean_and_a_remark() -> None:
    assert mpp_of(says("0.25"), PATH) == (0.25, "")
    assert mpp_of(says("0.25", "0.2510"), PATH).remark == ""
    mpp, remark = mpp_of(says("0.25", "0.26"), PATH)
    assert mpp == pytest.approx(0.255)
    assert "0.25 micrometres across, 0.26 down; 0.255 is used" in remark
    with pytest.raises(SlideError, match=r"0\.25 micrometres .* and 0\.27 down"):
        mpp_of(says("0.25", "0.27"), PATH)


@pytest.mark.parametrize("wrong", ["0", "-1", "353", "nan", "inf", "half", ""])
def test_what_cannot_be_right_is_refused(wrong: str) -> None:
    with pytest.raises(SlideError, match=r"a\.svs says .*--slide-mpp"):
        mpp_of({"openslide.mpp-x": wrong, "openslide.mpp-y": wrong}, PATH)
    with pytest.raises(SlideError, match=r"does not say .*--slide-mpp, or a column mpp"):
        mpp_of({"openslide.mpp-x": "0.5"}, PATH)


def test_powers_that_can_be_right() -> None:
    assert power_of(says("1", power="40")) == 40
    for wrong in ("0", "", "x", "nan", "100000"):
        assert power_of(says("1", power=wrong)) is None


def test_magnification_is_that_of_the_objective(real: Path, synthetic: dict[str, Path]) -> None:
    with Slide(real / "CMU-1-Small-Region.svs") as slide:  # 0.499 at 20x
        assert slide.objective_power == 20
        assert Wanted(mag=20).scale(slide) == 1
        assert Wanted(mag=10).scale(slide) == 2
        assert Wanted(mag=20.1).scale(slide) == 1
        with pytest.raises(SlideError, match="taken at 20x and cannot give 40x; ask for 20 or"):
            Wanted(mag=40).scale(slide)
    with Slide(synthetic["ring"]) as slide:  # 0.5, and no objective named
        assert Wanted(mag=5).scale(slide) == 4
    with Slide(real / "CMU-1-Small-Region.svs", mpp=0.25) as slide:  # what is given counts
        assert Wanted(mag=20).scale(slide) == 2


def test_a_level_needs_no_resolution(real: Path) -> None:
    with Slide(real / "tcga-cr-7395-01a-01-ts1.svs") as slide:
        assert slide.known_mpp is None
        assert Wanted(level=1).scale(slide) == slide.downsamples[1]
        with pytest.raises(SlideError, match="levels 0 to 1, and no level 2"):
            Wanted(level=2).scale(slide)
        for wanted in (Wanted(mpp=0.5), Wanted(mag=20)):
            with pytest.raises(SlideError, match="--slide-mpp"):
                wanted.scale(slide)
