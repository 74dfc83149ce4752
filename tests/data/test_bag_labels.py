from __future__ import annotations

import pytest

from spatialdl.data.bag_labels import read_bag_labels


def table(folder, text, columns=None):
    path = folder / "labels.csv"
    path.write_text(text)
    return read_bag_labels(path, columns)


def test_columns_of_labels_are_those_without_another_meaning(tmp_path) -> None:
    found = table(tmp_path, "slide,er,case_id,pr,split\na.svs,1,p,,train\n\nb, 0 ,q,1,val\n")
    assert found.columns == ("er", "pr")
    assert found.rows["a.svs"].cells == ("1", "")
    assert (found.rows["b"].cells, found.rows["b"].patient) == (("0", "1"), "q")
    rows, missing = found.match(["a", "c"])
    assert list(rows) == ["a"]
    assert missing == ["b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "header is empty"),
        ("name,label\na,1\n", "no column slide or slide_id"),
        ("slide,label,label\na,1,1\n", "two columns 'label'"),
        ("slide,split\na,train\n", "no label column"),
        ("slide,label\n", "has no rows"),
        ("slide,label\na,1,2\n", "line 2 has 3 cells"),
        ("slide,label\n,1\n", "line 2: slide is empty"),
        ("slide,label\na,1\na,0\n", "line 3: slide 'a' is already in line 2"),
        ("slide,label,patient,split\na,1,p,train\nb,1,p,val\n", "patient p is in the split val"),
    ],
)
def test_malformed_tables_are_refused(tmp_path, text, message) -> None:
    with pytest.raises(ValueError, match=message):
        table(tmp_path, text)


def test_a_slide_has_one_row_whatever_it_is_called(tmp_path) -> None:
    found = table(tmp_path, "slide,label\na.svs,1\na,0\n")
    with pytest.raises(ValueError, match=r"a matches the slide a, which also has .*line 2"):
        found.match(["a"])
    with pytest.raises(ValueError, match="has no column stage; its columns are slide, label"):
        table(tmp_path, "slide,label\na,1\n", ["stage"])
    with pytest.raises(ValueError, match="cannot read"):
        read_bag_labels(tmp_path / "none.csv", None)
