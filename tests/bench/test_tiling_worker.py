from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile

from spatialdl.bench import tiling_worker
from spatialdl.bench.tiling import HASHED, NATIVE, OPENSLIDE, OURS, PASSED, THROUGH
from spatialdl.slides import command
from spatialdl.slides.synthetic.drawing import write_synthetic_slide


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "slide.tiff"
    write_synthetic_slide(path, "ring", (1024, 1280), seed=1)
    return path


def tiles(slide: Path, way: str, most: int, capsys: pytest.CaptureFixture[str]) -> int:
    given = ["--tile-size", "256", "--most", str(most), "--out", str(slide.parent / "set")]
    tiling_worker.main([way, str(slide), *given])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["cpu_seconds"] > 0
    assert not (slide.parent / "set").exists()
    return int(found["tiles"])


def test_every_way_counts_its_tiles(
    slide: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], bool]] = []
    main = command.main

    def told(given: list[str], *, native: bool) -> int:
        asked.append((given, native))
        return main(given, native=native)

    monkeypatch.setattr(command, "main", told)
    for way in (OPENSLIDE, NATIVE):
        assert [tiles(slide, way, most, capsys) for most in (5, 7, 100)] == [5, 7, 20]
    cut = tiles(slide, OURS, 100, capsys)
    assert 1 <= cut <= 20
    assert [tiles(slide, way, 100, capsys) for way in (THROUGH, PASSED)] == [cut, cut]
    assert [native for _, native in asked] == [True, False, True]
    assert "jpeg-native" in asked[2][0]
    assert tiles(slide, HASHED, 7, capsys) == 7


def test_a_slide_without_native_tiles_is_no_measure_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    tifffile.imwrite(path, np.zeros((300, 300, 3), np.uint8), tile=(256, 256), photometric="rgb")
    given = ["--tile-size", "64", "--most", "1", "--out", "unused"]
    with pytest.raises(RuntimeError, match="are not read natively"):
        tiling_worker.main([NATIVE, str(path), *given])
