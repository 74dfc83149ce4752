from __future__ import annotations

from io import BytesIO
from zipfile import ZIP_LZMA, ZIP_STORED, ZipFile

import numpy as np
import pytest

from spatialdl.predicting.records import PredictionRecord, key_of


def record(name: str, *values: tuple[float, float]) -> PredictionRecord:
    places = np.arange(2 * len(values)).reshape(-1, 2)
    return PredictionRecord(name, "key", places, (16.0, 8.0), np.array(values), 1, ["a.tif"])


def test_a_record_comes_back_only_if_nothing_has_changed(tmp_path):
    given = record("a", (0.2, 0.8), (0.6, 0.4))
    given.save(tmp_path)
    assert PredictionRecord.load(tmp_path, "a", "key") is None  # its file is not there
    (tmp_path / "a.tif").touch()
    found = PredictionRecord.load(tmp_path, "a", "key")
    assert found is not None
    assert np.array_equal(found.values, given.values)
    assert np.array_equal(found.places, given.places)
    assert (found.span, found.left_out, list(found.files)) == ((16.0, 8.0), 1, ["a.tif"])
    assert PredictionRecord.load(tmp_path, "a", "another") is None
    assert PredictionRecord.load(tmp_path, "b", "key") is None
    (path,) = (tmp_path / "records").iterdir()
    path.write_bytes(path.read_bytes()[:-30])
    assert PredictionRecord.load(tmp_path, "a", "key") is None


@pytest.mark.parametrize("how", ["large", "encrypted", "packed"])
def test_a_record_that_was_made_to_break_its_reader_is_none(how, tmp_path):
    (tmp_path / "a.tif").touch()
    record("a", (0.2, 0.8)).save(tmp_path)
    assert PredictionRecord.load(tmp_path, "a", "key") is not None
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
    path.write_bytes(data)
    assert PredictionRecord.load(tmp_path, "a", "key") is None


def array_file(array: np.ndarray) -> bytes:
    out = BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_a_key_changes_with_settings_and_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1")
    keys = {key_of([1], path), key_of([2], path), key_of([1], None)}
    path.write_bytes(b"22")
    assert len(keys | {key_of([1], path)}) == 4
