"""The table of slides: all columns are kept, malformed files are refused with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.data.slide_table import read_table


def test_columns_and_rows_come_back(tmp_path: Path):
    path = tmp_path / "labels.csv"
    path.write_text("\ufeffslide_id, label ,site\n a.svs , x,\n\nb.svs,y,1\n", encoding="utf-8")
    table = read_table(path)
    assert (table.key, table.columns) == ("slide_id", ("slide_id", "label", "site"))
    assert table.slides == ["a.svs", "b.svs"]
    assert table.column("label") == ["x", "y"]
    table.with_splits(["train", "val"]).save(tmp_path / "out" / "made.csv")
    again = read_table(tmp_path / "out" / "made.csv")
    assert again.columns == (*table.columns, "split")
    assert again.column("split") == ["train", "val"]
    assert again.with_splits(["val", "val"]).columns == again.columns


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "header is empty"),
        ("name,label\n", "no column slide or slide_id"),
        ("slide,a,a\nx,1,2\n", "two columns 'a'"),
        ("slide,a\n", "no rows"),
        ("slide,a\nx\n", "line 2 has 1 cells"),
        ("slide,a\n,1\n", "line 2: slide is empty"),
        ("slide,a\nx,1\nx,2\n", "line 3: slide 'x' is already in line 2"),
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "t.csv")


def test_files_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "t.csv").write_bytes(b"slide,label\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match="not a UTF-8"):
        read_table(tmp_path / "t.csv")
    with pytest.raises(ValueError, match="cannot read"):
        read_table(tmp_path / "missing.csv")
    (tmp_path / "ok.csv").write_text("slide\na\n")
    with pytest.raises(ValueError, match="no column patient; it has slide"):
        read_table(tmp_path / "ok.csv").column("patient")
