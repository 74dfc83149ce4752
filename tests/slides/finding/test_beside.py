from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.finding.beside import find_beside


def test_the_file_named_like_a_slide(tmp_path: Path) -> None:
    slide = tmp_path / "a.b.svs"
    slide.touch()
    for name in ("a.png", "a.b.c.png", "xa.b.png", "a.b.txt", "a.b.svs.txt"):
        (tmp_path / name).touch()
    with pytest.raises(
        SlideError, match=r"a.b.svs has no mask: there is no a.b.png in .*nor .tif\)"
    ):
        find_beside(tmp_path, slide, (".png", ".tif"), "mask")
    (tmp_path / "a.b.PNG").touch()
    assert find_beside(tmp_path, slide, (".png", ".tif"), "mask") == tmp_path / "a.b.PNG"
    (tmp_path / "a.b.svs.tif").touch()
    with pytest.raises(
        SlideError, match=r"more than one mask in .*: a.b.PNG and a.b.svs.tif; keep"
    ):
        find_beside(tmp_path, slide, (".png", ".tif"), "mask")


def test_a_link_to_the_slide_is_the_slide(tmp_path: Path) -> None:
    slide = tmp_path / "a.tif"
    slide.touch()
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "a.tif").symlink_to(slide)
    with pytest.raises(SlideError, match="has no mask"):
        find_beside(tmp_path / "masks", slide, (".tif",), "mask")
