"""`spatialdl-tile inspect`: slides, data sets, their shards, folders of them."""

from __future__ import annotations

import os
import shutil

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardWriter
from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.inspecting import inspect
from spatialdl.slides.inspecting.apart import describe_apart
from spatialdl.slides.inspecting.hdf5 import describe_hdf5
from tests.slides.dicom_series import uid, write_annotation, write_series


def test_a_pyramid(synthetic):
    lines = inspect(synthetic["ring"]).splitlines()
    assert lines[0] == f"slide       {synthetic['ring']}"
    assert "size        1600 rows x 2304 columns, 0.80 x 1.15 mm" in lines
    assert "power       unknown; 20x by its mpp" in lines
    table = [" ".join(line.split()) for line in lines]
    start = table.index("level rows columns downsample mpp tile read")
    assert table[start + 1] == "0 1600 2304 1 0.5 256 x 256 natively"
    assert table[start + 2] == "1 800 1152 2 1 256 x 256 natively"
    assert not any(line.startswith("remark") for line in lines)


def test_an_aperio_slide(real):
    path = real / "CMU-1-Small-Region.svs"
    lines = inspect(path).splitlines()
    for line in [
        "format      aperio",
        "file        1.9 MB (1,938,955 bytes)",
        "size        2967 rows x 2220 columns, 1.48 x 1.11 mm",
        "mpp         0.499 horizontally, 0.499 vertically",
        "power       20x",
        "background  #FFFFFF",
        "associated  label 463 x 387, macro 431 x 1280, thumbnail 768 x 574",
    ]:
        assert line in lines
    assert max(map(len, lines)) < 120


def test_a_folder_of_slides_has_a_line_for_each(tmp_path, synthetic, real):
    shutil.copy(synthetic["ring"], tmp_path / "b.tiff")
    (tmp_path / "a.svs").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no slide")
    head, empty, ring = inspect(tmp_path).splitlines()
    names = ("slide", "format", "rows", "columns", "mpp", "power", "levels", "size")
    assert tuple(head.split()) == names
    assert empty.split(maxsplit=1) == ["a.svs", "the file is empty; copy it again"]
    assert ring.split()[:5] == ["b.tiff", "generic-tiff", "1600", "2304", "0.5"]
    lines = {line.split()[0]: line for line in inspect(real / "bad").splitlines()[1:]}
    names = ("all-white", "corrupt-some-tiles", "empty", "no-mpp", "truncated-half")
    assert list(lines) == [f"{name}.svs" for name in names]
    assert "has no micrometres" in lines["no-mpp.svs"]
    assert "cut short" in lines["truncated-half.svs"]
    assert not any(str(real) in line for line in lines.values())
    # the folder of a Mirax slide counts; what is in the file tells the format
    path = (tmp_path / "b.tiff").rename(tmp_path / "a.mrxs")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "Data0000.dat").write_bytes(bytes(10**6))
    assert f"({path.stat().st_size + 10**6:,} bytes)" in inspect(path)


def test_a_folder_of_folders_of_series_has_a_line_for_each(tmp_path):
    image = np.full((300, 200, 3), 180, np.uint8)
    for name in ("case2", "case1"):
        write_series(tmp_path / "slides" / name, image, uid(name), levels=2)
    write_annotation(tmp_path / "slides" / "drawn.dcm", uid("case1"))
    _, *lines = inspect(tmp_path / "slides").splitlines()
    assert [line.split()[:4] for line in lines] == [
        [name, "dicom", "300", "200"] for name in ("case1", "case2")
    ]
    with pytest.raises(ShardError, match="give one of the folders in it, such as slides"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("a.svs", None, SlideError, "there is no such file"),
        ("notes.txt/", None, ShardError, "no slides"),
        ("cut.h5", b"\x89HDF\r\n\x1a\n", ShardError, "cut short or damaged"),
        ("lfs.h5", b"version https://git-lfs.github.com/spec/v1\n", ShardError, "Git LFS pointer"),
        ("text.h5", b"hello", ShardError, "not an HDF5 file"),
        ("none.h5", None, ShardError, "No such file"),
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
    assert inspect(data_set).splitlines() == [
        f"data set   {data_set}",
        "kind       tiles",
        "tile size  16 x 16",
        "mpp        0.5",
        "channels   3",
        "dtype      uint8",
        "codec      raw",
        "masks      no",
        "samples    7 of 2 slides",
        f"shards     3, {size:.1f} kB",
        "",
        "class     train  val  all",
        "no            3    0    3",
        "yes           2    0    2",
        "no class      0    2    2",
        "all           5    2    7",
        "",
        "made with",
        "  tile_size: 16",
        "  labels: a.csv",
    ]


def test_shards_that_are_missing_or_cut_are_named(data_set):
    (data_set / "shard-00000.h5").unlink()
    (data_set / "shard-00002.h5").write_bytes(b"cut")
    remarks = [line for line in inspect(data_set).splitlines() if line.startswith("remark")]
    assert remarks[0] == "remark: cannot find shard-00000.h5 (No such file or directory)"
    assert remarks[1].startswith("remark: shard-00002.h5 has 3 bytes of ")
    assert len(remarks) == 2


def test_data_sets_of_regions_and_volumes(tmp_path):
    with ShardWriter(tmp_path / "set", kind="regions") as writer:
        for rows, cols in ((20, 30), (40, 10)):
            writer.add(np.zeros((rows, cols, 1), np.uint8), slide="a", mpp=0.25)
    lines = inspect(tmp_path / "set").splitlines()
    assert "sizes      20 to 40 rows, 10 to 30 columns" in lines
    assert "samples    2 of 1 slide" in lines
    assert lines[-2:] == ["class     no split  all", "no class         2    2"]
    with ShardWriter(tmp_path / "other", kind="volumes") as writer:
        writer.add(np.zeros((3, 4, 5), np.int16), spacing=(2.5, 0.8, 0.7))
        writer.add(np.zeros((9, 4, 6), np.int16), spacing=(5.0, 0.8, 0.7))
        writer.add(np.zeros((9, 4, 6), np.int16))
    lines = inspect(tmp_path / "other").splitlines()
    assert lines[1:4] == [
        "kind       volumes",
        "sizes      3 to 9 slices, 4 to 4 rows, 5 to 6 columns",
        "spacing    2.5 to 5 mm (slices), 0.8 to 0.8 mm (rows), 0.7 to 0.7 mm (columns), "
        "of 2 of 3 volumes",
    ]
    assert "dtype      int16" in lines


def test_a_shard_of_tiles(data_set):
    path = (data_set / "shard-00000.h5").rename(data_set / "renamed")  # known without its suffix
    text = inspect(path)
    assert text == describe_hdf5(path)
    lines = text.splitlines()
    assert lines[1] == "kind  shard of 3 tiles"
    words = [" ".join(line.split()) for line in lines]
    assert words[4] == "dataset shape type chunk codec"
    assert "images 3 x 16 x 16 x 3 uint8 1 x 16 x 16 x 3 raw" in words
    assert {"coords 3 x 2 int64 raw", "slides 3 text raw"} <= {*words}


def test_coordinates_as_other_tools_write_them(tmp_path):
    clam = {"patch_size": 256, "patch_level": 0, "level_dim": np.array([20, 10]), "name": "a\nb"}
    for name, attributes in (("clam", clam), ("trident", {"patch_size_level0": 512})):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("coords", data=np.zeros((5, 2), np.int64), compression="gzip")
            file["coords"].attrs.update(attributes)
    text = describe_hdf5(tmp_path / "clam.h5")
    assert "kind  coordinates of 5 tiles, in the format of CLAM" in text
    for line in ("coords patch_size: 256", "coords level_dim: [20, 10]", "coords name: a?b"):
        assert f"\n  {line}" in text
    assert "deflate" in text
    assert "in the format of TRIDENT" in describe_hdf5(tmp_path / "trident.h5")
    lines = inspect(tmp_path).splitlines()
    assert lines[0].startswith("clam.h5  coordinates of 5 tiles, in the format of CLAM, ")
    assert len(lines) == 2


def test_no_other_file_is_opened_that_a_file_names(tmp_path):
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


def test_a_file_in_which_hdf5_never_ends(tmp_path):
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
        describe_apart(path, 2)
