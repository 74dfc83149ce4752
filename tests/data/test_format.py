"""The manifest: what is saved is loaded, and nothing wrong in it is taken for something else."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data.format import (
    FORMAT_VERSION,
    Manifest,
    sha256_of,
    shard_status,
)
from spatialdl.data.image_source import as_image, image_dtype
from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo, TileSample, VolumeSample
from spatialdl.data.shards import ShardDataset
from spatialdl.errors import ShardError

SHARD = ShardInfo("shard-00000.h5", 10, "0" * 64, 2)
AFFINE = ((0.0, 0.0, -0.7, 3.0), (0.0, 0.8, 0.0, -4.5), (2.5, 0.0, 0.0, 7.0))


def tiles(**changes: object) -> Manifest:
    made = Manifest("tiles", ["a", "b"], 3, (8, 9), 0.5, shards=[SHARD])
    made.samples = [
        TileSample(0, 0, 1, "val", "s", -3, 4),
        TileSample(0, 1, None, None, "", 0, 0),
    ]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def regions() -> Manifest:
    bands = (RegionBand(0, 0, 5), RegionBand(1, 5, 2))
    sample = RegionSample("000000", 7, 6, None, True, bands, 0, "train", "s", 1, 2)
    shards = [SHARD, ShardInfo("shard-00001.h5", 5, "1" * 64, 1)]
    return Manifest("regions", ["a"], 1, shards=shards, samples=[sample], masks=True)


def volumes(**changes: object) -> Manifest:
    made = regions()
    known = {name: getattr(made.samples[0], name) for name in RegionSample.__slots__}
    known |= {"depth": 7, "height": 3, "spacing": (2.5, 0.8, 0.7), "affine": AFFINE, **changes}
    made.kind, made.samples = "volumes", [VolumeSample(**known)]
    return made


@pytest.mark.parametrize(
    "made",
    [
        *(regions(), volumes(), volumes(spacing=None, affine=None)),
        *(tiles(samples=[], shards=[]), tiles(codec="jpeg"), tiles(dtype="int16")),
    ],
)
def test_save_and_load_round_trip(tmp_path, made):
    made.save(tmp_path)
    assert Manifest.load(tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    saved = json.loads((tmp_path / "manifest.json").read_text())
    assert saved["format_version"] == FORMAT_VERSION
    if made.kind == "regions":
        assert sorted(saved["samples"][0]) == sorted(RegionSample.__slots__)


def change(folder: Path, made: Manifest, **changes: object) -> None:
    """Write a manifest with some of its JSON replaced."""
    made.save(folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sample(**changes: object) -> dict[str, object]:
    whole = {"shard": 0, "index": 0, "label": 0, "split": None, "slide": "", "x": 0, "y": 0}
    return {**whole, **changes}


def shard(name: str, **changes: object) -> dict[str, object]:
    return {"file": name, "bytes": 1, "sha256": "", "samples": 1, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format_version": FORMAT_VERSION + 1}, "is newer than .*upgrade spatialdl"),
        ({"kind": "cubes"}, "cubes"),
        ({"kind": "regions"}, "tile_size"),
        ({"samples": [sample(label=2)]}, "label 2 of 2 classes"),
        ({"samples": [sample(shard=-1)]}, "does not exist"),
        ({"shards": 3}, "damaged"),
        ({"codec": "png"}, "codec is 'png', expected one of raw, jpeg"),
        # a message for a million samples named only the wrong value, not the sample
        ({"samples": [sample(), sample(x=1.5)]}, "samples 1: x is 1.5, expected a whole number"),
        ({"samples": [sample(), {"shard": 0}]}, "samples 1: missing key 'index'"),
        ({"shards": [shard("a.h5"), shard("b")]}, "shards 1: shard file 'b' is not a plain name"),
        *(({"shards": [shard(name)]}, "not a plain name") for name in ("../a.h5", "a\0.h5")),
        # 1.7 became sample 1, "no" became true, and what is infinite ended with a traceback
        ({"channels": 2**63}, "channels is .* expected a whole number"),
        ({"tile_size": [8, -9]}, "tile_size is -9"),
        ({"tile_size": [8, 0]}, "is 0, and there are samples"),
        ({"tile_size": "89"}, "expected rows and columns"),
        *(({"mpp": wrong}, f"mpp is {wrong}") for wrong in (float("nan"), float("inf"), -0.5)),
        *(({"mpp": wrong}, "mpp is ") for wrong in (0, True, "1", 10**400)),
        *(({"masks": wrong}, "masks is .*, expected true or false") for wrong in ("no", 1, None)),
        *(({"classes": wrong}, "classes is .*, expected a list of str") for wrong in ("ab", [1])),
        *(({"made_with": wrong}, "made_with is .*, expected an ob") for wrong in ([], None, "{}")),
        ({"samples": [sample(index=1.7)]}, "index is 1.7"),
        *(({"samples": [sample(x=wrong)]}, "x is ") for wrong in (1e400, 2**63, True, "1")),
        ({"samples": [sample(slide=["s"] * 10**5)]}, "slide is .{1,150}, expected a string"),
        *(({"samples": wrong}, "samples .*expected") for wrong in ([3], [[]], {}, "a")),
        ({"shards": [shard("a.h5", bytes=-1)]}, "bytes is -1"),
    ],
)
def test_a_wrong_manifest_is_refused_and_nothing_in_it_converted(tmp_path, changes, says) -> None:
    change(tmp_path, tiles(), **changes)
    with pytest.raises(ShardError, match=says) as caught:
        Manifest.load(tmp_path)
    assert "manifest.json" in str(caught.value)


def band(**changes: int) -> dict[str, int]:
    return {"shard": 0, "row0": 0, "rows": 7, **changes}


@pytest.mark.parametrize(
    ("made", "changes", "says"),
    [
        *((regions(), {"bands": [wrong]}, "band") for wrong in (band(rows=6), band(row0=1))),
        *((regions(), {"bands": wrong}, "band") for wrong in ([band(shard=5)], [])),
        (regions(), {"width": -6}, "width"),
        (regions(), {"striped": 0}, "striped"),
        (volumes(), {"depth": 8}, "damaged: "),
        *((volumes(), {"spacing": wrong}, "damaged: ") for wrong in ([1, 2], [1, 2, 0])),
        (volumes(), {"affine": [[1, 2, 3, 4]] * 2}, "damaged: "),
        (volumes(), {"affine": [[1, 2, 3, "4"]] * 3}, "damaged: "),
    ],
)
def test_a_wrong_region_or_volume_is_refused(tmp_path: Path, made, changes, says) -> None:
    made.save(tmp_path)
    raw = json.loads((tmp_path / "manifest.json").read_text())
    raw["samples"][0] |= changes
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(ShardError, match=says):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "damaged") for text in ("", "{", "[]", "3", "\x00\x01", '{"format_version": 1}')),
        ('{"kind": 1, "kind": 2}', "duplicate key 'kind'"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ShardError, match=says):
        Manifest.load(tmp_path)


def test_missing_folder_file_and_manifest_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, says in [
        ("none", "no such folder"),
        (".", r"has no manifest\.json"),
        ("file", "it is a file"),
    ]:
        with pytest.raises(ShardError, match=says):
            Manifest.load(tmp_path / name)


def test_a_shard_is_no_link_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "secret").write_bytes(b"0123456789")
    (tmp_path / "set" / SHARD.file).symlink_to("../secret")
    with pytest.raises(ShardError, match=r"a link out of its folder, to .*secret"):
        shard_status(tmp_path / "set", SHARD)
    tiles().save(tmp_path / "set")
    with pytest.raises(ShardError, match="a link out of its folder"):
        ShardDataset(tmp_path / "set")


def test_a_manifest_is_a_file_of_its_folder(tmp_path: Path) -> None:
    """A pipe blocked training for ever, and a link was followed."""
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / "manifest.json")
        with pytest.raises(ShardError, match=r"not a regular file|out of its folder"):
            Manifest.load(folder)


def test_a_checksum_is_that_of_others_and_tells_how_far_it_is(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    (tmp_path / "a").write_bytes(content)
    parts: list[int] = []
    assert sha256_of(tmp_path / "a", parts.append) == hashlib.sha256(content).hexdigest()
    assert sum(parts) == len(content)
    assert len(parts) > 1
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("bool", "type bool, expected one of uint8, .*use it as a mask if it is one"),
        ("int32", "type int32, expected .*convert it to int16 or uint16 if its values fit"),
        ("uint32", "convert it to uint16"),
        ("complex64", "channels of float32"),
        ("O", "convert it first"),
        ("longdouble", "convert it to float64"),
    ],
)
def test_other_types_are_refused_with_advice(dtype: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        image_dtype(np.dtype(dtype))
    with pytest.raises(ValueError, match=says):
        as_image(np.zeros((2, 2), dtype))
    for shape in [(3,), (2, 2, 2, 2), (0, 3), (3, 3, 0)]:
        with pytest.raises(ValueError, match="expected \\(rows, cols, channels\\)"):
            as_image(np.zeros(shape, np.uint8))
