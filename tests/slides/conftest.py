"""Slides and a data set that the tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spatialdl.data.writer import ShardWriter
from spatialdl.slides.batch import report_page, steps
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.synthetic import KINDS, write_synthetic_slide

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "slides"


def write_kinds(folder: Path, size: tuple[int, int]) -> dict[str, Path]:
    for kind in KINDS:
        write_synthetic_slide(folder / f"{kind}.tiff", kind, size=size, seed=1)
    return {kind: folder / f"{kind}.tiff" for kind in KINDS}


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A slide of each kind, 1600 x 2304 (rows x columns), of the same seed."""
    return write_kinds(tmp_path_factory.mktemp("synthetic"), (1600, 2304))


@pytest.fixture(scope="session")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A slide of each kind, 800 x 1152, for whole runs of the command."""
    return write_kinds(tmp_path_factory.mktemp("halves"), (800, 1152))


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of real slides, good and bad."""
    if not REAL.is_dir():
        pytest.skip(f"no real slides: {REAL} is missing")
    return REAL


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
    monkeypatch.setattr(report_page, "_SHORTEST", 64)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch, quick: None) -> list[str]:
    """The parts that are cut from now on."""
    cut_part, parts = steps.cut_part, []

    def noted(*given: Any) -> PartRecord:
        part = cut_part(*given)
        parts.append(f"{given[3].parent.name}/{given[3].name}")
        return part

    monkeypatch.setattr(steps, "cut_part", noted)
    return parts


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """Seven tiles of two slides and two classes, in three shards."""
    path = tmp_path / "set"
    rng = np.random.default_rng(0)
    made = {"tile_size": 16, "mag": None, "labels": "a.csv"}
    with ShardWriter(path, ["no", "yes"], mpp=0.5, shard_size=2400, made_with=made) as writer:
        for k in range(7):
            image = rng.integers(0, 256, (16, 16, 3), np.uint8)
            label, split = (k % 2, "train") if k < 5 else (None, "val")
            writer.add(image, label, split, slide=f"s{k // 4}", xy=(16 * k, 0))
    return path
