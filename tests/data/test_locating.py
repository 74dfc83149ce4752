from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data import format as data_format
from spatialdl.data.codec import CODECS, Codec
from spatialdl.data.format import Manifest
from spatialdl.data.locating import damaged_samples, describe_damage
from spatialdl.errors import ShardError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 60, 50, 3), np.uint8)


def written(folder: Path, kind: str, codec: Codec) -> Manifest:
    size, stripes = (3 * 60 * 50 * 3, 1) if kind == "tiles" else (2**20, 2)
    with ShardWriter(folder, kind=kind, codec=codec, shard_size=size, stripes=stripes) as writer:
        for number, image in enumerate(IMAGES):
            writer.add(image, slide=f"s{number}", mask=image[..., 0])
    return Manifest.load(folder)


def flip(path: Path, at: int) -> None:
    with path.open("rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("what", ["image", "mask"])
@pytest.mark.parametrize("kind", ["tiles", "regions"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit_names_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec, kind: str, what: str
) -> None:
    monkeypatch.setattr(data_format, "CHUNK", 10)  # so that an image has several
    manifest = written(tmp_path / "set", kind, codec)
    shard, sample = 1, 4
    path = tmp_path / "set" / "shard-00001.h5"
    assert [damaged_samples(tmp_path / "set", manifest, k) for k in range(2)] == [[], []]
    with h5py.File(path, locking=False) as file:
        if kind == "tiles":
            corner = (1, 0, 0) if what == "mask" else (1, 0, 0, 0)
            place = file[f"{what}s"].id.get_chunk_info_by_coord(corner)
        else:
            place = file[f"regions/000004/{what}/00001"].id.get_chunk_info(0)
    flip(path, place.byte_offset + place.size // 2)
    assert damaged_samples(tmp_path / "set", manifest, shard) == [sample]
    assert describe_damage(tmp_path / "set", manifest, shard) == "damaged: sample 4 (slide s4)"
    says = r"in shard-00001\.h5 \(damaged: sample 4 \(slide s4\)\); copy or write"
    with pytest.raises(ShardError, match=says):
        ShardDataset(tmp_path / "set").verify()


def test_every_byte_of_a_shard_is_watched(tmp_path: Path) -> None:
    manifest = written(tmp_path / "set", "tiles", "zstd")
    path = tmp_path / "set" / "shard-00000.h5"
    data = ShardDataset(tmp_path / "set")
    for at in np.random.default_rng(1).integers(0, path.stat().st_size, 40).tolist():
        flip(path, at)
        with pytest.raises(ShardError, match=r"shard-00000\.h5 \("):
            data.verify()
        assert describe_damage(tmp_path / "set", manifest, 0)
        flip(path, at)
    data.verify()


def test_what_is_no_hdf5_any_more_may_be_damaged_altogether(tmp_path: Path) -> None:
    manifest = written(tmp_path / "set", "tiles", "raw")
    path = tmp_path / "set" / "shard-00000.h5"
    size = path.stat().st_size
    os.truncate(path, size // 2)
    said = describe_damage(tmp_path / "set", manifest, 0)
    assert said == (
        "all of its 3 samples may be damaged: sample 0 (slide s0), sample 1 (slide s1), "
        "sample 2 (slide s2)"
    )


def test_shards_without_sums_are_told_as_a_whole(tmp_path: Path) -> None:
    manifest = written(tmp_path / "set", "tiles", "raw")
    with h5py.File(tmp_path / "set" / "shard-00001.h5", "a") as file:
        del file["images_crc32"]
    with pytest.raises(KeyError):
        damaged_samples(tmp_path / "set", manifest, 1)
    assert describe_damage(tmp_path / "set", manifest, 1).startswith("all of its 3 samples may be")


def test_few_of_many_are_named(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        for _ in range(9):
            writer.add(IMAGES[0])
    (tmp_path / "set" / "shard-00000.h5").write_bytes(b"")
    said = describe_damage(tmp_path / "set", Manifest.load(tmp_path / "set"), 0)
    assert said.endswith("sample 4 and 4 more")
