"""What is measured of slides, on drawn and on real ones, good and bad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

from spatialdl.slides.cohort.measuring import MEASURES, measure_slide, measure_slides


def write(path: Path, image: np.ndarray, mpp: float | None = 0.5) -> Path:
    pixels = 1e4 / (mpp or 0.5)
    more = {"resolution": (pixels, pixels), "resolutionunit": "CENTIMETER"} if mpp else {}
    tifffile.imwrite(path, image, tile=(64, 64), photometric="rgb", **more)
    return path


@pytest.fixture(scope="module")
def stained() -> np.ndarray:
    """A quarter of it is noise of the colour of hematoxylin, the rest is glass."""
    image = np.full((800, 1200, 3), 245, np.uint8)
    noise = np.random.default_rng(0).integers(-40, 40, (400, 600, 1))
    image[200:600, 300:900] = np.clip(np.array([110, 70, 150]) + noise, 0, 255)
    return image


def test_tissue_has_its_area(tmp_path, stained):
    found = measure_slide("a", write(tmp_path / "a.tif", stained))
    assert found.problem == ""
    assert found.numbers["tissue_percent"] == pytest.approx(25, abs=1.5)
    assert found.numbers["mpp"] == pytest.approx(0.5)
    area = 0.25 * 800 * 1200 * 0.5**2 / 1e6
    assert found.numbers["tissue_mm2"] == pytest.approx(area, rel=0.06)
    assert set(found.numbers) <= set(MEASURES)
    assert found.scanner == "generic-tiff"


def test_what_is_blurred_or_paler_measures_so(tmp_path, stained):
    from scipy import ndimage

    sharp = measure_slide("a", write(tmp_path / "a.tif", stained)).numbers
    smooth = ndimage.gaussian_filter(stained, (4, 4, 0))
    assert (
        measure_slide("b", write(tmp_path / "b.tif", smooth)).numbers["blur"] > sharp["blur"] + 0.2
    )
    pale = (255 - (255 - stained.astype(float)) * 0.5).astype(np.uint8)
    found = measure_slide("c", write(tmp_path / "c.tif", pale)).numbers
    assert found["brightness"] > sharp["brightness"] + 30
    assert found["hematoxylin"] < sharp["hematoxylin"]


def test_glass_alone_has_no_tissue(tmp_path):
    image = np.full((300, 300, 3), 245, np.uint8)
    found = measure_slide("a", write(tmp_path / "a.tif", image, mpp=None))
    assert found.numbers == {"tissue_percent": 0.0}
    assert found.picture


def test_what_cannot_be_read_has_a_problem(tmp_path):
    (tmp_path / "a.svs").write_bytes(b"no slide")
    found = measure_slide("a", tmp_path / "a.svs")
    assert "a.svs" in found.problem
    assert found.numbers == {}


def test_real_slides_are_measured_alike_by_processes(real):
    slides = {
        "good": real / "CMU-1-Small-Region.svs",
        "part": real / "bad" / "corrupt-some-tiles.svs",
        "none": real / "bad" / "truncated-half.svs",
    }
    found = measure_slides(slides, jobs=2, progress=False)
    assert [one.name for one in found] == list(slides)
    assert found == measure_slides(slides, progress=False)
    assert found[0].scanner == "aperio CPAPERIOCS"
    assert found[0].numbers["tissue_mm2"] == pytest.approx(0.6, abs=0.1)
    assert "cannot be read" in found[1].problem
    assert "cannot open" in found[2].problem
