from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.data.format import (
    FORMAT_VERSION,
    Manifest,
    chunk_size,
    order_splits,
    sha256_of,
    shard_status,
    stored_bytes,
    volume_chunk,
)
from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo, TileSample, VolumeSample
from spatialdl.data.shards import ShardDataset
from spatialdl.errors import ShardError

SHARD = ShardInfo("shard-00000.h5", 10, "0" * 64, 2)


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


AFFINE = ((0.0, 0.0, -0.7, 3.0), (0.0, 0.8, 0.0, -4.5), (2.5, 0.0, 0.0, 7.0))


def volumes(**changes: object) -> Manifest:
    made = regions()
    known = {name: getattr(made.samples[0], name) for name in RegionSample.__slots__}
    known |= {"depth": 7, "height": 3, "spacing": (2.5, 0.8, 0.7), "affine": AFFINE, **changes}
    made.kind, made.samples = "volumes", [VolumeSample(**known)]
    return made


@pytest.mark.parametrize(
    "made",
    [
        tiles(),
        regions(),
        volumes(),
        volumes(spacing=None, affine=None),
        tiles(samples=[], shards=[]),
        tiles(codec="jpeg"),
        tiles(dtype="int16"),
    ],
)
def test_save_and_load_round_trip(tmp_path: Path, made: Manifest) -> None:
    made.save(tmp_path)
    assert Manifest.load(tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def change(folder: Path, made: Manifest, **changes: object) -> None:
    """Write a manifest with some of its JSON replaced."""
    made.save(folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sample(**changes: object) -> dict[str, object]:
    whole = {"shard": 0, "index": 0, "label": 0, "split": None, "slide": "", "x": 0, "y": 0}
    return {**whole, **changes}


def shard(name: str) -> dict[str, object]:
    return {"file": name, "bytes": 1, "sha256": "", "samples": 1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format_version": FORMAT_VERSION + 1}, "upgrade spatialdl"),
        ({"format_version": "1"}, "damaged"),
        ({"kind": "cubes"}, "cubes"),
        ({"kind": "regions"}, "tile_size"),
        ({"channels": None}, "damaged"),
        ({"samples": [sample(label=2)]}, "label 2 of 2 classes"),
        ({"samples": [sample(index=2)]}, "does not exist"),
        ({"samples": [sample(shard=-1)]}, "does not exist"),
        ({"samples": [{}]}, "damaged"),
        ({"shards": [shard("../shard-00000.h5")]}, "not a plain name"),
        ({"shards": [shard("/etc/shadow.h5")]}, "not a plain name"),
        ({"shards": [shard("..")]}, "not a plain name"),
        ({"shards": 3}, "damaged"),
        ({"codec": "png"}, "codec is 'png', expected one of raw, jpeg"),
        ({"codec": []}, "codec is"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    change(tmp_path, tiles(), **changes)
    with pytest.raises(ShardError, match=says) as caught:
        Manifest.load(tmp_path)
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": [sample(), sample(x=1.5)]}, "samples 1: x is 1.5, expected a whole number"),
        ({"samples": [sample(), {"shard": 0}]}, "samples 1: missing key 'index'"),
        ({"shards": [shard("a.h5"), shard("b")]}, "shards 1: shard file 'b' is not a plain name"),
    ],
)
def test_the_row_that_is_wrong_is_named(tmp_path: Path, changes: dict[str, object], says: str):
    """A message for a million samples named only the wrong value, not the sample."""
    change(tmp_path, tiles(), **changes)
    with pytest.raises(ShardError, match=says):
        Manifest.load(tmp_path)


def test_version_1_is_raw(tmp_path: Path) -> None:
    tiles().save(tmp_path)
    path = tmp_path / "manifest.json"
    raw = json.loads(path.read_text())
    del raw["codec"]
    path.write_text(json.dumps({**raw, "format_version": 1}))
    assert Manifest.load(tmp_path) == tiles(codec="raw")
    path.write_text(json.dumps(raw))
    with pytest.raises(ShardError, match="missing key 'codec'"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    "bands",
    [
        [{"shard": 0, "row0": 0, "rows": 6}],
        [{"shard": 0, "row0": 1, "rows": 6}],
        [{"shard": 5, "row0": 0, "rows": 7}],
        [],
    ],
)
def test_bands_must_cover_their_region(tmp_path: Path, bands: list[dict[str, int]]) -> None:
    made = regions()
    made.save(tmp_path)
    raw = json.loads((tmp_path / "manifest.json").read_text())
    raw["samples"][0]["bands"] = bands
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(ShardError, match="band"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00\x01", '{"format_version": 1}'])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ShardError, match="damaged"):
        Manifest.load(tmp_path)


def test_missing_folder_file_and_manifest_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no such folder"):
        Manifest.load(tmp_path / "none")
    with pytest.raises(ShardError, match=r"has no manifest\.json"):
        Manifest.load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ShardError, match="it is a file"):
        Manifest.load(tmp_path / "file")


def test_splits_come_in_their_usual_order() -> None:
    assert order_splits(["b", "test", "a", "train", "test", "val"]) == [
        *("train", "val", "test"),
        *("a", "b"),
    ]


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 4))
def test_chunks_cover_the_image(rows: int, cols: int, channels: int) -> None:
    chunk_rows, chunk_cols = chunk_size(rows, cols)
    assert chunk_rows <= min(rows, 512)
    assert chunk_cols <= min(cols, 512)
    assert stored_bytes((rows, cols), channels) >= rows * cols * channels
    if rows <= 512 and cols <= 512:
        assert (chunk_rows, chunk_cols) == (rows, cols)
    if rows % 512 == 0 and cols % 512 == 0:
        assert stored_bytes((rows, cols), channels) == rows * cols * channels


def test_sha256_is_the_known_one(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_of(tmp_path / "abc").startswith("ba7816bf8f01cfea")


def test_a_checksum_tells_how_far_it_is(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    (tmp_path / "a").write_bytes(content)
    parts: list[int] = []
    assert sha256_of(tmp_path / "a", parts.append) == hashlib.sha256(content).hexdigest()
    assert sum(parts) == len(content)
    assert len(parts) > 1
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_a_manifest_is_of_the_oldest_version_that_will_do(tmp_path: Path) -> None:
    for changes, version in [
        ({}, 2),
        ({"codec": "jpeg"}, 2),
        ({"codec": "lz4"}, 3),
        ({"dtype": "uint16"}, 3),
    ]:
        tiles(**changes).save(tmp_path)
        saved = json.loads((tmp_path / "manifest.json").read_text())
        assert saved["format_version"] == version
        assert Manifest.load(tmp_path) == tiles(**changes)


def test_older_versions_have_bytes(tmp_path: Path) -> None:
    change(tmp_path, tiles(), format_version=2, dtype="float32")
    assert Manifest.load(tmp_path).dtype == "uint8"
    change(tmp_path, tiles(), format_version=3, dtype="int32")
    with pytest.raises(ShardError, match="dtype is 'int32', expected one of uint8, uint16"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"channels": 2**63}, "channels is .* expected a whole number"),
        ({"channels": 3.0}, "channels is 3.0, expected a whole number"),
        ({"channels": True}, "channels is True"),
        ({"channels": 0}, "is 0, and there are samples"),
        ({"tile_size": [8, -9]}, "tile_size is -9"),
        ({"tile_size": [8, 0]}, "is 0, and there are samples"),
        ({"tile_size": "89"}, "expected rows and columns"),
        ({"mpp": float("nan")}, "mpp is nan"),
        ({"mpp": float("inf")}, "mpp is inf"),
        ({"mpp": -0.5}, "mpp is -0.5"),
        ({"masks": "no"}, "masks is 'no', expected true or false"),
        ({"classes": "ab"}, "classes is 'ab', expected a list of strings"),
        ({"made_with": []}, "made_with is .*, expected an object"),
        ({"samples": [sample(index=1.7)]}, "index is 1.7"),
        ({"samples": [sample(x=1e400)]}, "x is inf"),
        ({"samples": [sample(slide=["s"])]}, "slide is .*, expected a string"),
        ({"samples": [3]}, "samples 0 is 3, expected an object"),
        ({"shards": [{**shard("a.h5"), "bytes": -1}]}, "bytes is -1"),
        ({"shards": [shard("../../etc/passwd")]}, "not a plain name"),
        ({"shards": [shard("a/b.h5")]}, "not a plain name"),
        ({"shards": [shard("a\0.h5")]}, "not a plain name"),
    ],
)
def test_nothing_in_a_manifest_is_converted(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    """1.7 became sample 1, "no" became true, and what is infinite ended with a traceback."""
    change(tmp_path, tiles(), **changes)
    with pytest.raises(ShardError, match=says) as caught:
        Manifest.load(tmp_path)
    assert "manifest.json" in str(caught.value)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    tiles().save(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"kind"', '"channels": 1, "kind"'))
    with pytest.raises(ShardError, match="duplicate key 'channels'"):
        Manifest.load(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(ShardError, match="nested too deeply"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("width", -6), ("height", 2**63), ("striped", 0)])
def test_regions_have_pixels(tmp_path: Path, key: str, value: int) -> None:
    made = regions()
    made.save(tmp_path)
    raw = json.loads((tmp_path / "manifest.json").read_text())
    raw["samples"][0][key] = value
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(ShardError, match=key):
        Manifest.load(tmp_path)


def test_a_shard_is_no_link_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "secret").write_bytes(b"0123456789")
    (tmp_path / "set" / SHARD.file).symlink_to("../secret")
    with pytest.raises(ShardError, match=r"a link out of its folder, to .*secret"):
        shard_status(tmp_path / "set", SHARD)
    tiles().save(tmp_path / "set")
    with pytest.raises(ShardError, match="a link out of its folder"):
        ShardDataset(tmp_path / "set")


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 8},
        {"height": 0},
        {"spacing": [1, 2]},
        {"spacing": [1, 2, 0]},
        {"affine": [[1, 2, 3, 4]] * 2},
        {"affine": [[1, 2, 3, "4"]] * 3},
    ],
)
def test_a_wrong_volume_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    volumes(**changes).save(tmp_path)
    with pytest.raises(ShardError, match=r"manifest\.json is damaged: "):
        Manifest.load(tmp_path)


def test_volumes_and_int16_are_of_version_4_and_images_have_no_more_keys(tmp_path: Path) -> None:
    assert (volumes().version, tiles(dtype="int16").version, regions().version) == (4, 4, 2)
    regions().save(tmp_path)
    saved = json.loads((tmp_path / "manifest.json").read_text())["samples"][0]
    assert sorted(saved) == sorted(RegionSample.__slots__)
    change(tmp_path, volumes(), format_version=3)
    with pytest.raises(ShardError, match="kind is 'volumes', expected one of tiles, regions"):
        Manifest.load(tmp_path)


@given(st.tuples(*[st.integers(1, 700)] * 3))
def test_chunks_of_a_volume_are_even(size: tuple[int, ...]) -> None:
    for n, each in zip(size, volume_chunk(size), strict=True):
        count = -(-n // each)
        assert each <= 64
        assert count == -(-n // 64)
        assert count * each - n < count
