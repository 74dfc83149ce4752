"""Cohorts: what is measured and shown of their slides, and splits without leaks."""

from __future__ import annotations

import csv
from math import isnan
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from spatialdl.slides.cohort.command import main as split_command
from spatialdl.slides.cohort.describing import main
from spatialdl.slides.cohort.measuring import MEASURES, SlideMeasures, measure_slide, measure_slides
from spatialdl.slides.cohort.outliers import outlying
from spatialdl.slides.cohort.page import members_of, save_cohort
from spatialdl.slides.cohort.splitting import (
    assign,
    counts_of,
    groups_of,
    in_two_splits,
    pairs_apart,
    strata_of,
)
from spatialdl.slides.command import main as tile
from spatialdl.slides.synthetic.drawing import write_synthetic_slide


def test_slides_labels_tiles_and_predictions_meet(tmp_path, synthetic, capsys):
    slides = synthetic["ring"].parent
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label,split,patient\nring.tiff,ring,train,p\nstrand,strand,val,q\n")
    tiles = tmp_path / "set"
    words = ["--tile-size", "256", "--level", "0", "--labels", str(labels)]
    assert tile([str(slides), "--out", str(tiles), *words]) == 0
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "slides.csv").write_text(
        "slide,tiles,predicted,probability_ring\nring,3,strand,0.123456\nstrand,4,strand,0.2\n"
    )
    more = ["--tiles", str(tiles), "--predictions", str(tmp_path / "predictions")]
    out = tmp_path / "new" / "cohort"
    assert main([str(slides), "--labels", str(labels), *more, "--out", str(out)]) == 0
    assert "ring: predicted strand, the label is ring" in capsys.readouterr().out
    with (out / "cohort.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["slide"] for row in rows] == ["ring", "strand"]
    assert rows[0]["probability_ring"] == "0.1235"
    assert rows[0]["patient"] == "p"
    assert float(rows[0]["tiles"]) > 10
    assert (out / "cohort.html").stat().st_size > 5000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--labels", "/nowhere.csv"], "cannot read /nowhere.csv"),
        (
            ["--predictions", "/nowhere"],
            "cannot read /nowhere/slides.csv: No such file",
        ),
        (["--tiles", "/nowhere"], "/nowhere"),
    ],
)
def test_misuse_is_refused_before_slides_are_measured(tmp_path, synthetic, capsys, more, message):
    out = tmp_path / "out"
    assert main([str(synthetic["ring"]), *more, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def write(path: Path, image: np.ndarray, mpp: float | None = 0.5) -> Path:
    pixels = 1e4 / (mpp or 0.5)
    more = {"resolution": (pixels, pixels), "resolutionunit": "CENTIMETER"} if mpp else {}
    tifffile.imwrite(path, image, tile=(64, 64), photometric="rgb", **more)
    return path


@pytest.fixture(scope="module")
def stained() -> np.ndarray:
    """A quarter of it is noise of the colour of hematoxylin, the rest is glass."""
    image = np.full((800, 1200, 3), 245, np.uint8)
    noise = np.random.default_rng(0).integers(-40, 40, (400, 600, 1))
    image[200:600, 300:900] = np.clip(np.array([110, 70, 150]) + noise, 0, 255)
    return image


def test_tissue_has_its_area(tmp_path, stained):
    found = measure_slide("a", write(tmp_path / "a.tif", stained))
    assert found.problem == ""
    assert found.numbers["tissue_percent"] == pytest.approx(25, abs=1.5)
    assert found.numbers["mpp"] == pytest.approx(0.5)
    area = 0.25 * 800 * 1200 * 0.5**2 / 1e6
    assert found.numbers["tissue_mm2"] == pytest.approx(area, rel=0.06)
    assert set(found.numbers) <= set(MEASURES)
    assert found.scanner == "generic-tiff"


def test_real_slides_are_measured_by_processes(real):
    slides = {
        "good": real / "CMU-1-Small-Region.svs",
        "part": real / "bad" / "corrupt-some-tiles.svs",
        "none": real / "bad" / "truncated-half.svs",
    }
    server = forkserver._forkserver._forkserver_pid
    found = measure_slides(slides, jobs=2, progress=False)
    # it began one that is not made ready, and processes that read batches were ranks of MPI
    assert forkserver._forkserver._forkserver_pid == server
    assert [one.name for one in found] == list(slides)
    assert found[0].scanner == "aperio CPAPERIOCS"
    assert found[0].numbers["tissue_mm2"] == pytest.approx(0.6, abs=0.1)
    assert "cannot be read" in found[1].problem
    assert "cannot open" in found[2].problem


def test_what_is_blurred_or_paler_measures_so(tmp_path, stained):
    sharp, smooth, pale = (
        measure_slide(name, write(tmp_path / f"{name}.tif", image.astype(np.uint8))).numbers
        for name, image in {
            "sharp": stained,
            "smooth": ndimage.gaussian_filter(stained, (4, 4, 0)),
            "pale": 255 - (255 - stained.astype(float)) * 0.5,
        }.items()
    )
    assert smooth["blur"] > sharp["blur"] + 0.2
    assert pale["brightness"] > sharp["brightness"] + 30
    assert pale["hematoxylin"] < sharp["hematoxylin"]


def test_glass_and_what_cannot_be_read_have_no_numbers(tmp_path):
    image = np.full((300, 300, 3), 245, np.uint8)
    found = measure_slide("a", write(tmp_path / "a.tif", image, mpp=None))
    assert found.numbers == {"tissue_percent": 0.0}
    assert found.picture
    (tmp_path / "a.svs").write_bytes(b"no slide")
    found = measure_slide("a", tmp_path / "a.svs")
    assert "a.svs" in found.problem
    assert found.numbers == {}


def cohort(**columns: list[float]) -> list[SlideMeasures]:
    rows = zip(*columns.values(), strict=True)
    return [
        SlideMeasures(
            str(k), None, {n: v for n, v in zip(columns, row, strict=True) if not isnan(v)}
        )
        for k, row in enumerate(rows)
    ]


def test_one_slide_stands_out_and_the_others_do_not():
    blur = [0.3, 0.31, 0.29, 0.33, 0.7, 0.32, float("nan")]
    found = outlying(cohort(blur=blur, mpp=[0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5]))
    assert [list(scores) for scores in found] == [[], [], [], ["mpp"], ["blur"], [], []]
    assert found[4]["blur"] == pytest.approx((0.7 - 0.315) / (1.4826 * 0.015))
    assert found[3]["mpp"] < -3.5


def test_areas_are_compared_by_factors():
    areas = [1.0, 2, 4, 8, 16, 32, 64]
    assert outlying(cohort(tissue_mm2=areas)) == [{}] * 7
    assert list(outlying(cohort(brightness=[*areas[:6], 400.0]))[6]) == ["brightness"]


@pytest.mark.parametrize("values", [[0.5] * 6, [0.1, 0.2, 0.3, 9.0], [float("nan")] * 6])
def test_alike_few_or_unknown_values_have_no_outliers(values):
    assert outlying(cohort(mpp=values)) == [{}] * len(values)


def measured_slides() -> tuple[list[SlideMeasures], dict[str, dict[str, str]]]:
    measured = [
        SlideMeasures(f"s{k}", Path(f"{k}.svs"), {"blur": 0.3 + k / 100, "mpp": 0.5}, "aperio X")
        for k in range(6)
    ]
    measured.append(SlideMeasures("far", Path("f.svs"), {"blur": 0.9, "mpp": 0.5}, "aperio X"))
    measured.append(SlideMeasures("<b>", Path("b.svs"), problem="cannot open <it>"))
    facts = {
        f"s{k}": {"label": "ab"[k % 2], "split": ("train", "val")[k // 4], "patient": f"p{k // 2}"}
        for k in range(6)
    }
    facts["s5"]["predicted"] = "a"
    facts["s4"]["predicted"] = "a"
    return measured, facts


def test_page_and_table_have_all_slides_the_oddest_first(tmp_path):
    members = members_of(*measured_slides())
    save_cohort(tmp_path, members)
    with (tmp_path / "cohort.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["slide"] for row in rows] == [member.measures.name for member in members]
    assert [row["slide"] for row in rows[:3]] == ["<b>", "s5", "far"]
    assert [row["remarks"] for row in rows[:2]] == [
        *("cannot open <it>", "predicted a, the label is b")
    ]
    assert rows[2]["remarks"].startswith("blur is high: 0.9")
    assert not any(row["remarks"] for row in rows[3:])
    page = (tmp_path / "cohort.html").read_text()
    assert "<title>Cohort of 8 slides</title>" in page
    assert "cannot open &lt;it&gt;" in page
    assert "<b>" not in page.replace("<body>", "")
    assert page.count("<svg") == 1
    flat = page.replace("\n", "")
    assert '<td>patients</td><td class="number">2</td><td class="number">1</td>' in flat
    assert '<td>slides</td><td class="number">4</td><td class="number">2</td>' in flat


def test_nothing_that_is_known_is_no_reason_to_have_no_page(tmp_path):
    save_cohort(tmp_path, members_of([SlideMeasures("a", None, problem="gone")], {}))
    assert "gone" in (tmp_path / "cohort.html").read_text()


ROWS = [f"s{k}.tiff,{('tumour', 'normal')[k % 2]},p{k // 2},{30 + k}" for k in range(24)]


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.csv"
    path.write_text("\n".join(["slide,label,patient,age", *ROWS]) + "\n")
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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


@pytest.mark.parametrize("key", ["slide", "filename"])
def test_without_folds_there_is_one_table(tmp_path, labels, key):
    labels.write_text(labels.read_text().replace("slide", key, 1))
    assert (
        split_command(
            [str(labels), "--val", "0.25", "--test", "0", "--out", str(tmp_path / "s.csv")]
        )
        == 0
    )
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
    labels.write_text("slide,label,split\ncopy,a,val\ns0,a,train\ns1,a,val\ns2,a,val\n")
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


def test_a_small_split_is_not_left_empty():
    assert sorted(assign(np.ones((3, 1)), [0.98, 0.01, 0.01], 0)) == [0, 1, 2]
    with pytest.raises(ValueError, match="2 groups cannot be divided over 3 splits"):
        assign(np.ones((2, 1)), [0.4, 0.3, 0.3], 0)


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
    names = [f"name {k}" for k in range(12)]
    assert strata_of([names]) == names


def test_values_in_two_splits_are_found():
    splits = ["train", "val", "train", "test", "train"]
    assert in_two_splits(["p", "p", "q", "", None], splits) == {"p": ["train", "val"]}
    assert in_two_splits(["", "", None, None, "r"], splits) == {}
    assert pairs_apart([[0, 2], [0, 1, 2]], splits) == [(0, 1), (1, 2)]
