from __future__ import annotations

from pathlib import Path

import h5py
import pytest

from spatialdl.errors import ShardError
from spatialdl.slides.inspecting.apart import describe_apart
from spatialdl.slides.inspecting.hdf5 import describe_hdf5


def test_it_says_the_same(data_set: Path) -> None:
    path = data_set / "shard-00000.h5"
    assert describe_apart(path) == describe_hdf5(path)


def test_a_file_in_which_hdf5_never_ends(tmp_path: Path) -> None:
    """What is free in a heap of text has no bytes: HDF5 looks for the next at the same place."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5:
        h5.attrs["name"] = "text"
    content = bytearray(path.read_bytes())
    first = content.index(b"GCOL") + 16  # index, references, reserved, size; then the bytes
    assert content[first : first + 20] == b"\1\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0text"
    content[first + 32 : first + 40] = bytes(8)  # the size of the free one after it
    path.write_bytes(content)
    with pytest.raises(ShardError, match=r"HDF5 crashed or timed out, .*; copy it again"):
        describe_apart(path, 3)
