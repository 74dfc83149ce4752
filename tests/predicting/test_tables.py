from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from spatialdl.predicting.records import PredictionRecord
from spatialdl.predicting.tables import SlideReport, save_tables, slide_columns, tile_columns


def record(
    name: str, *values: tuple[float, ...], span: tuple[float, float] | None = (16.0, 8.0)
) -> PredictionRecord:
    places = np.arange(2 * len(values)).reshape(-1, 2)
    return PredictionRecord(name, "key", places, span, np.array(values), 1, ["a.tif"])


RECORDS = [
    record("a", (0.2, 0.8), (0.6, 0.4), (0.55, 0.45)),
    record("b", (0.1, 0.9)),
]
REPORTS = [SlideReport("a", 3), SlideReport("b", 1)]


def test_a_row_a_tile_and_a_row_a_slide():
    tiles = tile_columns(RECORDS, ["no", "yes"], "classification")
    assert tiles["slide"] == ["a", "a", "a", "b"]
    assert tiles["predicted"] == ["yes", "no", "no", "yes"]
    assert (tiles["x"], tiles["y"]) == ([0, 2, 4, 0], [1, 3, 5, 1])
    assert (tiles["width"], tiles["height"]) == ([8.0] * 4, [16.0] * 4)
    assert tiles["probability_no"] == [0.2, 0.6, 0.55, 0.1]
    slides = slide_columns(RECORDS, REPORTS, ["no", "yes"], "classification")
    assert (slides["slide"], slides["tiles"]) == (["a", "b"], [3, 1])
    assert slides["predicted"] == ["yes", "yes"]
    assert (slides["status"], slides["reason"]) == (["processed"] * 2, ["", ""])
    assert slides["vote"] == ["no", "yes"]
    assert np.allclose(slides["probability_yes"], [0.55, 0.9])


def test_slides_that_failed_have_a_row():
    reports = [
        SlideReport("x", problem="cannot open slide x", failed=True),
        REPORTS[1],
        SlideReport("a", 3, remark="1 tile could not be read", failed=True),
    ]
    slides = slide_columns(RECORDS, reports, ["no", "yes"], "classification")
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
    slides = slide_columns(RECORDS, REPORTS, ["p", "q"], task)
    assert list(tiles) == ["slide", "x", "y", "width", "height", *columns]
    assert [one for one in slides if one != "vote"] == [
        *("slide", "tiles", *columns, "status", "reason")
    ]
    assert ("vote" in slides) == (task == "segmentation")
    assert tiles[columns[-1]] == [0.8, 0.4, 0.45, 0.9]
    assert np.allclose(slides[columns[-1]], [0.55, 0.9])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_tables_without_a_slide_have_the_columns_of_those_with_slides(kind, task, tmp_path):
    heads = []
    for name, records in (("none", []), ("some", RECORDS)):
        (tmp_path / name).mkdir()
        paths = save_tables(tmp_path / name, records, [], ["no", "yes"], task, kind)
        assert [path.name for path in paths] == [f"predictions.{kind}", f"slides.{kind}"]
        heads.append([list(read(path)) for path in paths])
    assert heads[0] == heads[1]


def read(path: Path) -> dict[str, list[object]]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pydict()
    with path.open(newline="", encoding="utf-8") as lines:
        head, *rows = csv.reader(lines)
    return {name: [row[number] for row in rows] for number, name in enumerate(head)}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_and_names_come_back_as_they_were(kind, tmp_path):
    names = ['a, "b"\nc', "näme", "half \ud800"]  # the last is no Unicode
    values = np.random.default_rng(0).random((3, 2))
    records = [record(name, tuple(row)) for name, row in zip(names, values, strict=True)]
    path, _ = save_tables(tmp_path, records, [], ["p", "ä,q"], "regression", kind)
    found = read(path)
    assert found["slide"] == [*names[:2], r"half \ud800"]
    assert [float(value) for value in found["predicted_ä,q"]] == values[:, 1].tolist()


def test_tiles_of_which_nobody_knows_the_size_have_none(tmp_path):
    records = [record("a", (0.2, 0.8), span=None), record("b", (0.1, 0.9))]
    for kind, nothing in (("csv", ""), ("parquet", None)):
        path, _ = save_tables(tmp_path, records, [], ["no", "yes"], "classification", kind)
        found = read(path)
        assert found["width"][0] == found["height"][0] == nothing
        assert (float(found["width"][1]), float(found["height"][1])) == (8, 16)
