from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data.feature_file import write_features
from spatialdl.predicting.bag_records import BagOutcome, BagRecords
from tests.predicting.runs import command, known_network

OUTCOME = BagOutcome("a", 3, np.array([0.1, 1 / 3]), "no heat map", files=["a.tif"])


def records(folder: Path, *words: str) -> BagRecords:
    given = command("ckpt_path=x", "features=y", *words)
    return BagRecords(folder, known_network(("a", "b")), given)


def test_a_record_comes_back_as_it_was(tmp_path):
    records(tmp_path).save(OUTCOME, "key")
    assert records(tmp_path).load("a", "key") is None  # its file is not there
    (tmp_path / "a.tif").touch()
    found = records(tmp_path).load("a", "key")
    assert found is not None
    assert np.array_equal(found.values, OUTCOME.values)
    assert (found.name, found.tiles, found.remark) == ("a", 3, "no heat map")
    assert found.done_before
    assert records(tmp_path).load("a", "another") is None
    assert records(tmp_path).load("a", None) is None
    assert records(tmp_path, "overwrite=true").load("a", "key") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("values", [1, 2]), ("values", [float("nan")]), ("values", "x"), ("tiles", -1), ("files", 1)],
)
def test_a_damaged_record_is_none(name, value, tmp_path):
    (tmp_path / "a.tif").touch()
    records(tmp_path).save(OUTCOME, "key")
    [path] = (tmp_path / "records").iterdir()
    assert records(tmp_path).load("a", "key") is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert records(tmp_path).load("a", "key") is None
    path.write_text("[]")
    assert records(tmp_path).load("a", "key") is None


def test_what_failed_is_not_recorded(tmp_path):
    records(tmp_path).save(BagOutcome("a", 3, problem="damaged"), "key")
    assert not (tmp_path / "records").exists()


def test_a_key_follows_features_slide_and_settings(tmp_path):
    slide = tmp_path / "a.tif"
    slide.touch()
    bag = write_features(tmp_path / "a.h5", np.ones((2, 3)), None)
    found = {
        records(tmp_path).key(bag, None),
        records(tmp_path).key(bag, slide),
        records(tmp_path, "maps=false").key(bag, None),
        records(tmp_path, "precision=float64").key(bag, None),
    }
    assert records(tmp_path, "table=parquet").key(bag, None) in found
    bag = write_features(tmp_path / "a.h5", np.ones((3, 3)), None)
    found.add(records(tmp_path).key(bag, None))
    assert len(found) == 5
    bag.path.unlink()
    assert records(tmp_path).key(bag, None) is None
