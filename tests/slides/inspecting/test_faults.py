"""Whatever happens to a data set is told, when it is read and by `spatialdl-tile verify`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.codec import CODECS
from spatialdl.errors import ShardError
from spatialdl.slides.command import main

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 40, 50, 3), np.uint8)
NOBODY = 65534


@pytest.fixture(params=["tiles-raw", "tiles-zstd", "regions-lz4", "regions-jpeg"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    kind, codec = request.param.split("-")
    assert codec in CODECS
    with ShardWriter(tmp_path / "set", kind=kind, codec=codec, shard_size=6_000) as writer:
        for number, image in enumerate(IMAGES):
            writer.add(image, slide=f"s{number}")
    return tmp_path / "set"


def verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["verify", str(folder)])
    told = capsys.readouterr()
    return code, told.out + told.err


def read_all(folder: Path) -> None:
    data = ShardDataset(folder)
    for number in range(len(data)):
        data.read(number)


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


def test_what_is_whole_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read_all(folder)
    assert verified(folder, capsys)[0] == 0


@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_a_cut_shard(folder: Path, capsys: pytest.CaptureFixture[str], part: float) -> None:
    shard = folder / "shard-00002.h5"
    os.truncate(shard, int(shard.stat().st_size * part))
    with pytest.raises(
        ShardError, match=r"shard-00002\.h5 has \d+ bytes, the manifest records \d+"
    ):
        read_all(folder)
    code, told = verified(folder, capsys)
    assert code == 1
    assert "shard-00002.h5: has " in told
    assert "it was truncated or replaced; " in told
    assert "sample 2 (slide s2)" in told


def test_a_missing_shard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "shard-00001.h5").unlink()
    with pytest.raises(ShardError, match=r"cannot find shard-00001\.h5"):
        read_all(folder)
    code, told = verified(folder, capsys)
    assert code == 1
    assert "shard-00001.h5: cannot be read: No such file" in told


def test_a_flipped_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = folder / "shard-00001.h5"
    with h5py.File(shard, locking=False) as file:
        dataset = file["images"] if "images" in file else file["regions/000001/image"]
        place = dataset.id.get_chunk_info(0)
    with shard.open("rb+") as file:
        file.seek(place.byte_offset + place.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    code, told = verified(folder, capsys)
    assert code == 1
    assert "shard-00001.h5: its contents changed (SHA-256" in told
    assert "damaged: sample 1 (slide s1)" in told
    data = ShardDataset(folder)
    if data.codec in ("zstd", "lz4"):
        with pytest.raises(ShardError, match="checksum mismatch"):
            data.read(1)


def test_a_manifest_of_a_newer_version(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 5}))
    with pytest.raises(ShardError, match=r"format version 5 is newer than 4.*upgrade spatialdl"):
        read_all(folder)
    code, told = verified(folder, capsys)
    assert code == 1
    assert "format version 5 is newer than 4" in told


def test_a_shard_of_another_data_set_of_the_same_length(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ShardDataset(folder)
    data.read(0)
    other = (folder / "shard-00003.h5").read_bytes()
    size = (folder / "shard-00000.h5").stat().st_size
    (folder / "shard-00000.h5").write_bytes(other[:size].ljust(size, b"\0"))
    os.utime(folder / "shard-00000.h5", ns=(0, 0))
    with pytest.raises(ShardError, match=r"shard-00000\.h5 was changed or replaced since"):
        data.read(0)
    code, told = verified(folder, capsys)
    assert code == 1
    assert "shard-00000.h5: its contents changed" in told


@pytest.mark.parametrize("name", ["shard-00001.h5", "manifest.json", "."])
def test_permission_denied(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with denied(folder / name):
        with pytest.raises(ShardError, match=r"(cannot .*|shard-00001.*)Permission denied"):
            read_all(folder)
        code, told = verified(folder, capsys)
    assert code == 1
    assert "ermission denied" in told
    assert "Traceback" not in told


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with denied(tmp_path / "there"), pytest.raises(ShardError, match="Permission denied"):
        ShardWriter(tmp_path / "there" / "set")


def test_a_manifest_of_other_shards(folder: Path, tmp_path: Path) -> None:
    """Shards are there, and as long as they should be, but hold something else."""
    shutil.copytree(folder, tmp_path / "other")
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        with h5py.File(path, "w") as file:
            file["something"] = np.zeros(4)
        shard["bytes"] = path.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=r"cannot read (images|regions/.*) from .*shard-00000\.h5"):
        read_all(folder)
