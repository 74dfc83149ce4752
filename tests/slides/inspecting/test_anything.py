from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.inspecting import inspect


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
    assert "does not say its micrometres" in lines["no-mpp.svs"]
    assert "cut short" in lines["truncated-half.svs"]
    assert not any(str(real) in line for line in lines.values())


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no slide")
    with pytest.raises(ShardError, match="no slides"):
        inspect(tmp_path)
    with pytest.raises(SlideError, match="there is no such file"):
        inspect(tmp_path / "none")
