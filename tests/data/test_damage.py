"""Damaged, cut and replaced shards are told, and the samples in them named."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.chunk_map import own_dataset
from spatialdl.data.codec import CODECS, Codec
from spatialdl.errors import ShardError
from tests.data.conftest import flip

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 60, 50, 3), np.uint8)


def write(folder: Path, kind: str = "tiles", codec: Codec = "raw", dtype: str = "uint8") -> Path:
    size, stripes = (3 * 60 * 50 * 3, 1) if kind == "tiles" else (2**20, 2)
    with ShardWriter(folder, kind=kind, codec=codec, shard_size=size, stripes=stripes) as writer:
        for number, image in enumerate(IMAGES):
            writer.add(image.astype(dtype), slide=f"s{number}", mask=image[..., 0])
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "set")


def change_manifest(folder: Path, shard: Path | None = None, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    if shard is not None:
        manifest["shards"][0]["bytes"] = shard.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("kind", "what"), [("tiles", "image"), ("regions", "mask")])
@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit_names_the_shard_and_its_samples(
    tmp_path: Path, codec: Codec, kind: str, what: str
) -> None:
    folder = write(tmp_path / "set", kind, codec)
    path = folder / "shard-00001.h5"
    with h5py.File(path, locking=False) as file:
        if kind == "tiles":
            corner = (1, 0, 0) if what == "mask" else (1, 0, 0, 0)
            place = file[f"{what}s"].id.get_chunk_info_by_coord(corner)
        else:
            place = file[f"regions/000004/{what}/00001"].id.get_chunk_info(0)
    flip(path, place.byte_offset + place.size // 2)
    data = ShardDataset(folder)
    inside = "3, 4, 5 (of s3, s4, s5)" if kind == "tiles" else "0, 1, 2 and 3 more (of s0, s1, s2"
    says = rf"shard-00001\.h5 has other .* \(samples {re.escape(inside)}.*\); copy or write"
    with pytest.raises(ShardError, match=says):
        data.verify()
    if codec in ("zstd", "lz4"):
        says = r"h5: chunk at .*row \d+, column 0: checksum mismatch.*; the shard is"
        with pytest.raises(ShardError, match=says):
            (data.read if what == "image" else data.read_mask)(4)
    assert data.read(3).shape == (60, 50, 3)


def test_a_cut_or_missing_shard_is_noticed_at_open(folder: Path) -> None:
    shard = folder / "shard-00001.h5"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ShardError, match=r"shard-00001\.h5 has \d+ bytes, expected \d+; it was tr"):
        ShardDataset(folder)
    shard.unlink()
    with pytest.raises(ShardError, match=r"shard-00001\.h5 cannot be read: No such file"):
        ShardDataset(folder)


def test_a_shard_that_is_cut_between_reads_is_refused(folder: Path) -> None:
    data = ShardDataset(folder)
    data.read(3)
    shard = folder / "shard-00001.h5"
    for length in (shard.stat().st_size - 1, shard.stat().st_size // 2, 0):
        os.truncate(shard, length)
        with pytest.raises(ShardError, match=rf"shard-00001\.h5 has {length} bytes, the manifest"):
            data.read(3, (0, 60, 0, 50))
    assert (data.read(0) == IMAGES[0]).all()


def no_hdf5(shard: Path) -> None:
    shard.write_bytes(b"\0" * shard.stat().st_size)


def another_data_set(shard: Path) -> None:
    with h5py.File(shard, "w") as file:
        file["other"] = np.zeros(3)


def a_stack_without_rows(shard: Path) -> None:
    """HDF5's own way of reading it ended with an `IndexError`."""
    with h5py.File(shard, "a") as h5:
        del h5["images"]
        h5.create_dataset("images", (3, 0, 8, 3), np.uint8)


@pytest.mark.parametrize("replace", [no_hdf5, another_data_set, a_stack_without_rows])
def test_a_shard_that_was_replaced_is_refused_when_read(folder: Path, replace) -> None:
    replace(folder / "shard-00000.h5")
    change_manifest(folder, folder / "shard-00000.h5")
    with pytest.raises(ShardError, match=r"shard-00000\.h5.*copy or write it again"):
        ShardDataset(folder).read(0)


@pytest.mark.parametrize(
    ("codec", "dtype", "changes", "says"),
    [
        ("raw", "uint16", {"dtype": "float32"}, "it has type uint16, expected float32|filters"),
        ("zstd", "uint16", {"dtype": "float32"}, "it has type uint16, expected float32|filters"),
        ("raw", "uint8", {"codec": "jpeg"}, "expected codec 'jpeg'"),
        ("jpeg", "uint8", {"codec": "raw"}, "cannot read images from "),
    ],
)
def test_shards_of_another_type_or_codec_are_refused(
    tmp_path: Path, codec: Codec, dtype: str, changes: dict[str, str], says: str
) -> None:
    folder = write(tmp_path / "set", "tiles", codec, dtype)
    change_manifest(folder, **changes)
    with pytest.raises(ShardError, match=says):
        ShardDataset(folder).read(0)


def test_a_copy_that_cannot_be_read_is_left_for_the_source(tmp_path: Path, caplog) -> None:
    dataset = ShardDataset(write(tmp_path / "set", "tiles", "jpeg"))
    expected = dataset.read(0)
    dataset.close()
    info = dataset.manifest.shards[0]
    (tmp_path / f"{info.sha256}.h5").write_bytes(bytes(info.bytes))
    dataset.use_copies(tmp_path)
    for _ in range(2):
        assert (dataset.read(0) == expected).all()
    [told] = caplog.messages
    assert "is unusable" in told


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that is no part of any data set."""
    (tmp_path / "secret").write_bytes(bytes(range(192)))
    return tmp_path / "secret"


def test_what_lies_in_other_files_is_refused(tmp_path: Path, secret: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["images"] = np.zeros(3)
        other["group/images"] = np.zeros(3)
    virtual = h5py.VirtualLayout((3,), float)
    virtual[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "images", (3,))
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        h5["linked"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "images")
        h5["folder"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "group")
        h5["soft"] = h5py.SoftLink("/linked")
        h5.create_dataset("outside", (192,), "u1", external=[(str(secret), 0, 192)])
        h5.create_virtual_dataset("virtual", virtual)
        for name in ("linked", "folder/images", "soft", "outside", "virtual"):
            with pytest.raises(ValueError, match="which is not allowed in shards"):
                own_dataset(h5, name)
        h5["regions/0/image"] = np.arange(4)
        assert own_dataset(h5, "regions/0/image")[2] == 2
        for name, error in (("regions/1/image", KeyError), ("regions/0", ValueError)):
            with pytest.raises(error, match="regions/"):
                own_dataset(h5, name)


def test_a_shard_cannot_show_another_file_as_its_pixels(folder: Path, secret: Path) -> None:
    """HDF5 reads the values of a dataset from any file that the shard names."""
    shard = folder / "shard-00000.h5"
    with h5py.File(shard, "a") as h5:
        del h5["images"]
        h5.create_dataset("images", (1, 8, 8, 3), "u1", external=[(str(secret), 0, 192)])
    change_manifest(folder, shard)
    data = ShardDataset(folder)
    with pytest.raises(ShardError, match="has values in other files"):
        data.read(0)
    with pytest.raises(ShardError, match="samples 0, 1, 2"):
        data.verify()
