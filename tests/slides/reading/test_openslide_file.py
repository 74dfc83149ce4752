from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile

from spatialdl.errors import SlideError
from spatialdl.slides.reading.openslide_file import OpenSlideFile, composited


def test_a_handle_that_failed_is_opened_again(
    synthetic: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = OpenSlideFile(synthetic["ring"], native=False)
    right = source.read(500, 400, 0, (50, 60), True)
    failing, original = [1, 3, 4], openslide.OpenSlide.read_region
    calls = iter(range(100))

    def fails(self: openslide.OpenSlide, *place: object) -> object:
        if next(calls) in failing:
            raise openslide.OpenSlideError("a bad day")
        return original(self, *place)

    monkeypatch.setattr(openslide.OpenSlide, "read_region", fails)
    handles = []
    for _ in range(2):  # the second fails once, and is read again
        assert (source.read(500, 400, 0, (50, 60), True) == right).all()
        handles.append(source._handle)
    assert handles[0] is not handles[1]
    with pytest.raises(SlideError, match=r"x=500, y=400 \(level 0\): a bad day; .* damaged there"):
        source.read(500, 400, 0, (50, 60), True)
    assert (source.read(500, 400, 0, (50, 60), False) == right).all()
    source.close()


def test_it_reads_on_after_it_was_released(synthetic: dict[str, Path]) -> None:
    for native in (True, False):
        source = OpenSlideFile(synthetic["ring"], native)
        right = source.read(500, 400, 0, (50, 60), True)
        assert source.release()
        assert source._handle is None
        assert source._tiles is None
        assert (source.read(500, 400, 0, (50, 60), True) == right).all()
        source.close()


def test_it_is_not_released_while_it_is_read(synthetic: dict[str, Path]) -> None:
    from threading import Thread

    source, answers = OpenSlideFile(synthetic["ring"]), []
    with source._lock:
        thread = Thread(target=lambda: answers.append(source.release()))
        thread.start()
        thread.join()
    assert answers == [False]
    assert source._handle is not None
    source.close()


def test_transparent_pixels_have_the_background(tmp_path: Path) -> None:
    image = np.zeros((300, 300, 4), np.uint8)
    image[:100, :, 3] = 255
    tifffile.imwrite(
        tmp_path / "a.tiff", image, tile=(256, 256), photometric="rgb", extrasamples=["assocalpha"]
    )
    source = OpenSlideFile(tmp_path / "a.tiff")
    got = source.read(0, 0, 0, (300, 400), True)
    assert (got[:100, :300] == 0).all()
    assert (got[100:] == 255).all()
    assert (got[:, 300:] == 255).all()
    source.close()
    with openslide.OpenSlide(tmp_path / "a.tiff") as raw:
        blue = composited(raw.read_region((0, 0), 0, (300, 300)), (0, 0, 255))
    assert (blue[200, 200] == (0, 0, 255)).all()
