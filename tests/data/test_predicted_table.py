from __future__ import annotations

import csv
from pathlib import Path

import pytest

from spatialdl.data.predicted_table import find_predicted, read_predicted


def test_csv_comes_before_parquet(tmp_path: Path) -> None:
    assert find_predicted(tmp_path, "slides") is None
    (tmp_path / "slides.parquet").touch()
    assert find_predicted(tmp_path, "slides") == tmp_path / "slides.parquet"
    (tmp_path / "slides.csv").touch()
    assert find_predicted(tmp_path, "slides") == tmp_path / "slides.csv"


def test_both_kinds_give_the_same_columns_of_text(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    (tmp_path / "a.csv").write_text('\ufeffslide,n,why\n"a, b",3,\nc,4,bad\n', encoding="utf-8")
    columns = {"slide": ["a, b", "c"], "n": [3, 4], "why": [None, "bad"]}
    arrow.parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    expected = {"slide": ["a, b", "c"], "n": ["3", "4"], "why": ["", "bad"]}
    assert read_predicted(tmp_path / "a.csv") == expected
    assert read_predicted(tmp_path / "a.parquet") == expected
    (tmp_path / "a.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"cannot read .*a\.parquet as a prediction table"):
        read_predicted(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "as a prediction table"),
        (b"a,b\n1\n", "line 2 has 1 cells, but the header has 2"),
        (b"a\n\xff\n", "as a prediction table"),
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_predicted(tmp_path / "a.csv")


def test_a_long_cell_is_read_and_the_limit_of_the_process_stays(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"a\n{'s' * 200_000}\n")
    assert len(read_predicted(tmp_path / "a.csv")["a"][0]) == 200_000
    assert csv.field_size_limit() == before
