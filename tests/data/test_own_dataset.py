from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data.own_dataset import own_dataset
from spatialdl.data.shards import ShardDataset
from spatialdl.data.writer import ShardWriter
from spatialdl.errors import ShardError


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that is no part of any data set."""
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(192)))
    return path


def test_the_dataset_of_a_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        h5["regions/0/image"] = np.arange(4)
        assert own_dataset(h5, "regions/0/image")[2] == 2
        for name, error in (("regions/1/image", KeyError), ("regions/0", ValueError)):
            with pytest.raises(error, match="regions/"):
                own_dataset(h5, name)


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


@pytest.mark.parametrize("io", ["mmap", "pread", "h5py"])
def test_a_shard_cannot_show_another_file_as_its_pixels(tmp_path: Path, secret: Path, io) -> None:
    """HDF5 reads the values of a dataset from any file that the shard names."""
    folder = tmp_path / "set"
    with ShardWriter(folder) as out:
        out.add(np.zeros((8, 8, 3), np.uint8))
    shard = folder / "shard-00000.h5"
    with h5py.File(shard, "a") as h5:
        del h5["images"]
        h5.create_dataset("images", (1, 8, 8, 3), "u1", external=[(str(secret), 0, 192)])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    data = ShardDataset(folder, io=io)
    with pytest.raises(ShardError, match="has values in other files"):
        data.read(0)
    with pytest.raises(ShardError, match=r"sample 0|samples may be damaged"):
        data.verify()
