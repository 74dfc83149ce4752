"""Tables of slides, bags, targets and predictions: malformed ones are refused with the line."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.bag_labels import read_bag_labels
from spatialdl.data.predicted_table import find_predicted, read_predicted
from spatialdl.data.slide_table import read_table
from spatialdl.data.targets import read_targets, sample_numbers, set_targets


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def test_columns_and_rows_come_back(tmp_path: Path, file: Path) -> None:
    file.write_text("\ufeffslide_id, label ,site\n a.svs , x,\n\nb.svs,y,1\n", encoding="utf-8")
    table = read_table(file)
    assert (table.key, table.columns) == ("slide_id", ("slide_id", "label", "site"))
    assert table.slides == ["a.svs", "b.svs"]
    assert table.column("label") == ["x", "y"]
    table.with_splits(["train", "val"]).save(tmp_path / "out" / "made.csv")
    again = read_table(tmp_path / "out" / "made.csv")
    assert again.columns == (*table.columns, "split")
    assert again.column("split") == ["train", "val"]
    assert again.with_splits(["val", "val"]).columns == again.columns
    with pytest.raises(ValueError, match="no column patient; it has slide"):
        table.column("patient")


def test_columns_of_labels_are_those_without_another_meaning(file: Path) -> None:
    file.write_text("slide,er,case_id,pr,split\na.svs,1,p,,train\n\nb, 0 ,q,1,val\n")
    found = read_bag_labels(file, None)
    assert found.columns == ("er", "pr")
    assert found.rows["a.svs"].cells == ("1", "")
    assert (found.rows["b"].cells, found.rows["b"].patient) == (("0", "1"), "q")
    rows, missing = found.match(["a", "c"])
    assert (list(rows), missing) == (["a"], ["b"])
    with pytest.raises(ValueError, match="has no column stage; its columns are slide, er"):
        read_bag_labels(file, ["stage"])
    file.write_text("slide,label\na.svs,1\na,0\n")
    with pytest.raises(ValueError, match=r"a matches the slide a, which also has .*line 2"):
        read_bag_labels(file, None).match(["a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        (b"slide,label\n\xff\xfe,1\n", "not a UTF-8"),
        (b"", "header is empty"),
        (b"name,label\na,1\n", "no column slide or slide_id"),
        (b"slide,label,label\na,1,1\n", "two columns 'label'"),
        (b"slide,label\n", "no rows"),
        (b"slide,label\na,1,2\n", "line 2 has 3 cells"),
        (b"slide,label\n,1\n", "line 2: slide is empty"),
        (b"slide,label\na,1\na,0\n", "line 3: slide 'a' is already in line 2"),
    ],
)
@pytest.mark.parametrize("read", [read_table, lambda path: read_bag_labels(path, None)])
def test_malformed_tables_are_refused(file: Path, text: bytes | None, message: str, read) -> None:
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read(file)


def test_bags_need_labels_and_one_split_of_a_patient(file: Path) -> None:
    for text, message in [
        ("slide,split\na,train\n", "no label column"),
        ("slide,label,patient,split\na,1,p,train\nb,1,p,val\n", "patient p is in the split val"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_bag_labels(file, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six tiles of two slides, val and train by turns."""
    with ShardWriter(tmp_path / "set", ()) as shards:
        for number in range(6):
            split = "train" if number % 2 else "val"
            shards.add(np.zeros((4, 4, 3), np.uint8), None, split, slide="ab"[number // 3])
    return tmp_path / "set"


def test_targets_of_slides_and_of_samples_over_all_splits(folder: Path, file: Path) -> None:
    file.write_text("slide,er,pr\nb,1,\nc,0,0\n\na,0, -1 \n")
    sources = [ShardDataset(folder, split) for split in ("train", "val")]
    assert set_targets(file, sources, folder, binary=True) == ["er", "pr"]
    nan = np.nan
    np.testing.assert_equal(sources[0].labels, [[0, nan], [1, nan], [1, nan]])
    np.testing.assert_equal(sources[1].labels, [[0, nan], [0, nan], [1, nan]])
    lines = "".join(f"{number},{10 * number - 5.5}\n" for number in range(6))
    file.write_text("sample,age\n" + lines)
    assert set_targets(file, sources[:1], folder, False) == ["age"]
    np.testing.assert_equal(sources[0].labels, [[4.5], [24.5], [44.5]])
    assert sample_numbers(sources[0]) == [1, 3, 5]
    assert sample_numbers(ShardDataset(folder)) == list(range(6))
    file.write_text("slide,age\na,-1\n")
    assert read_targets(file, binary=False)[2] == {"a": [-1]}


@pytest.mark.parametrize(
    ("text", "binary", "sentence"),
    [
        (None, False, r"cannot read .*table.csv"),
        ("slide,age\na,inf\n", False, "line 2, age: inf is not finite"),
        ("", True, "starts with an empty line: its header must be sample,TARGET"),
        ("name,er\na,1\n", True, "starts with name,er"),
        ("slide\na\n", True, "starts with slide: its header"),
        ("slide,er,er\na,1,1\n", True, "every target needs a unique name"),
        ("slide,er\na,1,1\n", True, "line 2 has 3 cells, but the header has 2"),
        ("slide,er\na,1\n\na,0\n", True, "line 4: duplicate slide a"),
        ("slide,er\na,yes\n", True, "line 2, er: 'yes' is not a number"),
        ("slide,er\na,2\n", True, "line 2, er: 2 must be 1 .*0"),
        ("slide,er\na,1\n", True, "no line for 1 of the slides of .*, such as slide 'b'; it has 1"),
        ("slide,er\na,\nb,nan\n", True, "has only empty targets for "),
        ("sample,er\n0,1\n6,1\n", True, "no sample 6, expected 0 to 5"),
        ("sample,er\n00,1\n", True, "no sample 00"),
        ("sample,er\n1,1\n", True, "no line for 2 of the samples of .*, such as sample '3'"),
    ],
)
def test_targets_that_do_not_fit_are_refused(folder, file, text, binary, sentence) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        set_targets(file, [ShardDataset(folder, "train")], folder, binary)


def test_predictions_of_both_kinds_are_the_same_columns_of_text(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    assert find_predicted(tmp_path, "a") is None
    columns = {"slide": ["a, b", "c"], "n": [3, 4], "why": [None, "bad"]}
    arrow.parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    assert find_predicted(tmp_path, "a") == tmp_path / "a.parquet"
    (tmp_path / "a.csv").write_text('\ufeffslide,n,why\n"a, b",3,\nc,4,bad\n', encoding="utf-8")
    assert find_predicted(tmp_path, "a") == tmp_path / "a.csv"
    expected = {"slide": ["a, b", "c"], "n": ["3", "4"], "why": ["", "bad"]}
    assert read_predicted(tmp_path / "a.csv") == read_predicted(tmp_path / "a.parquet") == expected


def test_malformed_predictions_are_refused_and_long_cells_are_none(tmp_path: Path) -> None:
    for name, content, message in [
        ("a.csv", b"", "as a prediction table"),
        ("a.csv", b"a,b\n1\n", "line 2 has 1 cells, but the header has 2"),
        ("a.csv", b"a\n\xff\n", "as a prediction table"),
        ("a.parquet", b"no table", r"cannot read .*a\.parquet as a prediction table"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_predicted(tmp_path / name)
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"a\n{'s' * 200_000}\n")
    assert len(read_predicted(tmp_path / "a.csv")["a"][0]) == 200_000
    assert csv.field_size_limit() == before
