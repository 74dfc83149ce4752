"""Files of CLAM's patches become tiles; damaged ones are listed or left out."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset
from spatialdl.data.importing import clam
from spatialdl.data.importing.clam import import_clam

RANDOM = np.random.default_rng(0)
PATCHES = {
    name: RANDOM.integers(0, 256, (count, 16, 16, 3), np.uint8)
    for name, count in (("s1", 5), ("s2.a", 3))
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """As CLAM makes them: grown patch by patch, with attributes."""
    folder = tmp_path / "patches"
    folder.mkdir()
    for slide, patches in PATCHES.items():
        with h5py.File(folder / f"{slide}.h5", "w") as file:
            for name, shape, dtype in (("imgs", (16, 16, 3), "u1"), ("coords", (2,), "i4")):
                grown = {"maxshape": (None, *shape), "chunks": (1, *shape)}
                file.create_dataset(name, (0, *shape), dtype, **grown)
            file["imgs"].attrs["patch_level"] = 0
            for number, patch in enumerate(patches):
                for dataset, value in (("imgs", patch), ("coords", (256 * number, 7))):
                    file[dataset].resize(number + 1, 0)
                    file[dataset][number] = value
    return folder


def test_patches_become_tiles_and_are_never_all_in_memory(tmp_path, files, monkeypatch):
    asked = []
    read = h5py.Dataset.__getitem__

    def noted(self: h5py.Dataset, key: object, **more: object) -> object:
        if self.name == "/imgs":
            asked.append(key)
        return read(self, key, **more)

    monkeypatch.setattr(clam, "_AT_ONCE", 2 * 16 * 16 * 3)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", noted)
    import_clam([files / "s1.h5"], tmp_path / "one", codec="lz4")
    assert asked == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert ShardDataset(tmp_path / "one").labels.tolist() == [-1] * 5
    labels = tmp_path / "labels.csv"
    labels.write_text("case_id,slide_id,label,split\nc,s1,tumour,train\nd,s2.a.svs,benign,val\n")
    import_clam([files], tmp_path / "set", labels=labels, mpp=0.5)
    data = ShardDataset(tmp_path / "set")
    assert (data.classes, data.splits, data.mpp) == (["benign", "tumour"], ["train", "val"], 0.5)
    assert data.labels.tolist() == [1] * 5 + [0] * 3
    assert (np.stack([image for image, _ in data]) == np.concatenate([*PATCHES.values()])).all()
    samples = [data.sample(k) for k in (4, 5)]
    assert [(one.slide, one.x, one.y) for one in samples] == [("s1", 1024, 7), ("s2.a", 0, 7)]


def bad(folder: Path, name: str, **datasets: np.ndarray) -> None:
    with h5py.File(folder / f"{name}.h5", "w") as file:
        for key, value in datasets.items():
            file[key] = value


def test_files_without_patches_are_listed_or_left_out(tmp_path: Path, files: Path) -> None:
    images, coords = np.zeros((2, 16, 16, 3), np.uint8), np.zeros((2, 2), int)
    bad(files, "b1", coords=coords)
    bad(files, "b2", imgs=images[0], coords=coords)
    bad(files, "b3", imgs=images.astype(np.int32), coords=coords)
    bad(files, "b4", imgs=images[:0], coords=coords[:0])
    bad(files, "b5", imgs=images, coords=coords[:1])
    bad(files, "b6", imgs=images)
    (files / "b7.h5").write_bytes((files / "s1.h5").read_bytes()[:4000])
    (files / "b8.h5").write_text("no HDF5")
    with pytest.raises(ValueError, match="8 files have no readable patches") as got:
        import_clam([files], tmp_path / "set")
    for says in (
        "b1.h5: it has no dataset 'imgs'; it has coords",
        "b2.h5: 'imgs' has shape (16, 16, 3), expected 4 dims",
        *("b3.h5: image has type int32", "b4.h5: it has no patches", "b7.h5: ", "b8.h5: "),
        "b5.h5: 'coords' is int64 of shape (1, 2), expected numbers of shape (2, 2)",
        "b6.h5: it has no dataset 'coords'; it has imgs",
    ):
        assert says in str(got.value)
    assert not (tmp_path / "set").exists()
    assert len(import_clam([files], tmp_path / "set", skip_broken=True)) == 8
    assert len(ShardDataset(tmp_path / "set")) == 8
    with pytest.raises(ValueError, match="1 files have no readable patches"):
        import_clam([files / "b1.h5"], tmp_path / "none", skip_broken=True)


@pytest.mark.parametrize(
    ("there", "damaged"),
    [
        (b"TREE", b"tree"),  # the table of contents: a RuntimeError of h5py
        (b"imgs\0", b"\xffmgs\0"),  # the name of a dataset: a TypeError
        (b"header", b"\xff"),  # where a dataset is described: a KeyError
    ],
)
def test_a_damaged_file_is_listed_whatever_h5py_makes_of_it(
    tmp_path: Path, files: Path, there: bytes, damaged: bytes
) -> None:
    path = files / "s1.h5"
    content = path.read_bytes()
    with h5py.File(path, "r") as h5:
        header = h5py.h5o.get_info(h5["imgs"].id).addr
    at = header if there == b"header" else content.index(there)
    path.write_bytes(content[:at] + damaged + content[at + len(damaged) :])
    with pytest.raises(ValueError, match=r"1 files have no readable patches.*\n.*s1\.h5: "):
        import_clam([files], tmp_path / "set")
    [left_out] = import_clam([files], tmp_path / "set", skip_broken=True)
    assert left_out.startswith(f"{path}: ")
    assert len(ShardDataset(tmp_path / "set")) == 3


def test_a_damaged_chunk_is_named_and_nothing_written(tmp_path: Path, files: Path) -> None:
    images = RANDOM.integers(0, 9, (3, 16, 16, 3), np.uint8)
    with h5py.File(files / "z.h5", "w") as file:
        file.create_dataset("imgs", data=images, chunks=(1, 16, 16, 3), compression="gzip")
        file["coords"] = np.zeros((3, 2), int)
        where = file["imgs"].id.get_chunk_info(1)
    with (files / "z.h5").open("rb+") as file:
        file.seek(where.byte_offset)
        file.write(bytes(where.size))
    with pytest.raises(ValueError, match=r"z\.h5 is damaged from patch 0 on, and nothing was"):
        import_clam([files], tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["patches"]


def test_a_slide_without_a_label_is_named(tmp_path: Path, files: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("slide_id,label\ns1,a\n")
    with pytest.raises(ValueError, match=r"has no label of slide s2\.a; add a line"):
        import_clam([files], tmp_path / "set", labels=path)
    assert not (tmp_path / "set").exists()


def test_files_that_do_not_go_together_are_refused(tmp_path: Path, files: Path) -> None:
    bad(files, "t", imgs=np.zeros((2, 8, 8, 3), np.uint8), coords=np.zeros((2, 2), int))
    for name in ("x", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "x" / "s1.h5").write_bytes(b"")
    for given, says in [
        ([files], r"t\.h5 has patches of \(8, 8, 3\) uint8, .*s1\.h5 of"),
        ([files / "s1.h5", tmp_path / "x"], r"s1\.h5 have the same name"),
        ([files / "none.h5"], "no such file"),
        ([tmp_path / "empty"], r"no files \*\.h5"),
    ]:
        with pytest.raises(ValueError, match=says):
            import_clam(given, tmp_path / "set")
