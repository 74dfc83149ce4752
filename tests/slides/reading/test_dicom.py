from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.reading.dicom import grouped, is_uid, may_be_dicom
from tests.slides.dicom_series import uid, write_annotation, write_series
from tests.slides.tiled_tiffs import picture


def test_files_are_grouped_by_series(tmp_path: Path) -> None:
    names = sorted(uid(name) for name in "ab")
    a = write_series(tmp_path, picture(200, 150), names[0], 2, name="a{}.dcm")
    b = write_series(tmp_path, picture(200, 150), names[1], 1, label=False, name="1.2.{}")
    write_annotation(tmp_path / "note.dcm", uid("note"))
    (tmp_path / "broken.dcm").write_bytes(a[0].read_bytes()[:200])
    (tmp_path / "text.dcm").write_text("no slide")
    (tmp_path / "README").write_text("no slide")
    (tmp_path / "empty.dcm").touch()
    found = grouped(tmp_path.iterdir())
    assert [(k.uid, list(k.files)) for k in found if k.is_slide] == [
        (names[0], sorted(a)),
        (names[1], b),
    ]
    assert [k.uid for k in found if not k.is_slide] == [uid("note")]


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    write_annotation(tmp_path / "a.dcm", uid("one"))
    assert grouped(tmp_path.iterdir())[0].uid == uid("one")
    write_annotation(tmp_path / "a.dcm", uid("other one"))
    assert grouped(tmp_path.iterdir())[0].uid == uid("other one")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("1.2.840", True), ("..", False), ("1/2", False), ("a", False), ("", False)],
)
def test_uids_are_safe_as_names(name: str, is_one: bool) -> None:
    assert is_uid(name) == is_one


def test_a_header_with_a_path_for_a_uid_is_none(tmp_path: Path) -> None:
    path = write_annotation(tmp_path / "a.dcm", "1.2.3.4")
    path.write_bytes(path.read_bytes().replace(b"1.2.3.4\0", b"../../x\0"))
    assert grouped([path]) == []


def test_without_pydicom_only_dicom_files_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom.filereader", None)
    (tmp_path / "IM0001").write_text("no slide")
    assert grouped(tmp_path.iterdir()) == []
    write_annotation(tmp_path / "a.dcm", uid("note"))
    with pytest.raises(SlideError, match=r"a\.dcm is a DICOM file.*pip install .spatialdl\[dicom"):
        grouped(tmp_path.iterdir())


def test_names_tell_what_may_be_dicom() -> None:
    names = ["a.dcm", "a.DCM", "IM0001", "1.2.840.5", "a.svs", "a.txt"]
    assert [may_be_dicom(Path(name)) for name in names] == [True] * 4 + [False] * 2
