from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.reading.resolution import mpp_of, power_of

PATH = Path("a.svs")


def says(x: str, y: str | None = None, power: str | None = None) -> dict[str, str]:
    found = {"openslide.mpp-x": x, "openslide.mpp-y": y or x}
    return found if power is None else {**found, "openslide.objective-power": power}


def test_pixels_nearly_square_have_the_mean_and_a_remark() -> None:
    assert mpp_of(says("0.25"), PATH) == (0.25, "")
    assert mpp_of(says("0.25", "0.2510"), PATH).remark == ""
    mpp, remark = mpp_of(says("0.25", "0.26"), PATH)
    assert mpp == pytest.approx(0.255)
    assert "0.25 micrometres horizontally, 0.26 vertically; using 0.255" in remark
    with pytest.raises(SlideError, match=r"0\.25 micrometres .* and 0\.27 vertically"):
        mpp_of(says("0.25", "0.27"), PATH)


@pytest.mark.parametrize("wrong", ["0", "-1", "353", "nan", "inf", "half", ""])
def test_what_cannot_be_right_is_refused(wrong: str) -> None:
    with pytest.raises(SlideError, match=r"a\.svs has .*--slide-mpp"):
        mpp_of({"openslide.mpp-x": wrong, "openslide.mpp-y": wrong}, PATH)
    with pytest.raises(
        SlideError, match=r"has no micrometres per pixel .*--slide-mpp, or a column mpp"
    ):
        mpp_of({"openslide.mpp-x": "0.5"}, PATH)


def test_powers_that_can_be_right() -> None:
    assert power_of(says("1", power="40")) == 40
    for wrong in ("0", "", "x", "nan", "100000"):
        assert power_of(says("1", power=wrong)) is None
