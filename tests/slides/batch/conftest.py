"""Slides that take next to no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.slides.batch import picture
from spatialdl.slides.synthetic.drawing import write_synthetic_slide


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two slides, a.tiff and b.tiff, of 256 x 320 pixels at 0.5 micrometres."""
    folder = tmp_path_factory.mktemp("small")
    for name, kind in (("a", "ring"), ("b", "strand")):
        write_synthetic_slide(folder / f"{name}.tiff", kind, size=(256, 320), seed=3)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are small, and no file has to have reached the disk."""
    monkeypatch.setattr(picture, "_SHORTEST", 64)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
