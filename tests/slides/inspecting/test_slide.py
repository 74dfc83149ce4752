from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.inspecting import inspect


def test_a_pyramid(synthetic: dict[str, Path]) -> None:
    lines = inspect(synthetic["ring"]).splitlines()
    assert lines[0] == f"slide       {synthetic['ring']}"
    assert "size        1600 rows x 2304 columns, 0.80 x 1.15 mm" in lines
    assert "power       unknown; 20x by its mpp" in lines
    heads = "level rows columns downsample mpp tile read"
    table = [" ".join(line.split()) for line in lines]
    start = table.index(heads)
    assert table[start + 1] == "0 1600 2304 1 0.5 256 x 256 natively"
    assert table[start + 2] == "1 800 1152 2 1 256 x 256 natively"
    assert not any(line.startswith("remark") for line in lines)


def test_an_aperio_slide(real: Path) -> None:
    path = real / "CMU-1-Small-Region.svs"
    lines = inspect(path).splitlines()
    for line in [
        "format      aperio",
        "file        1.9 MB (1,938,955 bytes)",
        "size        2967 rows x 2220 columns, 1.48 x 1.11 mm",
        "mpp         0.499 horizontally, 0.499 vertically",
        "power       20x",
        "background  #FFFFFF",
        "associated  label 463 x 387, macro 431 x 1280, thumbnail 768 x 574",
    ]:
        assert line in lines
    assert max(map(len, lines)) < 120


def test_what_is_odd_is_said(real: Path) -> None:
    for name, says in [
        ("bad/no-mpp.svs", "remark: slide has no micrometres per pixel"),
        ("osp-boxes.tiff", "remark: slide has 352.8 x 352.8 micrometres per pixel"),
        ("osp-unreadable.svs", "remark: cannot read slide at x=0, y=0"),
    ]:
        assert says in inspect(real / name)


def test_a_plain_image(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(tmp_path / "a.png")
    lines = inspect(tmp_path / "a.png").splitlines()
    assert "format      plain png" in lines
    assert "size        30 rows x 40 columns" in lines
    assert "mpp         unknown" in lines


@pytest.mark.parametrize("content", [b"", b"some text\n", b"version https://git-lfs"])
def test_files_that_are_no_slides_say_why(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.svs").write_bytes(content)
    with pytest.raises(SlideError, match="cannot open slide") as error:
        inspect(tmp_path / "a.svs")
    assert "\n" not in str(error.value)


def test_the_folder_of_a_mirax_slide_counts(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    path = tmp_path / "a.mrxs"  # what is in it tells the format
    path.write_bytes(synthetic["ring"].read_bytes())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "Data0000.dat").write_bytes(bytes(10**6))
    assert f"({path.stat().st_size + 10**6:,} bytes)" in inspect(path)
