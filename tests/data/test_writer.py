from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.format import Manifest
from spatialdl.errors import ShardError

TILE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_a_shard_is_plain_hdf5(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", ["a", "b"], mpp=0.5) as writer:
        writer.add(TILE, label="b", split="train", slide="näme", xy=(512, 2**40))
        writer.add(TILE + 1)
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        assert sorted(file) == ["coords", "images", "images_crc32", "labels", "slides"]
        assert (file["images"][:] == [TILE, TILE + 1]).all()
        assert file["images"].dtype == np.uint8
        assert file["images"].chunks == (1, 4, 5, 3)
        assert file["images"].compression is None
        assert file["coords"].dtype == file["labels"].dtype == np.int64
        assert file["coords"][:].tolist() == [[512, 2**40], [0, 0]]
        assert file["labels"][:].tolist() == [1, -1]
        assert file["slides"].asstr()[:].tolist() == ["näme", ""]


def test_the_manifest_says_where_everything_lies(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", ["a"], shard_size=1, made_with={"by": "me"}) as writer:
        writer.add(TILE, 0, "val", slide="s", xy=(1, 2))
        writer.add(TILE, np.int64(0), "train", slide="s", xy=(3, 4))
    raw = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert raw["format_version"] == 2
    assert raw["codec"] == "raw"
    assert raw["kind"] == "tiles"
    assert raw["classes"] == ["a"]
    assert raw["splits"] == ["train", "val"]
    assert raw["tile_size"] == [4, 5]
    assert raw["made_with"] == {"by": "me"}
    assert [shard["file"] for shard in raw["shards"]] == ["shard-00000.h5", "shard-00001.h5"]
    assert raw["samples"][1] == {
        **{"shard": 1, "index": 0, "label": 0, "split": "train"},
        **{"slide": "s", "x": 3, "y": 4},
    }
    for shard in raw["shards"]:
        assert (tmp_path / "set" / shard["file"]).stat().st_size == shard["bytes"]


def test_large_tiles_have_chunks_of_512(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        writer.add(np.zeros((1024, 600, 3), np.uint8))
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        assert file["images"].chunks == (1, 512, 512, 3)


def test_shards_are_of_bounded_size(tmp_path: Path) -> None:
    tile = np.zeros((64, 64, 3), np.uint8)
    with ShardWriter(tmp_path / "set", shard_size=3 * tile.size) as writer:
        for _ in range(7):
            writer.add(tile)
    raw = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert [shard["samples"] for shard in raw["shards"]] == [3, 3, 1]
    assert all(shard["bytes"] < shard["samples"] * tile.size + 20_000 for shard in raw["shards"])


@pytest.mark.parametrize(
    ("image", "more", "says"),
    [
        (TILE.astype(int), {}, "type int64, expected one of uint8, uint16, .* convert it to"),
        (TILE[0, 0], {}, "has shape"),
        (np.zeros((0, 4, 3), np.uint8), {}, "has shape"),
        (TILE[:3], {}, "all of one size"),
        (TILE[..., :1], {}, "all of one size"),
        (TILE, {"label": "c"}, "not one of the classes"),
        (TILE, {"label": 2}, "not an index"),
        (TILE, {"label": -1}, "not an index"),
        (TILE, {"split": ""}, "split is empty"),
        (TILE, {"slide": "a\0b"}, "null character"),
        (TILE, {"slide": "a\udc80"}, "slide name .* is not valid Unicode"),  # of a file in Latin-1
        (TILE, {"split": "a\udc80"}, "split name .* is not valid Unicode"),
        (TILE, {"mask": np.zeros((4, 5), np.uint8)}, "others do not"),
        (TILE, {"mpp": 1.0}, "ShardWriter"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_added(
    tmp_path: Path, image: np.ndarray, more: dict[str, object], says: str
) -> None:
    with ShardWriter(tmp_path / "set", ["a", "b"]) as writer:
        writer.add(TILE)
        with pytest.raises(ValueError, match=says):
            writer.add(image, **more)
        writer.add(TILE)
    assert len(ShardDataset(tmp_path / "set")) == 2


def test_masks_are_checked(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        for mask, says in [
            (np.zeros((5, 4), int), "its image has 4 x 5"),
            (np.zeros((4, 5)), "expected integers"),
            (np.full((4, 5), 256), "0 to 255"),
            (np.full((4, 5), -1), "0 to 255"),
        ]:
            with pytest.raises(ValueError, match=says):
                writer.add(TILE, mask=mask)
        writer.add(TILE, mask=np.full((4, 5), 255))
        writer.add(TILE, mask=np.ones((4, 5), bool))
    data = ShardDataset(tmp_path / "set")
    assert data.read_mask(0).tolist() == [[255] * 5] * 4
    assert data.read_mask(1, (1, 2, 0, 3)).tolist() == [[1, 1, 1]]


def fail_in_the_middle(path: Path, error: type[BaseException]) -> None:
    with ShardWriter(path, overwrite=True, shard_size=1) as writer:
        writer.add(TILE + 1)
        writer.add(TILE + 2)
        raise error


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail_in_the_middle(tmp_path / "set", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_old_data_set(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        writer.add(TILE)
    with pytest.raises(RuntimeError):
        fail_in_the_middle(tmp_path / "set", RuntimeError)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert (ShardDataset(tmp_path / "set").read(0) == TILE).all()


def test_overwriting_replaces_all_of_it(tmp_path: Path) -> None:
    for number in (3, 1):
        with ShardWriter(tmp_path / "set", shard_size=1, overwrite=True) as writer:
            for _ in range(number):
                writer.add(TILE + number)
    assert (ShardDataset(tmp_path / "set").read(0) == TILE + 1).all()
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
        "manifest.json",
        "shard-00000.h5",
    ]
    with pytest.raises(ShardError, match="--overwrite"):
        ShardWriter(tmp_path / "set")


def test_what_is_built_looks_like_no_data_set(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "set", shard_size=1)
    writer.add(TILE)
    writer.add(TILE)
    with pytest.raises(ShardError, match=r"no manifest\.json"):
        ShardDataset(writer.workdir)
    assert not (tmp_path / "set").exists()
    writer.abort()
    writer.abort()


def test_a_failure_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("spatialdl.data.saving.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"), ShardWriter(tmp_path / "set") as writer:
        writer.add(TILE)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_data_set_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no samples"), ShardWriter(tmp_path / "set"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_closed_writer_takes_no_more(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        writer.add(TILE)
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.add(TILE)


@pytest.mark.parametrize(
    "arguments",
    [
        {"classes": "ab"},
        {"classes": ["a", "a"]},
        {"classes": ["a\udc80"]},
        {"shard_size": 0},
        {"kind": "cubes"},
        {"stripes": 2},
        {"kind": "regions", "stripes": 0},
        {"codec": "png"},
        {"codec": "jpeg", "quality": 101},
        {"chunk": (8, 8)},
        {"codec": "jpeg", "chunk": (8, 0)},
        {"codec": "jpeg", "chunk": (8, 8), "kind": "regions"},
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(
    tmp_path: Path, arguments: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=r"is|duplicate"):
        ShardWriter(tmp_path / "set", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_writing_imports_no_pytorch() -> None:
    """Workers that cut slides start faster without it."""
    code = "import sys, spatialdl.data as data; data.ShardWriter; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "spatialdl.data.tile_shard" in done.stdout.split()
    assert "torch" not in done.stdout.split()


def test_geometry_of_volumes_is_kept(tmp_path: Path) -> None:
    affine = np.array([[0, 0, -0.7, 3], [0, 0.8, 0, -4.5], [2.5, 0, 0, 7], [0, 0, 0, 1]])
    with ShardWriter(tmp_path / "set", kind="volumes") as writer:
        writer.add(np.zeros((3, 4, 5), np.int16), spacing=(2.5, 0.8, 0.7), affine=affine)
        writer.add(np.zeros((3, 4, 5), np.int16))
    manifest = Manifest.load(tmp_path / "set")
    assert (manifest.version, manifest.kind, manifest.dtype) == (4, "volumes", "int16")
    known, unknown = manifest.samples
    assert (known.size, known.spacing) == ((3, 4, 5), (2.5, 0.8, 0.7))
    assert known.affine == tuple(map(tuple, affine[:3].tolist()))
    assert (unknown.spacing, unknown.affine) == (None, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"image": np.zeros((4, 5), np.uint8)}, r"volume has shape \(4, 5\), expected \(slices"),
        ({"mask": np.zeros((3, 4), np.uint8)}, r"mask has shape \(3, 4\), its image has 3 x 4 x 5"),
        ({"spacing": (1.0, 0.0, 1.0)}, r"spacing is .*, expected three numbers above 0, in mm"),
        ({"spacing": (1.0, 2.0)}, "spacing is .*, expected three"),
        ({"affine": np.full((3, 4), np.nan)}, "affine is .*, expected three rows of four"),
        ({"affine": np.ones((4, 4))}, "affine is .*, expected three rows of four"),
        ({"mpp": 0.5}, "mpp does not apply to volumes"),
    ],
)
def test_what_does_not_fit_a_volume_is_refused(tmp_path: Path, given: dict, said: str) -> None:
    with ShardWriter(tmp_path / "set", kind="volumes") as writer:
        with pytest.raises(ValueError, match=said):
            writer.add(**{"image": np.zeros((3, 4, 5), np.uint8), **given})
        writer.add(np.zeros((3, 4, 5), np.uint8))
    assert len(Manifest.load(tmp_path / "set").samples) == 1


def test_jpeg_of_volumes_and_geometry_of_images_are_refused(tmp_path: Path) -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    with (
        pytest.raises(ValueError, match="codec 'jpeg' does not support volumes; use codec='zstd'"),
        ShardWriter(tmp_path / "set", kind="volumes", codec="jpeg") as writer,
    ):
        writer.add(image[None])
    with (
        pytest.raises(ValueError, match="spacing and affine require kind 'volumes', not 'regions'"),
        ShardWriter(tmp_path / "set", kind="regions") as writer,
    ):
        writer.add(image, spacing=(1, 1, 1))
    assert not (tmp_path / "set").exists()


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


def test_a_volume_of_three_slices_and_many_channels_of_few_rows_are_taken(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "volumes", kind="volumes") as writer:
        writer.add(np.zeros((3, 40, 56), np.uint8))
    with ShardWriter(tmp_path / "spectra") as writer:
        writer.add(np.zeros((3, 5, 200), np.uint8))
