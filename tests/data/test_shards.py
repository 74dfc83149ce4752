"""Data sets of shards: what was written is read, any box of it."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data import format as data_format
from spatialdl.data.codec import CODECS
from spatialdl.data.image_source import DTYPES
from spatialdl.errors import ShardError

H, W = 700, 530
IMAGES = np.random.default_rng(0).integers(0, 256, (5, H, W, 3), np.uint8)
LABELS = [0, 1, 0, -1, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "set"
    splits = ["train", "val", "train", None, "train"]
    with ShardWriter(path, ["a", "b"], mpp=0.5, shard_size=4_000_000) as writer:
        for number, image in enumerate(IMAGES):
            label = None if number == 3 else number % 2
            writer.add(image, label, splits[number], slide=f"s{number}", xy=(number, 7))
    return path


def test_what_was_written_is_read(folder: Path) -> None:
    data = ShardDataset(folder)
    assert (len(data), data.classes, data.splits) == (5, ["a", "b"], ["train", "val"])
    assert (data.kind, data.channels, data.mpp, data.has_masks) == ("tiles", 3, 0.5, False)
    assert (data.codec, data.image_size(4)) == ("raw", (H, W))
    assert (data.labels.dtype, data.labels.tolist()) == (np.int64, LABELS)
    assert (data.sample(2).slide, data.sample(2).x, data.sample(2).y) == ("s2", 2, 7)
    for number, (image, label) in enumerate(data):
        assert (image == IMAGES[number]).all()
        assert label == data.labels[number]
    assert (data.read(-1) == IMAGES[4]).all()
    data.verify()
    images, labels = next(iter(DataLoader(data, batch_size=5)))
    assert (images.numpy() == IMAGES).all()
    assert labels.tolist() == LABELS


def test_a_split_is_a_data_set_of_its_own(folder: Path, tmp_path: Path) -> None:
    data = ShardDataset(folder, split="train")
    assert data.labels.tolist() == [0, 0, 0]
    assert (data[1][0] == IMAGES[2]).all()
    with pytest.raises(ValueError, match="no split 'test'; its splits: train, val"):
        ShardDataset(folder, split="test")
    with ShardWriter(tmp_path / "set") as writer:
        writer.add(np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(ValueError, match=r"none; use all .* split=None \(data.split=null for tra"):
        ShardDataset(tmp_path / "set", split="train")


def test_what_is_not_there_is_refused(folder: Path) -> None:
    data = ShardDataset(folder)
    for box in [(-1, 5, 0, 5), (0, H + 1, 0, 5), (0, 5, 0, W + 1), (5, 4, 0, 5), (0, 5, 5, 4)]:
        with pytest.raises(ValueError, match=f"not inside sample 2 of {H} x {W}"):
            data.read(2, box)
    for number in (5, -6):
        with pytest.raises(IndexError, match="for 5 samples"):
            data[number]
    with pytest.raises(ValueError, match="no masks"):
        data.read_mask(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_files_are_opened_when_needed_never_pickled_and_a_fork_opens_its_own(folder: Path) -> None:
    data = ShardDataset(folder)
    data.read(0)
    assert len(pickle.dumps(data)) < 10_000
    assert (pickle.loads(pickle.dumps(data)).read(0) == IMAGES[0]).all()
    child = os.fork()
    if child == 0:
        os._exit(0 if (data.read(4) == IMAGES[4]).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (data.read(3) == IMAGES[3]).all()
    data.close()
    assert (data.read(0) == IMAGES[0]).all()


def giant(folder: Path) -> np.ndarray:
    """A data set of one region of which only 4 chunks in the middle, from 49664 on, lie there."""
    patch = np.random.default_rng(1).integers(0, 256, (1024, 1024, 3), np.uint8)
    with ShardWriter(folder, kind="regions") as writer:
        writer.add(patch)
    shard, begin, side = folder / "shard-00000.h5", 49664, 100_000
    with h5py.File(shard, "w", libver="earliest") as file:
        shape, chunks = (side, side, 3), (512, 512, 3)
        image = file.create_dataset("regions/000000/image", shape, np.uint8, chunks=chunks)
        for row in (0, 512):
            for col in (0, 512):
                part = np.ascontiguousarray(patch[row : row + 512, col : col + 512])
                image.id.write_direct_chunk((begin + row, begin + col, 0), part)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    manifest["samples"][0] |= {"height": side, "width": side}
    manifest["samples"][0]["bands"][0]["rows"] = side
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return patch


def test_a_box_of_a_giant_takes_little_memory_and_is_never_made_up(tmp_path: Path) -> None:
    patch, data = giant(tmp_path / "set"), ShardDataset(tmp_path / "set")
    tracemalloc.start()
    box = data.read(0, (49670, 50680, 49664, 50600))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * 2**20
    assert (box == patch[6:1016, :936]).all()
    with pytest.raises(ShardError, match="chunk at row 49152, column 49664: it was not written"):
        data.read(0, (49640, 51240, 49664, 51240))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    codec = draw(st.sampled_from(CODECS))
    kind = draw(st.sampled_from(["tiles", "regions", *["volumes"] * (codec != "jpeg")]))
    sides = st.one_of(st.integers(1, 5), st.integers(1, 25 if kind == "volumes" else 90))
    size = st.tuples(*[sides] * (3 if kind == "volumes" else 2))
    count = draw(st.integers(1, 4))
    return {
        "codec": codec,
        "dtype": "uint8" if codec == "jpeg" else draw(st.sampled_from(DTYPES)),
        "channels": draw(st.sampled_from([1, 3] if codec == "jpeg" else [1, 2, 3, 5])),
        "kind": kind,
        "sizes": [draw(size)] * count if kind == "tiles" else [draw(size) for _ in range(count)],
        "stripes": 1 if kind == "tiles" else draw(st.integers(1, 5)),
        "chunk": draw(st.sampled_from([3, 16, 32, 512])),
        "masks": draw(st.booleans()),
        "shard_size": draw(st.sampled_from([1, 9_000, 2**29])),
        "big_endian": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def images_of(case: dict[str, Any], rng: np.random.Generator) -> list[np.ndarray]:
    """Any bits, so floats with NaN and infinities too; as slices of larger arrays."""
    made = []
    for size in case["sizes"]:
        dtype = np.dtype(case["dtype"])
        shape = (*(n + 1 for n in size), case["channels"])
        bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        image = bits.view(dtype)[..., 0][1:, :-1]
        image = image[:, :, 1:] if len(size) == 3 else image
        made.append(image.astype(dtype.newbyteorder(">")) if case["big_endian"] else image)
    return made


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def check(case: dict[str, Any], boxes: int) -> None:
    """Any box that is read equals that of the array, for all ways of writing it."""
    rng = np.random.default_rng(case["seed"])
    images = images_of(case, rng)
    masks = [rng.integers(0, 256, image.shape[:-1], np.uint8) for image in images]
    keys = ("kind", "stripes", "codec", "shard_size")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_format, "CHUNK", case["chunk"])
        patch.setattr(data_format, "VOLUME_CHUNK", case["chunk"])
        with ShardWriter(Path(folder, "set"), **{key: case[key] for key in keys}) as writer:
            for image, mask in zip(images, masks, strict=True):
                writer.add(image, mask=mask if case["masks"] else None)
        data = ShardDataset(Path(folder, "set"))
        assert (data.dtype, data.codec, data.kind) == (case["dtype"], case["codec"], case["kind"])
        for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
            assert data.image_size(number) == image.shape[:-1]
            whole = data.read(number) if case["codec"] == "jpeg" else image.astype(data.dtype)
            assert whole.shape == image.shape
            for _ in range(boxes):
                cuts = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in image.shape[:-1]]
                box = tuple(at for cut in cuts for at in cut)
                part = tuple(slice(*cut) for cut in cuts)
                assert same(data.read(number, box), whole[part])
                if case["masks"]:
                    assert same(data.read_mask(number, box), mask[part])
            assert same(data.read(number), whole)
        data.verify()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_boxes_are_those_of_the_arrays(case: dict[str, Any]) -> None:
    check(case, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_boxes_of_very_many_are_those_of_the_arrays(case: dict[str, Any]) -> None:
    check(case, 12)


def test_of_a_volume_only_the_chunks_under_a_box_are_read(tmp_path: Path) -> None:
    path = tmp_path / "set"
    image = np.random.default_rng(1).integers(-999, 999, (70, 33, 130, 1)).astype(np.int16)
    with ShardWriter(path, ["a"], kind="volumes", codec="zstd") as writer:
        writer.add(image)
    shard = path / "shard-00000.h5"
    with h5py.File(shard) as h5:
        chunks = h5["regions/000000/image"]
        assert chunks.chunks == (35, 33, 44, 1)
        last = chunks.id.get_chunk_info_by_coord((35, 0, 88, 0))
    with shard.open("r+b") as file:
        file.seek(last.byte_offset + last.size // 2)
        file.write(b"\xff" * 8)
    data = ShardDataset(path)
    assert (data.read(0, (0, 70, 0, 33, 0, 88)) == image[:, :, :88]).all()
    assert (data.read(0, (0, 35, 0, 33, 0, 130)) == image[:35]).all()
    with pytest.raises(ShardError, match=r"chunk at slice 35, row 0, column 88: checksum"):
        data.read(0, (34, 36, 0, 1, 87, 89))
    for box, says in [
        ((0, 71, 0, 9, 0, 3), r"slices 0:71, rows 0:9, columns 0:3 is not .* 70 x 33 x"),
        ((0, 5, 0, 9), r"box \(0, 5, 0, 9\) is not inside sample 0"),
    ]:
        with pytest.raises(ValueError, match=says):
            data.read(0, box)
