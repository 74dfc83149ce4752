"""Slides of one command in this process, their records and tables; see also test_predict.py."""

from __future__ import annotations

import csv
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, ZIP_STORED, ZipFile

import numpy as np
import pyarrow.parquet
import pytest

from spatialdl.comm.single_process import SingleProcess
from spatialdl.inference.predicting.batch import run
from spatialdl.inference.predicting.records import (
    PredictionRecord,
    SlideReport,
    SlideResult,
    save_tables,
    slide_columns,
    tile_columns,
)
from tests.inference.evaluating.cases import read_rows
from tests.inference.predicting.runs import NETWORK, command, train, write_slide

ASKED = ("level=0", "min_tissue=0.8", "maps=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("batch")
    train(path / "run", *NETWORK, "trainer.ema=0.5", "seed=1")
    write_slide(path / "a.tiff", 203, 187)
    write_slide(path / "b.tiff", 190, 201, seed=1)
    return path


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory) -> Path:
    """A run directory with both slides predicted."""
    path = tmp_path_factory.mktemp("done")
    predicted(folder, path)
    return path


def predicted(folder: Path, out: Path, *words: str) -> list[dict[str, str]]:
    """The rows of slides.csv."""
    out.mkdir(exist_ok=True)
    named = f"slides=[{folder / 'a.tiff'},{folder / 'b.tiff'}]"
    config = command(f"ckpt_path={folder / 'run'}", named, *ASKED, *words)
    assert run(config, out, SingleProcess())
    return read_rows(out / "slides.csv")


@pytest.mark.parametrize(
    "other",
    ["average=false", "min_tissue=0.2", "slide_mpp=0.5 mpp=0.8 level=null"],
)
def test_slides_are_done_only_if_all_was_as_it_is(other, folder, done, tmp_path):
    """Otherwise a command with other settings would reuse the last predictions."""
    before = read_rows(shutil.copytree(done, tmp_path / "out") / "slides.csv")
    after = predicted(folder, tmp_path / "out", *other.split())
    assert after == predicted(folder, tmp_path / "anew", *other.split())
    assert after != before


def test_another_network_of_the_same_name_and_step_is_another_one(folder, tmp_path):
    for name in ("a.tiff", "b.tiff"):
        shutil.copy2(folder / name, tmp_path / name)
    found = []
    for seed in (2, 3):  # trained anew into the same run directory
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        train(tmp_path / "run", *NETWORK, f"seed={seed}")
        found.append(predicted(tmp_path, tmp_path / "out"))
    assert found[1] != found[0]
    assert found[1] == predicted(tmp_path, tmp_path / "anew")
    write_slide(tmp_path / "b.tiff", 190, 201, seed=2)  # so is another slide
    after = predicted(tmp_path, tmp_path / "out")
    assert after[0] == found[1][0]
    assert after[1] != found[1][1]


def test_slides_that_are_done_are_not_predicted_again(folder, done, tmp_path, caplog):
    before = read_rows(shutil.copytree(done, tmp_path / "out") / "slides.csv")
    with caplog.at_level("INFO"):
        assert predicted(folder, tmp_path / "out") == before
        assert caplog.text.count("is already predicted") == 2
        caplog.clear()
        assert predicted(folder, tmp_path / "out", "overwrite=true") == before
        assert "is already predicted" not in caplog.text


def record(
    name: str, *values: tuple[float, ...], span: tuple[float, float] | None = (16.0, 8.0)
) -> PredictionRecord:
    places = np.arange(2 * len(values)).reshape(-1, 2)
    return PredictionRecord(name, "key", places, span, np.array(values), 1, ["a.tif"])


def result(name: str, *values: tuple[float, ...], **more: Any) -> SlideResult:
    return SlideResult(SlideReport(name, len(values)), record(name, *values, **more))


RECORDS = [
    record("a", (0.2, 0.8), (0.6, 0.4), (0.55, 0.45)),
    record("b", (0.1, 0.9)),
]
RESULTS = [SlideResult(SlideReport(one.name, len(one.values)), one) for one in RECORDS]


def test_a_row_a_tile_and_a_row_a_slide():
    tiles = tile_columns(RECORDS, ["no", "yes"], "classification")
    assert tiles["slide"] == ["a", "a", "a", "b"]
    assert tiles["predicted"] == ["yes", "no", "no", "yes"]
    assert (tiles["x"], tiles["y"]) == ([0, 2, 4, 0], [1, 3, 5, 1])
    assert (tiles["width"], tiles["height"]) == ([8.0] * 4, [16.0] * 4)
    assert tiles["probability_no"] == [0.2, 0.6, 0.55, 0.1]
    slides = slide_columns(RESULTS, ["no", "yes"], "classification")
    assert (slides["slide"], slides["tiles"]) == (["a", "b"], [3, 1])
    assert slides["predicted"] == ["yes", "yes"]
    assert (slides["status"], slides["reason"]) == (["processed"] * 2, ["", ""])
    assert slides["vote"] == ["no", "yes"]
    assert np.allclose(slides["probability_yes"], [0.55, 0.9])


def test_slides_that_failed_have_a_row():
    results = [
        SlideResult(SlideReport("x", problem="cannot open slide x", failed=True)),
        RESULTS[1],
        SlideResult(
            SlideReport("a", 3, remark="1 tile could not be read", failed=True), RECORDS[0]
        ),
    ]
    slides = slide_columns(results, ["no", "yes"], "classification")
    assert slides["slide"] == ["x", "b", "a"]
    assert slides["tiles"] == [0, 1, 3]
    assert slides["predicted"] == [None, "yes", "yes"]
    assert slides["probability_no"][:2] == [None, 0.1]
    assert slides["status"] == ["failed", "processed", "damaged"]
    assert slides["reason"] == ["cannot open slide x", "", "1 tile could not be read"]


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("multilabel", ["probability_p", "probability_q"]),  # which are not one of several
        ("regression", ["predicted_p", "predicted_q"]),
        ("segmentation", ["predicted", "probability_p", "probability_q"]),
    ],
)
def test_columns_of_a_task(task, columns):
    tiles = tile_columns(RECORDS, ["p", "q"], task)
    slides = slide_columns(RESULTS, ["p", "q"], task)
    assert list(tiles) == ["slide", "x", "y", "width", "height", *columns]
    assert [one for one in slides if one != "vote"] == [
        *("slide", "tiles", *columns, "status", "reason")
    ]
    assert ("vote" in slides) == (task == "segmentation")
    assert tiles[columns[-1]] == [0.8, 0.4, 0.45, 0.9]
    assert np.allclose(slides[columns[-1]], [0.55, 0.9])


def read_table(path: Path) -> dict[str, list[object]]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pydict()
    with path.open(newline="", encoding="utf-8") as lines:
        head, *rows = csv.reader(lines)
    return {name: [row[number] for row in rows] for number, name in enumerate(head)}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_and_names_come_back_as_they_were(kind, tmp_path):
    heads = []
    for found in ([], RESULTS):  # also without a slide
        paths = save_tables(tmp_path, found, ["no", "yes"], "classification", kind)
        assert [path.name for path in paths] == [f"predictions.{kind}", f"slides.{kind}"]
        heads.append([list(read_table(path)) for path in paths])
    assert heads[0] == heads[1]
    names = ['a, "b"\nc', "näme", "half \ud800"]  # the last is no Unicode
    values = np.random.default_rng(0).random((3, 2))
    results = [result(name, tuple(row)) for name, row in zip(names, values, strict=True)]
    path, _ = save_tables(tmp_path, results, ["p", "ä,q"], "regression", kind)
    found = read_table(path)
    assert found["slide"] == [*names[:2], r"half \ud800"]
    assert [float(value) for value in found["predicted_ä,q"]] == values[:, 1].tolist()


def test_tiles_of_which_nobody_knows_the_size_have_none(tmp_path):
    results = [result("a", (0.2, 0.8), span=None), result("b", (0.1, 0.9))]
    for kind, nothing in (("csv", ""), ("parquet", None)):
        path, _ = save_tables(tmp_path, results, ["no", "yes"], "classification", kind)
        found = read_table(path)
        assert found["width"][0] == found["height"][0] == nothing
        assert (float(found["width"][1]), float(found["height"][1])) == (8, 16)


@pytest.mark.parametrize("how", ["large", "encrypted", "packed", "cut"])
def test_a_record_that_was_made_to_break_its_reader_is_none(how, tmp_path):
    (tmp_path / "a.tif").touch()
    record("a", (0.2, 0.8)).save(tmp_path)
    found = PredictionRecord.load(tmp_path, "a", "key")
    assert (found.span, found.left_out, list(found.files)) == ((16.0, 8.0), 1, ["a.tif"])
    assert found.values.tolist() == [[0.2, 0.8]]
    assert PredictionRecord.load(tmp_path, "a", "another") is None
    (path,) = (tmp_path / "records").iterdir()
    with np.load(path) as found:
        members = {f"{name}.npy": array_file(found[name]) for name in found.files}
    if how == "large":
        old, new = b"(1, 2), }".ljust(40), b"(1000000000000, 2), }".ljust(40)
        assert old in members["places.npy"]
        members["places.npy"] = members["places.npy"].replace(old, new)
    with ZipFile(path, "w", ZIP_LZMA if how == "packed" else ZIP_STORED) as out:
        for name, data in members.items():
            out.writestr(name, data)
    data = bytearray(path.read_bytes())
    if how == "encrypted":
        data[6] |= 1
        data[data.index(b"PK\1\2") + 8] |= 1
    elif how == "packed":
        data[60:70] = b"\xff" * 10
    elif how == "cut":
        del data[-30:]
    path.write_bytes(data)
    assert PredictionRecord.load(tmp_path, "a", "key") is None


def array_file(array: np.ndarray) -> bytes:
    out = BytesIO()
    np.save(out, array)
    return out.getvalue()
