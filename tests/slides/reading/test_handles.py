from __future__ import annotations

import os
from pathlib import Path

import pytest

from spatialdl.slides.reading import handles as module_of_handles
from spatialdl.slides.reading import openslide_file, plain_image
from spatialdl.slides.reading.handles import Handles, ReopenedFile
from spatialdl.slides.reading.reader import Slide


class Held(ReopenedFile):
    def __init__(self) -> None:
        super().__init__()
        self.open, self.busy = True, False

    def release(self) -> bool:
        return not self.busy and super().release()

    def _let_go(self) -> None:
        self.open = False


def test_the_one_longest_not_used_is_released() -> None:
    handles = Handles(2)
    a, b, c = Held(), Held(), Held()
    for holder in (a, b, a, c):
        handles.used(holder)
    assert [held.open for held in (a, b, c)] == [True, False, True]
    handles.forget(a)
    b.open = True
    handles.used(b)
    assert c.open
    assert len(handles) == 2


def test_one_that_is_being_read_stays_open() -> None:
    handles = Handles(1)
    a, b, c = Held(), Held(), Held()
    a.busy = True
    for holder in (a, b, c):
        handles.used(holder)
    assert [held.open for held in (a, b, c)] == [True, False, True]
    assert len(handles) == 2


def test_many_slides_are_read_with_few_files_open(
    synthetic: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = Handles(3)
    for module in (openslide_file, plain_image, module_of_handles):
        monkeypatch.setattr(module, "HANDLES", handles)
    before = open_files()
    slides = [Slide(synthetic["ring"]) for _ in range(20)]
    right = slides[0].read_scaled(600, 500, (100, 90), 1.0)
    for _ in range(2):
        for slide in slides:
            assert slide.is_native(1.0)
            assert (slide.read_scaled(600, 500, (100, 90), 1.0) == right).all()
            assert slide.read_scaled(0, 0, (40, 40), 1.5).shape == (40, 40, 3)  # by openslide
        assert len(handles) == 3
        assert open_files() <= before + 3 * 3
    for slide in slides:
        slide.close()
    assert len(handles) == 0
    assert open_files() == before


def open_files() -> int:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("open files are counted in /proc")
    return len(os.listdir(folder))
