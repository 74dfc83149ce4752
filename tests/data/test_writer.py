"""Data sets as they are written: shards, manifests, refusals, and parts of several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardWriter, join_parts
from spatialdl.data.format import sha256_of
from spatialdl.data.image_source import as_mask
from spatialdl.data.joining import part_folder, parts_folder
from spatialdl.data.shard_file import Settling, ShardFile
from spatialdl.errors import ShardError

TILE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
VOLUME = np.zeros((3, 4, 5), np.uint8)
IMAGES = np.random.default_rng(0).integers(0, 256, (9, 40, 30, 3), np.uint8)


def opened(folder: Path) -> Any:
    from spatialdl.data import ShardDataset  # takes PyTorch, which processes that write do not need

    return ShardDataset(folder)


def test_shards_are_plain_hdf5_and_the_manifest_says_where_everything_lies(tmp_path: Path) -> None:
    made_with = {"by": "me"}
    with ShardWriter(tmp_path / "set", ["a", "b"], shard_size=130, made_with=made_with) as writer:
        writer.add(TILE, label="b", split="val", slide="näme", xy=(512, 2**40))
        writer.add(TILE + 1)
        writer.add(TILE, np.int64(0), "train", slide="s", xy=(3, 4))
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        assert sorted(file) == ["coords", "images", "labels", "slides"]
        assert (file["images"][:] == [TILE, TILE + 1]).all()
        assert (file["images"].dtype, file["images"].compression) == (np.uint8, None)
        assert file["images"].chunks == (1, 4, 5, 3)
        assert file["coords"].dtype == file["labels"].dtype == np.int64
        assert file["coords"][:].tolist() == [[512, 2**40], [0, 0]]
        assert file["labels"][:].tolist() == [1, -1]
        assert file["slides"].asstr()[:].tolist() == ["näme", ""]
    raw = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert (raw["format_version"], raw["codec"], raw["kind"]) == (4, "raw", "tiles")
    assert (raw["classes"], raw["splits"]) == (["a", "b"], ["train", "val"])
    assert (raw["tile_size"], raw["made_with"]) == ([4, 5], made_with)
    assert [shard["file"] for shard in raw["shards"]] == ["shard-00000.h5", "shard-00001.h5"]
    assert raw["samples"][2] == {
        **{"shard": 1, "index": 0, "label": 0, "split": "train"},
        **{"slide": "s", "x": 3, "y": 4},
    }
    for shard in raw["shards"]:
        path = tmp_path / "set" / shard["file"]
        assert (path.stat().st_size, sha256_of(path)) == (shard["bytes"], shard["sha256"])


@pytest.mark.parametrize("codec", ["raw", "jpeg"])
def test_shards_are_of_bounded_size(tmp_path: Path, codec: str) -> None:
    tile = np.zeros((64, 600, 3), np.uint8)
    with ShardWriter(tmp_path / "set", codec=codec, shard_size=3 * 64 * 1024 * 3 + 1) as writer:
        for _ in range(7):
            writer.add(tile)
    raw = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert [shard["samples"] for shard in raw["shards"]] == [3, 3, 1]
    assert all(
        shard["bytes"] < shard["samples"] * 64 * 1024 * 3 + 20_000 for shard in raw["shards"]
    )
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        assert file["images"].chunks == (1, 64, 512, 3)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (
            "tiles",
            {"image": TILE.astype(int)},
            "type int64, expected one of uint8, uint16, .*",
        ),
        ("tiles", {"image": TILE[0, 0]}, "has shape"),
        ("tiles", {"image": np.zeros((0, 4, 3), np.uint8)}, "has shape"),
        ("tiles", {"image": TILE[:3]}, "all of one size"),
        ("tiles", {"label": "c"}, "not one of the classes"),
        ("tiles", {"label": 2}, "not an index"),
        ("tiles", {"split": ""}, "split is empty"),
        ("tiles", {"slide": "a\0b"}, "null character"),
        ("tiles", {"slide": "a\udc80"}, "slide name .* is not valid Unicode"),  # in Latin-1
        ("tiles", {"mask": np.zeros((4, 5), np.uint8)}, "others do not"),
        ("tiles", {"mpp": 1.0}, "ShardWriter"),
        ("volumes", {"image": VOLUME[0]}, r"volume has shape \(4, 5\), expected \(slices"),
        ("volumes", {"spacing": (1.0, 0.0, 1.0)}, r"spacing is .*, expected three numbers above 0"),
        ("volumes", {"spacing": (1.0, 2.0)}, "spacing is .*, expected three"),
        ("volumes", {"affine": np.full((3, 4), np.nan)}, "affine is .*, expected three rows of"),
        ("volumes", {"affine": np.ones((4, 4))}, "affine is .*, expected three rows of four"),
        ("volumes", {"mpp": 0.5}, "mpp does not apply to volumes"),
        ("regions", {"spacing": (1, 1, 1)}, "spacing and affine require kind 'volumes', not 'reg"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_added(tmp_path, kind, given, says) -> None:
    image = VOLUME if kind == "volumes" else TILE
    with ShardWriter(tmp_path / "set", ["a", "b"], kind=kind) as writer:
        writer.add(image)
        with pytest.raises(ValueError, match=says):
            writer.add(**{"image": image, **given})
        writer.add(image)
    assert len(opened(tmp_path / "set")) == 2


def test_masks_are_bytes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        for mask, says in [
            (np.zeros((5, 4), int), "its image has 4 x 5"),
            (np.zeros((4, 5)), "type float64.*expected integers"),
            (np.full((4, 5), 256), "values 256 to 256.*0 to 255"),
            (np.full((4, 5), -1), "values -1 to -1"),
        ]:
            with pytest.raises(ValueError, match=says):
                writer.add(TILE, mask=mask)
        writer.add(TILE, mask=np.full((4, 5), 255))
        writer.add(TILE, mask=np.ones((4, 5), bool))
    with pytest.raises(ValueError, match=r"mask has shape \(3, 4\), its image has 3 x 4 x 5"):
        as_mask(VOLUME[..., 0], VOLUME.shape)
    data = opened(tmp_path / "set")
    assert data.read_mask(0).tolist() == [[255] * 5] * 4
    assert data.read_mask(1, (1, 2, 0, 3)).tolist() == [[1, 1, 1]]
    assert as_mask(np.eye(3).astype(">u2"), (3, 3)).dtype == np.uint8


def fail_in_the_middle(path: Path, error: type[BaseException]) -> None:
    with ShardWriter(path, overwrite=True, shard_size=1) as writer:
        writer.add(TILE + 1)
        writer.add(TILE + 2)
        with pytest.raises(ShardError, match=r"no manifest\.json"):
            opened(writer.workdir)  # what is built looks like no data set
        raise error


def test_a_data_set_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    with pytest.raises(KeyboardInterrupt):
        fail_in_the_middle(folder, KeyboardInterrupt)
    with pytest.raises(ShardError, match="no samples"), ShardWriter(folder):
        pass
    writer = ShardWriter(folder)
    for _ in range(2):
        writer.abort()
    assert list(tmp_path.iterdir()) == []
    for number in (3, 1):
        with ShardWriter(folder, shard_size=1, overwrite=True) as writer:
            for _ in range(number):
                writer.add(TILE + number)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "shard-00000.h5"]
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.add(TILE)
    with pytest.raises(ShardError, match="--overwrite"):
        ShardWriter(folder)
    with pytest.raises(RuntimeError):
        fail_in_the_middle(folder, RuntimeError)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert (opened(folder).read(0) == TILE + 1).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"classes": "ab"},
        {"classes": ["a", "a"]},
        {"shard_size": 0},
        {"kind": "cubes"},
        {"stripes": 2},
        {"kind": "regions", "stripes": 0},
        {"codec": "png"},
        {"codec": "jpeg", "quality": 101},
        {"chunk": (8, 8)},
        {"codec": "jpeg", "chunk": (8, 0)},
        {"codec": "jpeg", "kind": "volumes"},
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(tmp_path: Path, arguments) -> None:
    with (
        pytest.raises(ValueError, match=r"is|duplicate|does not support volumes"),
        ShardWriter(tmp_path / "set", **arguments) as writer,
    ):
        writer.add(VOLUME[..., None])
    assert list(tmp_path.iterdir()) == []


def test_writing_imports_no_pytorch() -> None:
    """Workers that cut slides start faster without it."""
    code = "import sys, spatialdl.data as data; data.ShardWriter; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "spatialdl.data.tile_shard" in done.stdout.split()
    assert "torch" not in done.stdout.split()


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        ("tiles", (3, 40, 56), r"3 rows and 56 channels; .* image\.transpose\(1, 2, 0\), or"),
        ("regions", (1, 40, 56), r"1 rows and 56 channels; .* image\.permute\(1, 2, 0\) of"),
        ("volumes", (4, 20, 40, 56), r"4 slices and 56 channels; .*transpose\(1, 2, 3, 0\)"),
    ],
)
def test_channels_first_are_refused(tmp_path: Path, kind: str, shape: tuple, said: str) -> None:
    """PyTorch's images would be stored as three rows with 56 channels."""
    with ShardWriter(tmp_path / "set", kind=kind) as writer:
        with pytest.raises(ValueError, match=said):
            writer.add(np.zeros(shape, np.uint8))
        writer.add(np.zeros(shape, np.uint8).transpose(*range(1, len(shape)), 0))
    # a volume of three slices, and many channels of few rows
    for other, size in (("volumes", (3, 40, 56)), ("tiles", (3, 5, 200))):
        with ShardWriter(tmp_path / f"other {other}", kind=other) as writer:
            writer.add(np.zeros(size, np.uint8))


def shard(folder: Path, number: int) -> ShardFile:
    file = ShardFile(folder, number)
    file.h5["a"] = np.arange(1000 * (number + 1))
    file.samples = number
    return file


def test_a_shard_has_its_name_when_it_is_on_the_disk(tmp_path: Path, monkeypatch) -> None:
    synced, fsync = [], os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        assert not (tmp_path / "shard-00007.h5").exists() or synced[-1] == tmp_path.name
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    file = shard(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00007.h5.tmp"]
    info = file.finish()
    (path,) = tmp_path.iterdir()
    assert path.name == info.file == "shard-00007.h5"
    assert (info.bytes, info.samples, info.sha256) == (path.stat().st_size, 7, sha256_of(path))
    assert (synced[0], synced[-1]) == ("shard-00007.h5.tmp", tmp_path.name)


def test_nothing_is_written_after_an_abort(tmp_path: Path) -> None:
    settling = Settling()
    for number in range(3):
        file = shard(tmp_path, number)
        file.h5["large"] = np.zeros(2_000_000)
        settling.add(file)
    settling.abort()
    assert not [one for one in threading.enumerate() if one.name.startswith("settling")]
    left = [path.suffix in (".h5", ".tmp") for path in tmp_path.iterdir()]
    assert left == [True] * 3
    with pytest.raises(RuntimeError):
        settling.add(shard(tmp_path, 3))


@pytest.mark.parametrize("kind", ["tiles", "regions"])
def test_a_shard_that_cannot_be_settled_leaves_no_folder(tmp_path: Path, kind, monkeypatch) -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    writer = ShardWriter(tmp_path / "set", kind=kind, shard_size=2 * image.nbytes)
    writer.add(image)
    (writer.workdir / "shard-00000.h5.tmp").unlink()
    writer.add(image)
    with pytest.raises(FileNotFoundError):
        writer.close()
    assert not list(tmp_path.iterdir())

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("spatialdl.common.files.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"), ShardWriter(tmp_path / "set") as writer:
        writer.add(TILE)
    assert list(tmp_path.iterdir()) == []


def write(folder: Path, part: str | None, numbers: list[int], **more: object) -> None:
    settings = {"classes": ["a", "b"], "shard_size": 2 * 40 * 30 * 3, **more}
    with ShardWriter(folder, part=part, **settings) as writer:
        for number in numbers:
            writer.add(IMAGES[number], label=number % 2, slide=f"{part}{number}", split="train")


def test_parts_become_one_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    given = {"b": [0, 1, 2, 3, 4], "a": [5], "empty": [], "c_1": [6, 7, 8]}
    for part, numbers in given.items():
        write(folder, part, numbers)
    assert not folder.exists()
    join_parts(folder, list(given))
    data = opened(folder)
    data.verify()
    assert [data.sample(k).slide for k in range(9)] == [
        f"{part}{number}" for part, numbers in given.items() for number in numbers
    ]
    assert (np.stack([image for image, _ in data]) == IMAGES).all()
    assert data.labels.tolist() == [number % 2 for number in range(9)]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", *(f"shard-{k:05d}.h5" for k in range(6))]
    for part in ("x", "y"):  # regions keep their stripes
        write(tmp_path / "two", part, [0, 1], kind="regions", stripes=2, shard_size=2**20)
    join_parts(tmp_path / "two", ["y", "x"])
    data = opened(tmp_path / "two")
    assert [data.sample(k).id for k in range(4)] == ["y-000000", "y-000001", "x-000000", "x-000001"]
    assert [[band.shard for band in data.sample(k).bands] for k in (0, 2)] == [[0, 1], [2, 3]]
    assert all((data.read(k) == IMAGES[k % 2]).all() for k in range(4))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"classes": ["b", "a"]}, r"classes: \['a', 'b'\] in 'one', \['b', 'a'\] in 'two'"),
        ({"codec": "zstd"}, "codec: 'raw' in 'one', 'zstd' in 'two'"),
        ({"mpp": 0.5}, "mpp: None in 'one', 0.5 in 'two'"),
        ({"kind": "regions"}, "kind: 'tiles' in 'one', 'regions' in 'two'"),
    ],
)
def test_parts_that_differ_are_refused(tmp_path: Path, more: dict, says: str) -> None:
    write(tmp_path / "set", "one", [0])
    write(tmp_path / "set", "two", [1], **more)
    with pytest.raises(ShardError, match=f"parts differ in {says}; write them with the same"):
        join_parts(tmp_path / "set", ["one", "two"])
    assert [path.name for path in tmp_path.iterdir()] == [".set.parts"]
    write(tmp_path / "set", "two", [1])
    join_parts(tmp_path / "set", ["one", "two"])
    assert len(opened(tmp_path / "set")) == 2


def test_parts_that_are_not_there_or_not_asked_for_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write(folder, "one", [0])
    write(folder, "none", [])
    for names, error, says in [
        (["one", "two"], ShardError, "part 'two' is missing or unfinished"),
        (["one", "one"], ValueError, "expected a list of distinct names"),
        (["../x"], ValueError, r"part is '\.\./x', expected a name of 1 to 64 letters"),
        (["none"], ShardError, "no samples were added"),
    ]:
        with pytest.raises(error, match=says):
            join_parts(folder, names)
    assert not folder.exists()
    write(folder, None, [5])
    write(folder, "one", [0], overwrite=True)
    with pytest.raises(ShardError, match="already contains a data set"):
        join_parts(folder, ["one"])
    with pytest.raises(ShardError, match="already contains a data set"):
        ShardWriter(folder, part="two")
    join_parts(folder, ["one"], overwrite=True)
    assert (opened(folder).read(0) == IMAGES[0]).all()
    assert not parts_folder(folder).exists()
    write(folder, "one", [0], overwrite=True)
    os.truncate(part_folder(folder, "one") / "shard-00000.h5", 100)
    with pytest.raises(ShardError, match="part 'one' is damaged"):
        join_parts(folder, ["one"], overwrite=True)


def begin_and_die(folder: Path, part: str | None) -> None:
    writer = ShardWriter(folder, part=part, shard_size=1)
    for image in IMAGES:
        writer.add(image)
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("part", [None, "one"])
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path, part: str | None) -> None:
    folder = tmp_path / "set"
    process = multiprocessing.get_context("fork").Process(target=begin_and_die, args=(folder, part))
    process.start()
    process.join()
    assert process.exitcode == -9
    assert not folder.exists()
    beside = part_folder(folder, part).parent if part else tmp_path
    (left,) = [path for path in beside.iterdir() if ".partial-" in path.name]
    if part:
        with pytest.raises(ShardError, match="part 'one' is missing or unfinished"):
            join_parts(folder, [part])
    with ShardWriter(folder, part=part) as writer:
        assert not left.exists()
        with ShardWriter(folder, part=part, overwrite=True) as other:
            assert writer.workdir.exists()  # that of the living stays
            other.add(IMAGES[0])
            writer.add(IMAGES[1])
            writer.abort()
    if part:
        join_parts(folder, [part])
    assert (opened(folder).read(0) == IMAGES[0]).all()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
