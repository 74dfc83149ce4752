from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset, ShardWriter, statistics
from spatialdl.data.statistics import FILE, statistics_of


def write(path: Path, dtype: str = "uint8", kind: str = "regions", constant: bool = False):
    draw, pixels = np.random.default_rng(0), []
    with ShardWriter(path, ["a"], kind=kind, overwrite=True) as writer:
        for number, size in enumerate([(7, 5), (11, 13), (4, 9), (6, 6)]):
            shape = (*((3,) if kind == "volumes" else ()), *size, 2)
            image = draw.integers(0, 1000 if dtype == "uint16" else 256, shape).astype(dtype)
            if dtype.startswith("float"):
                image = image + np.array([1e7, 0], dtype)  # what naive sums of squares lose
            if constant:
                image[..., 1] = 3
            split = "val" if number == 3 else "train"
            writer.add(image, 0, split)
            if split == "train":
                pixels.append(image.reshape(-1, 2).astype(np.float64))
    return ShardDataset(path, "train"), np.concatenate(pixels)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("uint8", "regions"), ("uint16", "regions"), ("float64", "volumes")]
)
def test_they_are_those_of_all_pixels_of_the_split(dtype, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "_AT_ONCE", 20)
    source, pixels = write(tmp_path / "set", dtype, kind)
    found = statistics_of(source, "train", SingleProcess())
    assert found.mean == pytest.approx(pixels.mean(0), rel=1e-11)
    assert found.std == pytest.approx(pixels.std(0), rel=1e-11)


def test_they_are_kept_until_the_manifest_changes(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source, _ = write(tmp_path / "set")
    found = statistics_of(source, "train", SingleProcess())
    assert "computing mean and std" in caplog.text
    caplog.clear()
    assert statistics_of(source, "train", SingleProcess()) == found
    assert not caplog.text
    whole = statistics_of(ShardDataset(tmp_path / "set"), None, SingleProcess())
    assert whole != found
    kept = json.loads((tmp_path / "set" / FILE).read_text())["splits"]
    assert sorted(kept) == ["", "train"]
    caplog.clear()
    (tmp_path / "set" / FILE).write_text('{"manifest"')
    assert statistics_of(source, "train", SingleProcess()) == found
    assert "computing mean and std" in caplog.text
    other, _ = write(tmp_path / "set", "uint16")
    assert statistics_of(other, "train", SingleProcess()) != found


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog, monkeypatch):
    source, _ = write(tmp_path / "set")

    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statistics, "save_json", full)
    statistics_of(source, "train", SingleProcess())
    assert "cannot write" in caplog.text


def test_what_cannot_be_divided_by_is_refused(tmp_path):
    source, _ = write(tmp_path / "set", constant=True)
    with pytest.raises(
        ValueError, match=r"data.std=dataset: channel 1 of all images .* is constant"
    ):
        statistics_of(source, "train", SingleProcess())
    with ShardWriter(tmp_path / "nan", ["a"]) as writer:
        writer.add(np.full((3, 4, 1), np.nan), 0, "train")
    with pytest.raises(ValueError, match="have NaN or infinite pixels"):
        statistics_of(ShardDataset(tmp_path / "nan", "train"), "train", SingleProcess())
