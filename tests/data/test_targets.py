from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.targets import read_targets, sample_numbers, set_targets


@pytest.fixture
def folder(tmp_path):
    """Six tiles of two slides, val and train by turns."""
    with ShardWriter(tmp_path / "set", ()) as shards:
        for number in range(6):
            split = "train" if number % 2 else "val"
            shards.add(np.zeros((4, 4, 3), np.uint8), None, split, slide="ab"[number // 3])
    return tmp_path / "set"


def written(folder, text: str):
    file = folder.parent / "targets.csv"
    file.write_text(text)
    return file


def test_targets_of_slides(folder):
    file = written(folder, "slide,er,pr\nb,1,\nc,0,0\n\na,0, -1 \n")
    sources = [ShardDataset(folder, split) for split in ("train", "val")]
    assert set_targets(file, sources, folder, binary=True) == ["er", "pr"]
    nan = np.nan
    np.testing.assert_equal(sources[0].labels, [[0, nan], [1, nan], [1, nan]])
    np.testing.assert_equal(sources[1].labels, [[0, nan], [0, nan], [1, nan]])


def test_targets_of_samples_are_numbered_over_all_splits(folder):
    lines = "".join(f"{number},{10 * number - 5.5}\n" for number in range(6))
    train = ShardDataset(folder, "train")
    assert set_targets(written(folder, "sample,age\n" + lines), [train], folder, False) == ["age"]
    np.testing.assert_equal(train.labels, [[4.5], [24.5], [44.5]])
    assert sample_numbers(train) == [1, 3, 5]
    assert sample_numbers(ShardDataset(folder)) == list(range(6))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "starts with an empty line: its header must be sample,TARGET"),
        ("name,er\na,1\n", "starts with name,er"),
        ("slide\na\n", "starts with slide: its header"),
        ("slide,er,er\na,1,1\n", "every target needs a unique name"),
        ("slide,er\na,1,1\n", "line 2 has 3 cells, but the header has 2"),
        ("slide,er\na,1\n\na,0\n", "line 4: duplicate slide a"),
        ("slide,er\na,yes\n", "line 2, er: 'yes' is not a number"),
        ("slide,er\na,2\n", "line 2, er: 2 must be 1 .*0"),
        ("slide,er\na,1\n", "no line for 1 of the slides of .*, such as slide 'b'; it has 1"),
        ("slide,er\na,\nb,nan\n", "has only empty targets for "),
        ("sample,er\n0,1\n6,1\n", "no sample 6, expected 0 to 5"),
        ("sample,er\n00,1\n", "no sample 00"),
        ("sample,er\n1,1\n", "no line for 2 of the samples of .*, such as sample '3'"),
    ],
)
def test_files_that_do_not_fit_are_refused(folder, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        set_targets(written(folder, text), [ShardDataset(folder, "train")], folder, True)


def test_numbers_must_be_finite_and_files_there(tmp_path):
    file = tmp_path / "a.csv"
    with pytest.raises(ValueError, match=r"cannot read .*a.csv"):
        read_targets(file, binary=False)
    file.write_text("slide,age\na,inf\n")
    with pytest.raises(ValueError, match="line 2, age: inf is not finite"):
        read_targets(file, binary=False)
    file.write_text("slide,age\na,-1\n")
    assert read_targets(file, binary=False)[2] == {"a": [-1]}
