"""Splits of slides without leaks: `spatialdl-split`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spatialdl.data.tables import in_two_splits
from spatialdl.slides.cohort.leaks import pairs_apart
from spatialdl.slides.cohort.split_cli import assign, counts_of, groups_of, strata_of
from spatialdl.slides.cohort.split_cli import main as split_command
from spatialdl.slides.synthetic import write_synthetic_slide
from tests.inference.evaluating.cases import read_rows as rows_of

ROWS = [f"s{k}.tiff,{('tumour', 'normal')[k % 2]},p{k // 2},{30 + k}" for k in range(24)]


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.csv"
    path.write_text("\n".join(["slide,label,patient,age", *ROWS]) + "\n")
    return path


def test_folds_hold_each_patient_once(tmp_path, labels, capsys):
    out = tmp_path / "folds"
    wanted = ["--folds", "4", "--test", "0.2", "--stratify", "label", "--out", str(out)]
    assert split_command([str(labels), *wanted]) == 0
    assert "24 slides in 12 groups, by patient" in capsys.readouterr().out
    held_out: list[str] = []
    tests = []
    for fold in range(4):
        rows = rows_of(out / f"fold_{fold}.csv")
        assert [row["slide"] for row in rows] == [f"s{k}.tiff" for k in range(24)]
        splits = {row["patient"]: set() for row in rows}
        for row in rows:
            splits[row["patient"]].add(row["split"])
        assert all(len(found) == 1 for found in splits.values())
        held_out += [row["slide"] for row in rows if row["split"] == "val"]
        tests.append([row["slide"] for row in rows if row["split"] == "test"])
        assert split_command([str(out / f"fold_{fold}.csv"), "--check"]) == 0
    assert all(found == tests[0] for found in tests)
    assert sorted([*held_out, *tests[0]]) == sorted(f"s{k}.tiff" for k in range(24))


def test_without_folds_there_is_one_table(tmp_path, labels):
    labels.write_text(labels.read_text().replace("slide", "filename", 1))
    shares = ["--val", "0.25", "--test", "0", "--out", str(tmp_path / "s.csv")]
    assert split_command([str(labels), *shares]) == 0
    splits = [row["split"] for row in rows_of(tmp_path / "s.csv")]
    assert (splits.count("train"), splits.count("val")) == (18, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--folds", "3"], "--out is missing"),
        (["--folds", "3", "--val", "0.2", "--out", "x"], "--val cannot be combined with --folds"),
        (["--val", "0.6", "--test", "0.5", "--out", "x"], "leave no slides for train"),
        (["--by", "nothing", "--out", "x"], "no column nothing"),
        (["--folds", "13", "--out", "x"], "12 groups cannot be divided over 13 splits"),
        (["--slides", "/nowhere", "--out", "x"], "there is no such file"),
        (["--check"], "no column split"),
    ],
)
def test_misuse_writes_nothing(tmp_path, labels, capsys, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    assert split_command([str(labels), *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_leaks_are_found(labels, capsys):
    rows = labels.read_text().splitlines()
    splits = ["split", *(["train"] * 11), *(["val"] * 13)]
    labels.write_text("\n".join(map(",".join, zip(rows, splits, strict=True))))
    assert split_command([str(labels), "--check"]) == 1
    assert "leak: patient p5 is in train and val" in capsys.readouterr().out
    assert split_command([str(labels), "--check", "--by", "age"]) == 0


def test_slides_that_show_the_same_stay_together(tmp_path, capsys):
    for seed in range(3):
        write_synthetic_slide(tmp_path / f"s{seed}.tiff", "ring", (600, 600), seed=seed)
    (tmp_path / "copy.tiff").write_bytes((tmp_path / "s0.tiff").read_bytes())
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label\ncopy,a\ns0,a\ns1,a\ns2,a\n")
    out = tmp_path / "out.csv"
    shares = ["--val", "0.5", "--test", "0", "--out", str(out)]
    assert split_command([str(labels), "--slides", str(tmp_path), *shares]) == 0
    assert "copy, s0 have the same image" in capsys.readouterr().err
    splits = [row["split"] for row in rows_of(out)]
    assert splits[0] == splits[1] != splits[2] == splits[3]
    labels.write_text("slide,label,split\ncopy,a,val\ns0,a,train\n")
    assert split_command([str(labels), "--slides", str(tmp_path), "--check"]) == 1
    assert "copy (val) and s0 (train) have the same image" in capsys.readouterr().out


def test_classes_and_sizes_are_as_wanted():
    rng = np.random.default_rng(0)
    patients = [f"p{k}" for k in rng.integers(0, 120, 400)]
    labels = list(rng.choice(["a", "b", "c"], 400, p=[0.6, 0.3, 0.1]))
    groups = groups_of([patients])
    counts = counts_of(groups, labels)
    assert counts.sum() == 400
    found = np.array(assign(counts, [0.7, 0.15, 0.15], seed=1))
    for split, share in enumerate([0.7, 0.15, 0.15]):
        np.testing.assert_allclose(counts[found == split].sum(0), share * counts.sum(0), atol=3)


@given(st.integers(2, 5), st.lists(st.integers(1, 9), min_size=5, max_size=30), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_every_split_gets_a_group(splits, sizes, seed):
    counts = np.array(sizes, float)[:, None]
    found = assign(counts, [1 / splits] * splits, seed)
    assert set(found) == set(range(splits))
    assert found == assign(counts, [1 / splits] * splits, seed)
    assert sorted(assign(np.ones((3, 1)), [0.98, 0.01, 0.01], 0)) == [0, 1, 2]


def test_reasons_to_stay_together_add_up():
    patients = ["p", "q", None, "q", "r", None]
    alike = [0, None, 0, None, None, None]
    assert groups_of([patients, alike]) == [0, 1, 0, 1, 2, 3]


def test_numbers_are_cut_into_quarters_and_words_are_not():
    ages = [str(k) for k in range(20)] + [""]
    found = strata_of([ages])
    assert [found.count(f"quarter {k}") for k in (1, 2, 3, 4)] == [5, 5, 5, 5]
    assert found[-1] == ""
    assert strata_of([["x", "y"], ["1", "2"]]) == ["x 1", "y 2"]


def test_values_in_two_splits_are_found():
    splits = ["train", "val", "train", "test", "train"]
    assert in_two_splits(["p", "p", "q", "", None], splits) == {"p": ["train", "val"]}
    assert in_two_splits(["", "", None, None, "r"], splits) == {}
    assert pairs_apart([[0, 2], [0, 1, 2]], splits) == [(0, 1), (1, 2)]
