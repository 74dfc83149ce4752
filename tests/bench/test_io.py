from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from spatialdl.bench import (
    io,
    io_loader,
    io_memory,
    io_reading,
    io_report,
    io_staging,
    io_strategies,
)
from spatialdl.bench.io_reading import drop, resident
from spatialdl.data.saving import sync

SMALL = {
    "reading": "--side 1100 --boxes 3 --rounds 1",
    "feeding": "--tile 40 --compute 0.01 --steps 6 --skip 2 --workers 0",
    "staging": "--tile 40 --compute 0.01 --epoch 6 --shard 40K",
    "writing": "--tile 64 --written 20 --shard 40K",
    "memory": "--giant 3000",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, image = tmp_path_factory.mktemp("ways"), io_strategies.draw_image(1100)
    io_strategies.write_all(image, folder)
    return folder, image


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs parts; what was written, and what is left in the folder for files."""

    def bench(*parts: str):
        folder, out = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("out")
        given = " ".join(SMALL[part] for part in parts).split()
        io.main(["--parts", *parts, *given, "--folder", str(folder), "--out", str(out)])
        assert not list(folder.iterdir())
        with Image.open(out / "io.png") as picture:
            assert len(picture.convert("RGB").getcolors(1_000_000)) > 5
        return json.loads((out / "io.json").read_text())

    return bench


def test_all_ways_read_the_same_boxes(files):
    folder, image = files
    for way in io_strategies.WAYS:
        read = io_strategies.open_way(folder, 1100, way)
        for row, col, n in [(0, 0, 5), (1000, 1010, 60), (76, 3, 1024), (1050, 200, 50)]:
            wanted = image[row : row + n, col : col + n]
            got = read(row, col, n)
            assert got.shape == wanted.shape
            if way in io_strategies.LOSSY:
                assert np.abs(got.astype(int) - wanted).mean() < 10
            else:
                assert (got == wanted).all(), way


def test_ways_that_differ_are_an_error(files):
    folder, _ = files
    reads = {way: io_strategies.open_way(folder, 1100, way) for way in io_strategies.WAYS}
    io_reading.check_same(reads)
    reads[io_strategies.OURS] = lambda row, col, n: np.zeros((n, n, 3), np.uint8)
    with pytest.raises(RuntimeError, match=r"raw shard returns other pixels than np\.memmap"):
        io_reading.check_same(reads)


@pytest.mark.slow
def test_reading_writing_and_memory(run, capsys):
    result = run("reading", "writing", "memory")
    warm = result["reading"]["warm"]
    assert set(warm) == {"windows of 1024", "quarters of 512"}
    for row in (*warm.values(), result["reading"]["cold"] or warm["windows of 1024"]):
        assert set(row["rates"]) == set(io_strategies.WAYS)
        assert all(rate > 0 for rate in row["rates"].values())
        assert row["to_memmap"][io_strategies.MEMMAP] == row["to_plain"][io_strategies.PLAIN] == 1
    assert result["writing"]["mb"] == pytest.approx(20 * 64 * 64 * 3 / 1e6)
    assert result["writing"]["shards"] == 7  # of 3 tiles
    assert 0 < result["memory"]["mb"] < io_memory.LIMIT < result["memory"]["peak"]
    printed = capsys.readouterr().out
    for text in ("raw shard, through HDF5", "ShardWriter, 7 shards", "MB to read a box of a giant"):
        assert text in printed
    assert "utilisation" not in printed


def test_feeding(run, monkeypatch, capsys):
    monkeypatch.setattr(io_loader, "SETS", {io_loader.AUGMENTED: "raw"})
    [row] = run("feeding")["feeding"]
    assert (row["set"], row["workers"], len(row["ends"])) == ("raw, augmented", 0, 6)
    assert 0 < row["utilisation"] <= 1
    assert "raw, augmented" in capsys.readouterr().out


@pytest.mark.slow
def test_staging(run, monkeypatch):
    monkeypatch.setattr(io_staging, "WORKERS", 0)
    found = run("staging")["staging"]
    assert found["mb"] == pytest.approx(24 * 40 * 40 * 3 / 1e6)
    served = {row["way"]: row["served"] / 1e6 for row in found["rows"]}
    # chunks are read once, all shards are copied once
    assert served[io_staging.SOURCE] == pytest.approx(found["mb"], rel=0.01)
    assert found["mb"] < served[io_staging.STAGED] < 2 * found["mb"]
    seconds = {row["way"]: row["seconds"] for row in found["rows"]}
    ratio = seconds[io_staging.STAGING] / seconds[io_staging.STAGED]
    assert found["ratio"] == pytest.approx(ratio)
    assert min(seconds.values()) > 6 * 0.01


def test_what_is_missed_is_said():
    found = {"ratio": 1.2, "mb": 10, "rows": []}
    result = {"command": "", "machine": "", "date": "", "options": {"rate": 50}}
    assert io_report.table({**result, "staging": found}).endswith("missed")
    assert not io_report.table({**result, "staging": {**found, "ratio": 1}}).endswith("missed")


def test_pages_that_stay_are_said(run, monkeypatch, capsys):
    monkeypatch.setattr(io_reading, "drop", lambda paths: None)
    monkeypatch.setattr(io_reading, "KINDS", dict.fromkeys(io_reading.KINDS, 8))
    monkeypatch.setattr(io_reading, "WINDOW", 8)
    assert run("reading")["reading"]["cold"] is None
    assert "not permitted here" in capsys.readouterr().out


def test_what_was_dropped_is_not_in_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10**6))
    assert resident([path]) == 1
    sync(path)
    drop([path])
    left = resident([path])
    if left == 1:
        pytest.skip("the pages of this file system stay in memory")
    assert left < 0.1
    with path.open("rb") as file:
        file.read()
    assert resident([path]) == 1
