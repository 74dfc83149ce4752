from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from spatialdl.bench import io, io_ways


@pytest.fixture
def files(tmp_path):
    image = io_ways.draw_image(1100)
    io_ways.write_all(image, tmp_path)
    return tmp_path, image


def test_all_ways_read_the_same_boxes(files):
    folder, image = files
    reads = io_ways.open_all(folder, 1100)
    assert set(reads) == set(io_ways.WAYS)
    for row, col, n in [(0, 0, 5), (1000, 1010, 60), (76, 3, 1024), (1050, 200, 50)]:
        wanted = image[row : row + n, col : col + n]
        for way, read in reads.items():
            got = read(row, col, n)
            assert got.shape == wanted.shape
            if way == io_ways.JPEG:
                assert np.abs(got.astype(int) - wanted).mean() < 10
            else:
                assert (got == wanted).all(), way


def test_ways_that_differ_are_an_error(files):
    folder, _ = files
    reads = io_ways.open_all(folder, 1100)
    io._check_same(reads)
    reads[io_ways.OURS] = lambda row, col, n: np.zeros((n, n, 3), np.uint8)
    with pytest.raises(RuntimeError, match=r"raw shard gives other pixels than np\.memmap"):
        io._check_same(reads)


def test_table_json_and_picture(monkeypatch, tmp_path, capsys):
    rates = iter(range(1, 1000))
    asked = []

    def rate(_read, places, side):
        asked.append((len(places), side))
        assert all(0 <= at <= 1100 - side for place in places for at in place)
        assert side == io.WINDOW or all(at % side == 0 for place in places for at in place)
        return float(next(rates))

    monkeypatch.setattr(io, "_rate", rate)
    where = ["--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    io.main(["--side", "1100", "--boxes", "40", "--rounds", "2", *where])
    result = json.loads((tmp_path / "out" / "io-1100.json").read_text())
    windows, quarters = result["reading"]
    assert windows["rates"][io.MEMMAP] == pytest.approx(8)  # of 1 and 15
    assert quarters["to_memmap"][io.OURS] == pytest.approx((9 / 8 + 23 / 22) / 2)
    assert windows["to_plain"][io.PLAIN] == 1
    assert asked == ([(40, 1024)] * 5 + [(2, 1024)] * 2 + [(40, 512)] * 5 + [(2, 512)] * 2) * 2
    printed = capsys.readouterr().out
    assert "raw shard, through HDF5" in printed
    assert "windows of 1024" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with Image.open(tmp_path / "out" / "io-1100.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--boxes", "0"], ["--side", "1000"]])
def test_nothing_of_a_kind_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be at least 1|smaller than a window of 1024"):
        io.main(wrong)
