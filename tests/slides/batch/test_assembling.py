from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from spatialdl.data.format import Manifest
from spatialdl.data.samples import RegionBand, RegionSample
from spatialdl.slides.batch.assembling import assemble, load_settings
from spatialdl.slides.batch.options import parsed
from spatialdl.slides.batch.record import PartRecord, SlideRecord
from spatialdl.slides.batch.report import TilingReport
from tests.slides.batch.batches import contents
from tests.slides.batch.test_record import shard

SETTINGS = {"mpp": 0.5}


def options(*more: str) -> argparse.Namespace:
    size = [] if "--whole" in more else ["--tile-size", "64"]
    return parsed(["a.svs", "--out", "set", "--mpp", "0.5", *size, *more])


def slide(
    folder: Path, name: str, shards: list[int], region: RegionSample | None = None
) -> SlideRecord:
    """A slide that is done, with so many tiles in its parts; none in a part is no shard."""
    parts = []
    for number, tiles in enumerate(shards):
        info = None
        if tiles:
            info = shard(folder, f"parts/{name}/{number:05d}/shard-00000.h5")
            (folder / info.file).write_text(f"{name} {number}")
        parts.append(PartRecord(info, [(number, k, 0) for k in range(tiles)]))
        parts[-1].shard = info and type(info)(info.file, 9, f"of {name} {number}", tiles)
    report = TilingReport(name, written=sum(shards)).to_json()
    record = SlideRecord("key", f"/in/{name}.svs", "train", parts, [], region, report)
    record.save(folder, name)
    (folder / "pictures").mkdir(exist_ok=True)
    for picture in (f"{name}.png", f"{name}.stitched.jpg"):
        (folder / "pictures" / picture).touch()
    return record


def test_shards_are_numbered_in_the_order_of_names(tmp_path: Path) -> None:
    slide(tmp_path, "b", [2, 0, 3])
    slide(tmp_path, "a", [1])
    slide(tmp_path, "none", [0])
    assert assemble(tmp_path, ["a", "b", "none"], ["x"], options(), SETTINGS) == 6
    manifest = Manifest.load(tmp_path)
    names = [f"shard-0000{k}.h5" for k in range(3)]
    assert [info.file for info in manifest.shards] == names
    assert [(tmp_path / name).read_text() for name in names] == ["a 0", "b 0", "b 2"]
    assert [info.sha256 for info in manifest.shards] == ["of a 0", "of b 0", "of b 2"]
    samples = [(s.slide, s.shard, s.index, s.x, s.y) for s in manifest.samples]
    assert samples == [
        ("a", 0, 0, 0, 0),
        *(("b", 1, k, 0, k) for k in range(2)),
        *(("b", 2, k, 2, k) for k in range(3)),
    ]
    assert (manifest.classes, manifest.splits, manifest.made_with) == (["x"], ["train"], SETTINGS)
    assert (manifest.kind, manifest.tile_size, manifest.codec) == ("tiles", (64, 64), "raw")
    assert load_settings(tmp_path) == SETTINGS
    for name, files in (("b", ["shard-00001.h5", None, "shard-00002.h5"]), ("none", [None])):
        record = SlideRecord.load(tmp_path, name)
        assert record is not None
        assert [part.shard and part.shard.file for part in record.parts] == files


def test_assembling_again_changes_nothing(tmp_path: Path) -> None:
    slide(tmp_path, "a", [1, 2])
    for _ in range(2):
        assemble(tmp_path, ["a"], ["x"], options(), SETTINGS)
    expected = contents(tmp_path)
    assemble(tmp_path, ["a"], ["x"], options(), SETTINGS)
    assert contents(tmp_path) == expected


def test_a_slide_more_moves_the_others(tmp_path: Path) -> None:
    slide(tmp_path, "b", [1, 2])
    assemble(tmp_path, ["b"], ["x"], options(), SETTINGS)
    slide(tmp_path, "a", [1])
    assemble(tmp_path, ["a", "b"], ["x"], options(), SETTINGS)
    shards = [path.read_text() for path in sorted(tmp_path.glob("shard-*"))]
    assert shards == ["a 0", "b 0", "b 1"]
    assemble(tmp_path, ["b"], ["x"], options(), SETTINGS)
    shards = [path.read_text() for path in sorted(tmp_path.glob("shard-*"))]
    assert shards == ["b 0", "b 1"]


def test_regions_know_the_shards_of_their_bands(tmp_path: Path) -> None:
    for name, rows in (("a", [512, 88]), ("b", [100])):
        bands = tuple(RegionBand(k, 512 * k, n) for k, n in enumerate(rows))
        region = RegionSample(name, sum(rows), 9, 0.5, len(rows) > 1, bands, None, None, name, 0, 0)
        slide(tmp_path, name, [1] * len(rows), region)
    assemble(tmp_path, ["a", "b"], [], options("--whole", "--codec", "jpeg-native"), SETTINGS)
    manifest = Manifest.load(tmp_path)
    assert (manifest.kind, manifest.tile_size, manifest.codec) == ("regions", None, "jpeg")
    assert [[band.shard for band in sample.bands] for sample in manifest.samples] == [[0, 1], [2]]


def test_what_is_not_of_the_data_set_is_removed(tmp_path: Path) -> None:
    slide(tmp_path, "a", [1])
    slide(tmp_path, "left out", [1])
    for left in (
        *("shard-00007.h5", "shard-00001.h5.new", ".0123.tmp", "records/.4.tmp", "pictures/c.png"),
        *("coords/clam/patches/c.h5", "coords/clam/patches/.5.tmp", "parts/a/00000.x/half"),
    ):
        (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left).touch()
    (tmp_path / "lock").touch()
    assemble(tmp_path, ["a"], ["x"], options(), SETTINGS)
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == [
        *("lock", "manifest.json", "pictures/a.png", "pictures/a.stitched.jpg"),
        *("records/a.json", "settings.json", "shard-00000.h5"),
    ]


def test_without_shards_there_is_no_manifest(tmp_path: Path) -> None:
    slide(tmp_path, "a", [1])
    assemble(tmp_path, ["a"], ["x"], options(), SETTINGS)
    slide(tmp_path, "a", [0])
    assert assemble(tmp_path, ["a"], ["x"], options(), SETTINGS) == 0
    assert not (tmp_path / "manifest.json").exists()
    assert not list(tmp_path.glob("shard-*"))
    assert json.loads((tmp_path / "settings.json").read_text()) == SETTINGS


@pytest.mark.parametrize("text", [None, "", "{"])
def test_settings_that_are_not_there(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "settings.json").write_text(text)
    assert load_settings(tmp_path) is None
