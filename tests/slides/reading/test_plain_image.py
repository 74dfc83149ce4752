"""Over pixels that are known, whatever has decoded them; files are in the tests beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.reading import handles, plain_image
from spatialdl.slides.reading.handles import Handles
from spatialdl.slides.reading.plain_image import Header, PlainImage

Bytes = npt.NDArray[np.uint8]


class Array:
    """Pixels in memory, of which some may be damaged."""

    def __init__(self, image: Bytes, premultiplied: bool = False, damaged: int = 10**6) -> None:
        self.shape = image.shape
        self.premultiplied = premultiplied
        self.open = True
        self._image, self._damaged = image, damaged

    def box(self, top: int, bottom: int, left: int, right: int) -> Bytes:
        assert self.open
        assert 0 <= top < bottom <= self.shape[0]
        assert 0 <= left < right <= self.shape[1]
        if bottom > self._damaged:
            raise RuntimeError("no such block")
        return self._image[top:bottom, left:right]

    def close(self) -> None:
        self.open = False


def drawn(channels: int, rows: int = 30, cols: int = 20) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, (rows, cols, channels), np.uint8)


def plain(opener: Callable[[], Array], size: tuple[int, int] = (30, 20)) -> PlainImage:
    return PlainImage(Path("a.png"), Header(size, {}), opener)


def read(image: PlainImage, x: int, y: int, size: tuple[int, int]) -> Bytes:
    return image.read(x, y, 0, size, again=True)


@pytest.mark.parametrize("premultiplied", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_colours_lie_over_white(channels, premultiplied):
    given = drawn(channels)
    if premultiplied and channels in (2, 4):
        given[..., :-1] = np.minimum(given[..., :-1], given[..., -1:])
    found = read(plain(lambda: Array(given, premultiplied)), 0, 0, (30, 20))
    colours = (given if channels in (1, 3) else given[..., :-1]).astype(float)
    expected = np.broadcast_to(colours, found.shape)
    if channels in (2, 4):
        alpha = given[..., -1:].astype(float)
        weighted = colours if premultiplied else colours * alpha / 255
        expected = weighted + 255 - alpha
    assert np.abs(found - expected).max() <= (0.5 if channels in (2, 4) else 0)


@pytest.mark.parametrize(
    ("x", "y", "size"),
    [(0, 0, (30, 20)), (3, 5, (7, 9)), (-4, -6, (40, 30)), (15, 25, (10, 10)), (-3, 28, (2, 5))],
)
def test_a_box_over_the_edge_is_white_beyond(x, y, size):
    given = drawn(3)
    around = np.full((130, 120, 3), 255, np.uint8)
    around[50:80, 50:70] = given
    found = read(plain(lambda: Array(given)), x, y, size)
    assert (found == around[50 + y : 50 + y + size[0], 50 + x : 50 + x + size[1]]).all()


@pytest.mark.parametrize(("x", "y"), [(20, 0), (0, 30), (-9, 0), (0, -9), (40, 50)])
def test_nothing_is_opened_for_what_lies_outside(x, y):
    def opener() -> Array:
        raise SlideError("opened")

    assert (read(plain(opener), x, y, (9, 9)) == 255).all()


def test_damage_is_told_with_its_place_and_leaves_the_rest():
    given, opened = drawn(3), []

    def opener() -> Array:
        opened.append(Array(given, damaged=20))
        return opened[-1]

    image = plain(opener)
    with pytest.raises(SlideError, match=r"slide a\.png at x=2, y=15: no such block"):
        read(image, 2, 15, (9, 9))
    assert (read(image, 2, 11, (9, 9)) == given[11:20, 2:11]).all()
    assert len(opened) == 1


def test_what_cannot_be_opened_is_tried_once():
    tried = []

    def opener() -> Array:
        tried.append(1)
        raise SlideError("the PNG is damaged")

    image = plain(opener)
    for _ in range(3):
        with pytest.raises(SlideError, match="the PNG is damaged"):
            read(image, 0, 0, (5, 5))
    assert len(tried) == 1


def test_only_some_are_open_at_a_time(monkeypatch):
    for module in (handles, plain_image):
        monkeypatch.setattr(module, "HANDLES", Handles(3))
    given, opened = drawn(3), []

    def opener() -> Array:
        opened.append(Array(given))
        return opened[-1]

    images = [plain(opener) for _ in range(6)]
    for _ in range(2):
        for image in images:
            assert (read(image, 1, 2, (5, 6)) == given[2:7, 1:7]).all()
            assert sum(one.open for one in opened) <= 3
    for image in images:
        image.close()
    assert not any(one.open for one in opened)
