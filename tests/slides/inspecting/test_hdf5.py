from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data.writer import ShardWriter
from spatialdl.errors import ShardError
from spatialdl.slides.inspecting import inspect
from spatialdl.slides.inspecting.hdf5 import describe_hdf5


def test_a_shard_of_tiles(data_set: Path) -> None:
    lines = inspect(data_set / "shard-00000.h5").splitlines()
    assert lines[1] == "kind  shard of 3 tiles"
    assert lines[4].split() == ["dataset", "shape", "type", "chunk", "codec"]
    words = [" ".join(line.split()) for line in lines]
    assert "images 3 x 16 x 16 x 3 uint8 1 x 16 x 16 x 3 raw" in words
    assert "coords 3 x 2 int64 raw" in words
    assert "slides 3 text raw" in words


def test_a_shard_of_regions_names_some(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", kind="regions") as writer:
        for _ in range(43):
            writer.add(np.zeros((2, 3, 1), np.uint8))
    text = inspect(tmp_path / "set" / "shard-00000.h5")
    assert "kind  shard with parts of 43 regions" in text
    assert "\nand 3 datasets more" in text
    assert "attributes" in text


def test_coordinates_as_other_tools_write_them(tmp_path: Path) -> None:
    clam = {"patch_size": 256, "patch_level": 0, "level_dim": np.array([20, 10]), "name": "a\nb"}
    for name, attributes in (("clam", clam), ("trident", {"patch_size_level0": 512})):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("coords", data=np.zeros((5, 2), np.int64), compression="gzip")
            file["coords"].attrs.update(attributes)
    text = inspect(tmp_path / "clam.h5")
    assert "kind  coordinates of 5 tiles, in the format of CLAM" in text
    for line in ("coords patch_size: 256", "coords level_dim: [20, 10]", "coords name: a?b"):
        assert f"\n  {line}" in text
    assert "deflate" in text
    assert "in the format of TRIDENT" in inspect(tmp_path / "trident.h5")
    lines = inspect(tmp_path).splitlines()
    assert lines[0].startswith("clam.h5  coordinates of 5 tiles, in the format of CLAM, ")
    assert len(lines) == 2


def test_no_other_file_is_opened_that_a_file_names(tmp_path: Path) -> None:
    """Here one that nobody writes to: who opens it waits for ever."""
    (tmp_path / "set").mkdir()
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    with h5py.File(tmp_path / "set" / "linked.h5", "w") as file:
        file["images"] = file["regions"] = h5py.ExternalLink(pipe, "images")
        file["coords"] = np.zeros((5, 2))
    size = {"shape": (3, 8), "maxshape": (None, 8)}
    layout, source = h5py.VirtualLayout(dtype="u1", **size), h5py.VirtualSource(pipe, "a", **size)
    every = h5py.h5s.UNLIMITED
    layout[:every, :] = source[:every, :]
    with h5py.File(tmp_path / "set" / "virtual.h5", "w") as file:
        file.create_virtual_dataset("images", layout)
    lines = inspect(tmp_path / "set").splitlines()
    assert lines[0].startswith("linked.h5  coordinates of 5 tiles, ")
    assert lines[1].startswith("virtual.h5  HDF5 file of 1 item, of unknown kind, ")
    assert "5 x 2" in describe_hdf5(tmp_path / "set" / "linked.h5")
    assert "in other files" in describe_hdf5(tmp_path / "set" / "virtual.h5")


def test_files_that_are_not_hdf5_say_why(tmp_path: Path, data_set: Path) -> None:
    whole = (data_set / "shard-00000.h5").read_bytes()
    (tmp_path / "folder.h5").mkdir()
    for name, content, says in [
        ("cut.h5", whole[: len(whole) // 2], "cut short or damaged"),
        ("empty.h5", b"", "the file is empty"),
        ("lfs.h5", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("text.h5", b"hello", "not an HDF5 file"),
        ("none.h5", None, "No such file"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ShardError, match=says) as error:
            inspect(tmp_path / name)
        assert "\n" not in str(error.value)
    assert len(inspect(tmp_path).splitlines()) == 4


def test_a_shard_is_known_without_its_suffix(tmp_path: Path, data_set: Path) -> None:
    (data_set / "shard-00000.h5").rename(tmp_path / "renamed")
    assert "shard of 3 tiles" in inspect(tmp_path / "renamed")
