from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spatialdl.data.writer import ShardWriter
from spatialdl.errors import ShardError
from spatialdl.slides.inspecting import inspect


def test_a_data_set_of_tiles(data_set: Path) -> None:
    size = sum(path.stat().st_size for path in data_set.glob("*.h5")) / 1000
    assert inspect(data_set).splitlines() == [
        f"data set   {data_set}",
        "kind       tiles",
        "tile size  16 x 16",
        "mpp        0.5",
        "channels   3",
        "dtype      uint8",
        "codec      raw",
        "masks      no",
        "samples    7 of 2 slides",
        f"shards     3, {size:.1f} kB",
        "",
        "class     train  val  all",
        "no            3    0    3",
        "yes           2    0    2",
        "no class      0    2    2",
        "all           5    2    7",
        "",
        "made with",
        "  tile_size: 16",
        "  labels: a.csv",
    ]


def test_a_data_set_of_regions(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", kind="regions") as writer:
        for rows, cols in ((20, 30), (40, 10)):
            writer.add(np.zeros((rows, cols, 1), np.uint8), slide="a", mpp=0.25)
    lines = inspect(tmp_path / "set").splitlines()
    assert "sizes      20 to 40 rows, 10 to 30 columns" in lines
    assert "samples    2 of 1 slide" in lines
    assert lines[-2:] == ["class     no split  all", "no class         2    2"]


def test_shards_that_are_missing_or_cut_are_named(data_set: Path) -> None:
    (data_set / "shard-00000.h5").unlink()
    (data_set / "shard-00002.h5").write_bytes(b"cut")
    remarks = [line for line in inspect(data_set).splitlines() if line.startswith("remark")]
    assert remarks[0] == "remark: cannot find shard-00000.h5 (No such file or directory)"
    assert remarks[1].startswith("remark: shard-00002.h5 has 3 bytes of ")
    assert len(remarks) == 2


def test_a_damaged_manifest_is_refused(data_set: Path) -> None:
    (data_set / "manifest.json").write_text("{")
    with pytest.raises(ShardError, match="is damaged"):
        inspect(data_set)


def test_a_data_set_of_volumes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", kind="volumes") as writer:
        writer.add(np.zeros((3, 4, 5), np.int16), spacing=(2.5, 0.8, 0.7))
        writer.add(np.zeros((9, 4, 6), np.int16), spacing=(5.0, 0.8, 0.7))
        writer.add(np.zeros((9, 4, 6), np.int16))
    lines = inspect(tmp_path / "set").splitlines()
    assert lines[1:4] == [
        "kind       volumes",
        "sizes      3 to 9 slices, 4 to 4 rows, 5 to 6 columns",
        "spacing    2.5 to 5 mm (slices), 0.8 to 0.8 mm (rows), 0.7 to 0.7 mm (columns), "
        "of 2 of 3 volumes",
    ]
    assert "dtype      int16" in lines
