"""Slides that the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.slides.synthetic.drawing import KINDS, write_synthetic_slide

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "slides"


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A slide of each kind, 1600 x 2304 (rows x columns), of the same seed."""
    folder = tmp_path_factory.mktemp("synthetic")
    for kind in KINDS:
        write_synthetic_slide(folder / f"{kind}.tiff", kind, size=(1600, 2304), seed=1)
    return {kind: folder / f"{kind}.tiff" for kind in KINDS}


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of real slides, good and bad."""
    if not REAL.is_dir():
        pytest.skip(f"no real slides: {REAL} is missing")
    return REAL
