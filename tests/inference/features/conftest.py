"""Small slides."""

from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.slides.synthetic import write_synthetic_slide


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three slides, a.tiff (the largest) to c.tiff, at 0.5 micrometres."""
    folder = tmp_path_factory.mktemp("small")
    for name, kind, size in (
        ("a", "ring", (512, 640)),
        ("b", "strand", (320, 256)),
        ("c", "ring", (256, 320)),
    ):
        write_synthetic_slide(folder / f"{name}.tiff", kind, size=size, seed=3)
    return folder
