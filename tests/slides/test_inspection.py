"""`spatialdl-tile inspect` and `verify`: what slides and data sets are, and what is wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.inspection import inspect, verify
from spatialdl.slides.tile_cli import main
from tests.data.conftest import flip
from tests.slides.dicom_series import uid, write_annotation, write_series

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 40, 50, 3), np.uint8)
NOBODY = 65534


def test_a_slide_is_described(synthetic, real):
    lines = [" ".join(line.split()) for line in inspect(synthetic["ring"]).splitlines()]
    assert lines[0] == f"slide {synthetic['ring']}"
    start = lines.index("level rows columns downsample mpp tile read")
    assert lines[start + 1] == "0 1600 2304 1 0.5 256 x 256 natively"
    assert lines[start + 2] == "1 800 1152 2 1 256 x 256 natively"
    assert not any(line.startswith("remark") for line in lines)
    lines = [" ".join(k.split()) for k in inspect(real / "CMU-1-Small-Region.svs").splitlines()]
    facts = ["format aperio", "rows 2967", "columns 2220", "mpp 0.499", "power 20x", "levels 1"]
    assert lines[1:8] == [*facts, "file 1.9 MB"]
    lines = inspect(real / "osp-boxes.tiff").splitlines()
    assert lines[-1].startswith("remark: slide has 352.8 x 352.8 micrometres per pixel, ")
    assert "the file is damaged there" in inspect(real / "osp-unreadable.svs").splitlines()[-1]


def test_a_folder_of_slides_has_a_line_for_each(tmp_path, synthetic, real):
    shutil.copy(synthetic["ring"], tmp_path / "b.tiff")
    (tmp_path / "a.svs").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no slide")
    image = np.full((300, 200, 3), 180, np.uint8)
    for name in ("case2", "case1"):
        write_series(tmp_path / name, image, uid(name), levels=2)
    write_annotation(tmp_path / "drawn.dcm", uid("case1"))
    head, empty, ring, *series = inspect(tmp_path).splitlines()
    names = ("slide", "format", "rows", "columns", "mpp", "power", "levels", "file")
    assert tuple(head.split()) == names
    assert empty.split(maxsplit=1) == ["a.svs", "the file is empty; copy it again"]
    assert ring.split()[:5] == ["b.tiff", "generic-tiff", "1600", "2304", "0.5"]
    assert [k.split()[:4] for k in series] == [[f"case{n}", "dicom", "300", "200"] for n in "12"]
    lines = {line.split()[0]: line for line in inspect(real / "bad").splitlines()[1:]}
    assert "has no micrometres" in lines["no-mpp.svs"]
    assert "cut short" in lines["truncated-half.svs"]
    assert not any(str(real) in line for line in lines.values())


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("notes.txt/", None, ShardError, "no slides"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", SlideError, "an HDF5 file, not a slide; give the folder"),
        ("manifest.json", b"{", ShardError, "is damaged"),
    ],
)
def test_what_cannot_be_inspected_says_why(tmp_path, name, content, error, says):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=says) as caught:
        inspect(tmp_path if name in ("manifest.json", "notes.txt/") else path)
    assert "\n" not in str(caught.value)


def test_a_data_set_of_tiles(data_set):
    size = sum(path.stat().st_size for path in data_set.glob("*.h5")) / 1000
    lines = [
        f"data set   {data_set}",
        "kind       tiles",
        "tile size  16 x 16",
        "mpp        0.5",
        "pixels     3 x uint8, raw",
        "samples    7 of 2 slides",
        f"shards     3, {size:.1f} kB",
        "",
        "class     train  val",
        "no            3    0",
        "yes           2    0",
        "no class      0    2",
        "",
        "made with",
        "  tile_size: 16",
        "  labels: a.csv",
    ]
    assert inspect(data_set).splitlines() == lines
    (data_set / "shard-00000.h5").unlink()
    (data_set / "shard-00002.h5").write_bytes(b"cut")
    missing, cut = inspect(data_set).splitlines()[len(lines) - 3 : -4]
    assert missing == "remark: shard-00000.h5 cannot be read: No such file or directory"
    assert cut.startswith("remark: shard-00002.h5 has 3 bytes, expected ")


def test_data_sets_of_regions_and_volumes(tmp_path):
    with ShardWriter(tmp_path / "set", kind="regions") as writer:
        for rows, cols in ((20, 30), (40, 10)):
            writer.add(np.zeros((rows, cols, 1), np.uint8), slide="a", mpp=0.25)
    lines = inspect(tmp_path / "set").splitlines()
    assert "sizes      20 to 40 rows, 10 to 30 columns" in lines
    assert "samples    2 of 1 slide" in lines
    assert lines[-2:] == ["class     no split", "no class         2"]
    with ShardWriter(tmp_path / "other", kind="volumes") as writer:
        writer.add(np.zeros((3, 4, 5), np.int16), spacing=(2.5, 0.8, 0.7))
        writer.add(np.zeros((9, 4, 6), np.int16), spacing=(5.0, 0.8, 0.7))
    lines = inspect(tmp_path / "other").splitlines()
    assert lines[1:4] == [
        "kind       volumes",
        "sizes      3 to 9 slices, 4 to 4 rows, 5 to 6 columns",
        "mm         2.5 to 5 slices, 0.8 to 0.8 rows, 0.7 to 0.7 columns",
    ]
    assert "pixels     1 x int16, raw" in lines


def written(folder: Path, kind: str, codec: str) -> Path:
    """A data set of four samples, each in a shard."""
    with ShardWriter(folder, kind=kind, codec=codec, shard_size=6_000) as writer:
        for number, image in enumerate(IMAGES):
            writer.add(image, slide=f"s{number}")
    return folder


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


def test_damage_is_found_and_named(tmp_path, capsys):
    folder = written(tmp_path / "set", "tiles", "raw")
    shards = sorted(folder.glob("*.h5"))
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("all checksums match\n")
    found = verify(folder)
    assert (found.shards, found.bytes) == (4, sum(shard.stat().st_size for shard in shards))
    with h5py.File(shards[1], locking=False) as file:
        place = file["images"].id.get_chunk_info(0)
    flip(shards[1], place.byte_offset + place.size // 2)
    os.truncate(shards[2], shards[2].stat().st_size // 2)
    shards[3].unlink()
    assert main(["verify", str(folder)]) == 1
    head, flipped, cut, missing = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{folder}: 3 of 4 shards damaged; ")
    assert flipped.startswith("  shard-00001.h5 has other contents (SHA-256 ")
    assert flipped.endswith("it contains sample 1 (of s1)")
    assert "it was truncated or replaced; " in cut
    assert "sample 2 (of s2)" in cut
    assert missing == "  shard-00003.h5 cannot be read: No such file or directory"
    os.truncate(shards[2], 0)
    assert "  shard-00002.h5 has 0 bytes, expected " in str(verify(folder))


@pytest.mark.parametrize("name", ["shard-00001.h5", "."])
def test_permission_denied(tmp_path, capsys, name):
    folder = written(tmp_path / "set", "tiles", "raw")
    with denied(folder / name):
        with pytest.raises(ShardError, match=r"(cannot .*|shard-00001.*)Permission denied"):
            ShardDataset(folder).read(1)
        assert main(["verify", str(folder)]) == 1
        told = capsys.readouterr()
        assert "ermission denied" in told.out + told.err
        if name == ".":
            with pytest.raises(ShardError, match="Permission denied"):
                ShardWriter(folder / "set")
