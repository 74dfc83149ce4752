"""Whatever happens to a data set is told, when it is read and by `spatialdl-tile verify`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.errors import ShardError
from spatialdl.slides.command import main
from spatialdl.slides.inspecting import verify

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 40, 50, 3), np.uint8)
NOBODY = 65534


@pytest.fixture(params=["tiles-raw", "regions-lz4"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    kind, codec = request.param.split("-")
    with ShardWriter(tmp_path / "set", kind=kind, codec=codec, shard_size=6_000) as writer:
        for number, image in enumerate(IMAGES):
            writer.add(image, slide=f"s{number}")
    return tmp_path / "set"


def read_all(folder: Path) -> None:
    data = ShardDataset(folder)
    for number in range(len(data)):
        data.read(number)


def check(
    folder: Path, capsys: pytest.CaptureFixture[str], reading: str | None, *says: str
) -> None:
    """Reading raises that, or nothing, and verifying says these things."""
    if reading is not None:
        with pytest.raises(ShardError, match=reading):
            read_all(folder)
    assert main(["verify", str(folder)]) == 1
    told = capsys.readouterr()
    for what in says:
        assert what in told.out + told.err
    assert "Traceback" not in told.out + told.err


@contextmanager
def denied(path: Path) -> Iterator[None]:
    """Nobody may read it; root gives up being root, whom nothing is denied."""
    mode, root = path.stat().st_mode, os.geteuid() == 0
    for above in path.parents:
        if root and above.stat().st_uid == 0 and above.stat().st_mode & 0o005 != 0o005:
            above.chmod(0o755)
    path.chmod(0)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        path.chmod(mode)


def test_what_is_whole_is(folder):
    read_all(folder)
    assert main(["verify", str(folder)]) == 0
    found = verify(folder)
    assert found
    assert found.problems == ()
    size = sum(path.stat().st_size for path in folder.glob("*.h5"))
    assert (found.shards, found.bytes) == (4, size)
    assert str(found).startswith(f"{folder}: 4 shards, ")
    assert str(found).endswith("all checksums match")


def test_cut_and_missing_shards(folder, capsys):
    shard = folder / "shard-00002.h5"
    for part in (0.5, 0):
        os.truncate(shard, int(shard.stat().st_size * part))
        reading = r"shard-00002\.h5 has \d+ bytes, the manifest records \d+"
        said = ("shard-00002.h5: has ", "it was truncated or replaced; ", "sample 2 (of s2)")
        check(folder, capsys, reading, *said)
    (folder / "shard-00001.h5").unlink()
    said = "shard-00001.h5: cannot be read: No such file"
    check(folder, capsys, r"cannot find shard-00001\.h5", said, "2 of 4 shards damaged")


def test_a_flipped_bit(folder, capsys):
    shard = folder / "shard-00001.h5"
    with h5py.File(shard, locking=False) as file:
        dataset = file["images"] if "images" in file else file["regions/000001/image"]
        place = dataset.id.get_chunk_info(0)
    content = bytearray(shard.read_bytes())
    content[place.byte_offset + place.size // 2] ^= 1
    shard.write_bytes(content)
    says = ("shard-00001.h5: its contents changed (SHA-256", "it contains sample 1 (of s1)")
    check(folder, capsys, None, *says)
    data = ShardDataset(folder)
    if data.codec != "raw":
        with pytest.raises(ShardError, match="checksum mismatch"):
            data.read(1)


def test_a_manifest_of_a_newer_version(folder, capsys):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format_version": 5}))
    says = "format version 5 is newer than 4"
    check(folder, capsys, f"{says}.*upgrade spatialdl", says)


@pytest.mark.parametrize("name", ["shard-00001.h5", "manifest.json", "."])
def test_permission_denied(folder, capsys, name):
    with denied(folder / name):
        check(folder, capsys, r"(cannot .*|shard-00001.*)Permission denied", "ermission denied")
    if name == ".":
        with denied(folder), pytest.raises(ShardError, match="Permission denied"):
            ShardWriter(folder / "set")


def test_a_folder_without_manifest_is_refused(tmp_path, data_set):
    for path, says in [
        (tmp_path, "no manifest.json"),
        (data_set / "shard-00000.h5", "give the folder itself"),
        (tmp_path / "none", "no such folder"),
    ]:
        with pytest.raises(ShardError, match=says):
            verify(path)
