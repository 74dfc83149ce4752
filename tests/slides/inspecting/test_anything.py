from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.inspecting import inspect
from tests.slides.dicom_series import uid, write_annotation, write_series


def test_a_folder_of_slides_has_a_line_for_each(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    shutil.copy(synthetic["ring"], tmp_path / "b.tiff")
    (tmp_path / "a.svs").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no slide")
    head, empty, ring = inspect(tmp_path).splitlines()
    assert head.split() == [
        *("slide", "format", "rows", "columns", "mpp", "power", "levels", "size")
    ]
    assert empty.split(maxsplit=1) == ["a.svs", "the file is empty; copy it again"]
    assert ring.split()[:5] == ["b.tiff", "generic-tiff", "1600", "2304", "0.5"]
    assert head.index("rows") + 4 == ring.index("1600") + 4


def test_a_folder_of_real_slides(real: Path) -> None:
    lines = {line.split()[0]: line for line in inspect(real / "bad").splitlines()[1:]}
    assert sorted(lines) == [
        *("all-white.svs", "corrupt-some-tiles.svs", "empty.svs", "no-mpp.svs"),
        "truncated-half.svs",
    ]
    assert "has no micrometres" in lines["no-mpp.svs"]
    assert "cut short" in lines["truncated-half.svs"]
    assert not any(str(real) in line for line in lines.values())


def test_a_folder_of_folders_of_series_has_a_line_for_each(tmp_path: Path) -> None:
    image = np.full((300, 200, 3), 180, np.uint8)
    for name in ("case2", "case1"):
        write_series(tmp_path / "slides" / name, image, uid(name), levels=2)
    write_annotation(tmp_path / "slides" / "drawn.dcm", uid("case1"))
    _, *lines = inspect(tmp_path / "slides").splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["case1", "dicom", "300", "200"],
        ["case2", "dicom", "300", "200"],
    ]
    with pytest.raises(ShardError, match="give one of the folders in it, such as slides"):
        inspect(tmp_path)


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no slide")
    with pytest.raises(ShardError, match="no slides"):
        inspect(tmp_path)
    with pytest.raises(SlideError, match="there is no such file"):
        inspect(tmp_path / "none")
