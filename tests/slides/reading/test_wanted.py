from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.wanted import Wanted


def test_magnification_is_that_of_the_objective(real: Path, synthetic: dict[str, Path]) -> None:
    with Slide(real / "CMU-1-Small-Region.svs") as slide:  # 0.499 at 20x
        assert slide.objective_power == 20
        assert Wanted(mag=20).scale(slide) == 1
        assert Wanted(mag=10).scale(slide) == 2
        assert Wanted(mag=20.1).scale(slide) == 1
        with pytest.raises(SlideError, match="taken at 20x and cannot give 40x; set 20 or"):
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
