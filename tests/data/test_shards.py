from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data import format as data_format
from spatialdl.data.codec import Codec
from spatialdl.data.format import Kind
from spatialdl.data.jpeg import decode, encode
from spatialdl.data.raw_reading import IOS, Io
from spatialdl.errors import ShardError

H, W = 700, 530
IMAGES = np.random.default_rng(0).integers(0, 256, (5, H, W, 3), np.uint8)
SPLITS = ["train", "val", "train", None, "train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "set"
    with ShardWriter(path, ["a", "b"], mpp=0.5, shard_size=4_000_000) as writer:
        for number, image in enumerate(IMAGES):
            label = None if number == 3 else number % 2
            writer.add(image, label, SPLITS[number], slide=f"s{number}", xy=(number, 7))
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "set"))


def test_what_was_written_is_read(folder: Path) -> None:
    data = ShardDataset(folder)
    assert len(data) == 5
    assert data.classes == ["a", "b"]
    assert data.splits == ["train", "val"]
    assert (data.kind, data.channels, data.mpp, data.has_masks) == ("tiles", 3, 0.5, False)
    assert data.labels.dtype == np.int64
    assert data.labels.tolist() == [0, 1, 0, -1, 0]
    assert data.image_size(4) == (H, W)
    assert (data.sample(2).slide, data.sample(2).x, data.sample(2).y) == ("s2", 2, 7)
    for number, (image, label) in enumerate(data):
        assert (image == IMAGES[number]).all()
        assert label == data.labels[number]
    assert (data.read(-1) == IMAGES[4]).all()
    data.verify()


def test_a_split_is_a_data_set_of_its_own(folder: Path) -> None:
    data = ShardDataset(folder, split="train")
    assert len(data) == 3
    assert data.labels.tolist() == [0, 0, 0]
    assert (data[1][0] == IMAGES[2]).all()
    with pytest.raises(ValueError, match="no split 'test'; its splits: train, val"):
        ShardDataset(folder, split="test")


def test_a_set_without_splits_names_the_way_to_all_samples(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        writer.add(np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(ValueError, match=r"none; use all .* split=None \(data.split=null for tra"):
        ShardDataset(tmp_path / "set", split="train")


cuts = st.tuples(st.integers(0, H), st.integers(0, H), st.integers(0, W), st.integers(0, W))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), cuts)
def test_a_box_is_a_slice_of_the_whole(
    folder: Path, number: int, cut: tuple[int, int, int, int]
) -> None:
    row0, row1, col0, col1 = *sorted(cut[:2]), *sorted(cut[2:])
    box = ShardDataset(folder).read(number, (row0, row1, col0, col1))
    assert box.shape == (row1 - row0, col1 - col0, 3)
    assert (box == IMAGES[number, row0:row1, col0:col1]).all()


@pytest.fixture(scope="module")
def in_jpeg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "jpeg"
    with ShardWriter(path, shard_size=4_000_000, codec="jpeg") as writer:
        for image in IMAGES[:4]:
            writer.add(image)
    return path


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), cuts)
def test_a_box_of_jpeg_is_a_slice_of_the_whole(
    in_jpeg: Path, number: int, cut: tuple[int, int, int, int]
) -> None:
    data = ShardDataset(in_jpeg)
    row0, row1, col0, col1 = *sorted(cut[:2]), *sorted(cut[2:])
    box = data.read(number, (row0, row1, col0, col1))
    assert box.shape == (row1 - row0, col1 - col0, 3)
    assert (box == data.read(number)[row0:row1, col0:col1]).all()


def test_a_data_set_tells_its_codec(folder: Path, in_jpeg: Path) -> None:
    assert ShardDataset(folder).codec == "raw"
    data = ShardDataset(in_jpeg)
    assert data.codec == "jpeg"
    corner = IMAGES[2, :512, :512]
    assert (data.read(2, (0, 512, 0, 512)) == decode(encode(corner), corner.shape)).all()
    assert (pickle.loads(pickle.dumps(data)).read(2) == data.read(2)).all()


def test_a_damaged_stream_is_named(in_jpeg: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(in_jpeg, tmp_path / "set"))
    with h5py.File(copy / "shard-00003.h5", locking=False) as file:
        place = file["images"].id.get_chunk_info_by_coord((0, 512, 0, 0))
    with (copy / "shard-00003.h5").open("rb+") as shard:
        shard.seek(place.byte_offset + place.size // 2)
        shard.write(bytes(place.size - place.size // 2))
    data = ShardDataset(copy)
    says = r"images from .*shard-00003\.h5: chunk at image 0, row 512, column 0: .*; the shard is"
    with pytest.raises(ShardError, match=says):
        data.read(3, (500, 600, 3, 9))
    assert data.read(3, (0, 512, 0, W)).shape == (512, W, 3)
    with pytest.raises(ShardError, match=r"in shard-00003\.h5 \(damaged: sample 3\); copy"):
        data.verify()


def test_shards_that_are_not_of_the_codec_are_refused(folder: Path, in_jpeg: Path) -> None:
    for path, codec, says in [(folder, "jpeg", "expected codec 'jpeg'"), (in_jpeg, "raw", "")]:
        data = ShardDataset(path)
        data._manifest.codec = codec
        with pytest.raises(ShardError, match=f"cannot read images from .*{says}"):
            data.read(0, (0, 5, 0, 5))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count reads")
def test_a_box_reads_only_its_chunks(folder: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    data = ShardDataset(folder)
    data.read(0, (0, 1, 0, 1))  # opens the file
    chunk = 512 * 512 * 3
    before = bytes_read()
    data.read(1, (513, 600, 3, 500))
    assert bytes_read() - before < 1.2 * chunk
    before = bytes_read()
    data.read(1, (500, 513, 500, 513))
    assert bytes_read() - before < 4.2 * chunk


@pytest.mark.parametrize(
    "box",
    [(-1, 5, 0, 5), (0, H + 1, 0, 5), (0, 5, 0, W + 1), (5, 4, 0, 5), (0, 5, 5, 4)],
)
def test_a_box_outside_is_refused(folder: Path, box: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"not inside sample 2 of {H} x {W}"):
        ShardDataset(folder).read(2, box)


def test_a_sample_that_is_not_there_is_an_index_error(folder: Path) -> None:
    for number in (5, -6):
        with pytest.raises(IndexError, match="for 5 samples"):
            ShardDataset(folder)[number]
    with pytest.raises(ValueError, match="no masks"):
        ShardDataset(folder).read_mask(0)


def test_files_are_opened_when_needed_and_never_pickled(folder: Path) -> None:
    data = ShardDataset(folder)
    data.read(0)
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 10_000
    assert (again.read(0) == IMAGES[0]).all()
    data.close()
    assert (data.read(0) == IMAGES[0]).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_opens_its_own_files(folder: Path) -> None:
    data = ShardDataset(folder)
    data.read(0)
    child = os.fork()
    if child == 0:
        same = (data.read(4) == IMAGES[4]).all()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (data.read(3) == IMAGES[3]).all()


def test_a_loader_takes_it(folder: Path) -> None:
    images, labels = next(iter(DataLoader(ShardDataset(folder), batch_size=5)))
    assert (images.numpy() == IMAGES).all()
    assert labels.tolist() == [0, 1, 0, -1, 0]


def test_a_cut_shard_is_noticed_at_open(copy: Path) -> None:
    shard = copy / "shard-00001.h5"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ShardError, match=r"shard-00001\.h5 has \d+ bytes, the manifest records"):
        ShardDataset(copy)


def test_a_missing_shard_is_noticed_at_open(copy: Path) -> None:
    (copy / "shard-00001.h5").unlink()
    with pytest.raises(ShardError, match=r"cannot find shard-00001\.h5"):
        ShardDataset(copy)


def test_a_changed_byte_is_found_by_verify(copy: Path) -> None:
    with (copy / "shard-00001.h5").open("rb+") as file:
        file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(-100, 2)
        file.write(bytes([byte ^ 1]))
    data = ShardDataset(copy)
    with pytest.raises(ShardError, match=r"in shard-00001\.h5 \(the pixels of its samples"):
        data.verify()


def test_a_shard_that_is_no_hdf5_is_refused_when_read(copy: Path) -> None:
    shard = copy / "shard-00000.h5"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    data = ShardDataset(copy)
    with pytest.raises(ShardError, match=r"shard-00000\.h5.*copy or write it again"):
        data.read(0)


def test_a_shard_of_another_data_set_is_refused_when_read(copy: Path) -> None:
    shard = copy / "shard-00000.h5"
    size = shard.stat().st_size
    with h5py.File(shard, "w") as file:
        file["other"] = np.zeros(3)
    with shard.open("ab") as file:
        file.truncate(size)
    data = ShardDataset(copy)
    with pytest.raises(ShardError, match=r"cannot read images from .*shard-00000\.h5"):
        data.read(0)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="cannot see the open files")
def test_many_shards_do_not_hold_many_files_open(tmp_path: Path) -> None:
    tile = np.zeros((1, 1, 1), np.uint8)
    with ShardWriter(tmp_path / "set", shard_size=1) as writer:
        for number in range(80):
            writer.add(tile + np.uint8(number))
    data = ShardDataset(tmp_path / "set")
    for order in (range(80), reversed(range(80))):
        assert all(data.read(number).item() == number for number in order)
    held = [path.resolve().name for path in Path("/proc/self/fd").iterdir()]
    assert sum(name.startswith("shard-") for name in held) <= 64


@pytest.mark.parametrize("seed", range(12))
def test_all_ways_to_read_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind: Kind = "tiles" if seed % 2 else "regions"
    monkeypatch.setattr(data_format, "CHUNK", 4 << seed % 4)
    channels, tile = int(rng.integers(1, 5)), rng.integers(1, 90, 2)
    sizes = [tile if kind == "tiles" else rng.integers(1, 90, 2) for _ in range(5)]
    images = [rng.integers(0, 256, (*size, channels), np.uint8) for size in sizes]
    masks = [rng.integers(0, 9, tuple(size), np.uint8) for size in sizes]
    stripes = 1 if kind == "tiles" else int(rng.integers(1, 4))
    with ShardWriter(tmp_path / "set", kind=kind, shard_size=20_000, stripes=stripes) as writer:
        for image, mask in zip(images, masks, strict=True):
            writer.add(image, mask=mask)
    if seed % 3 == 0:
        make_version_1(tmp_path / "set")
    for io in IOS:
        data = ShardDataset(tmp_path / "set", io=io)
        for number, (height, width) in enumerate(sizes):
            for _ in range(12):
                row0, row1 = sorted(rng.integers(0, height + 1, 2).tolist())
                col0, col1 = sorted(rng.integers(0, width + 1, 2).tolist())
                box, cut = (row0, row1, col0, col1), np.s_[row0:row1, col0:col1]
                assert np.array_equal(data.read(number, box), images[number][cut])
                assert np.array_equal(data.read_mask(number, box), masks[number][cut])
            assert np.array_equal(data.read(number), images[number])


def make_version_1(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["codec"]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 1}))


def test_raw_chunks_are_not_read_by_hdf5(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5py.Dataset, "read_direct", None)
    for io in ("auto", "mmap", "pread"):
        assert (ShardDataset(folder, io=io).read(1) == IMAGES[1]).all()
    with pytest.raises(TypeError):
        h5py.Dataset.read_direct()  # type: ignore[misc,call-arg]


def test_no_such_way_to_read_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="io is 'fast', expected one of auto, mmap, pread, h5py"):
        ShardDataset(folder, io="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("io", IOS)
def test_a_shard_that_is_cut_between_reads_is_refused(copy: Path, io: Io) -> None:
    data = ShardDataset(copy, io=io)
    data.read(1)
    shard = copy / "shard-00001.h5"
    size = shard.stat().st_size
    for length in (size - 1, size // 2, 0):
        os.truncate(shard, length)
        with pytest.raises(ShardError, match=rf"shard-00001\.h5 has {length} bytes, the manifest"):
            data.read(1, (0, H, 0, W))
    assert (data.read(0) == IMAGES[0]).all()


def sparse_set(folder: Path, side: int) -> np.ndarray:
    """A data set of one region, `side` x `side`, of which only 4 chunks in the middle lie there."""
    patch = np.random.default_rng(1).integers(0, 256, (1024, 1024, 3), np.uint8)
    with ShardWriter(folder, kind="regions") as writer:
        writer.add(patch)
    shard, begin = folder / "shard-00000.h5", side // 2 // 512 * 512
    with h5py.File(shard, "w", libver="earliest") as file:
        options = {"chunks": (512, 512, 3), "fillvalue": 9}
        image = file.create_dataset("regions/000000/image", (side, side, 3), np.uint8, **options)
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


@pytest.mark.parametrize("io", IOS)
def test_chunks_that_were_never_written_are_filled(tmp_path: Path, io: Io) -> None:
    patch = sparse_set(tmp_path / "set", 3000)
    box = ShardDataset(tmp_path / "set", io=io).read(0, (1000, 2600, 1000, 2600))
    wanted = np.full((1600, 1600, 3), 9, np.uint8)
    wanted[24:1048, 24:1048] = patch
    assert (box == wanted).all()


READS_A_GIANT = """
import resource, sys
import numpy as np
from spatialdl.data import ShardDataset
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
data = ShardDataset(sys.argv[1], io=sys.argv[2])
box = data.read(0, (49600, 50624, 49600, 50624))
print(peak() - before, int(box.astype(int).sum()))
"""


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_a_box_of_a_giant_takes_little_memory(tmp_path: Path, io: Io) -> None:
    side = 100_000
    patch = sparse_set(tmp_path / "set", side)
    command = [sys.executable, "-c", READS_A_GIANT, str(tmp_path / "set"), io]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout
    megabytes, total = map(int, out.split())
    begin = side // 2 // 512 * 512
    wanted = np.full((1024, 1024, 3), 9, int)
    corner = begin - 49600
    assert 0 < corner < 1024
    wanted[corner:, corner:] = patch[: 1024 - corner, : 1024 - corner]
    assert total == wanted.sum()
    assert megabytes < 200


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_shards_of_another_type_are_refused(tmp_path: Path, io: Io, codec: Codec) -> None:
    with ShardWriter(tmp_path / "set", codec=codec) as writer:
        writer.add(IMAGES[0].astype(np.uint16))
    manifest = tmp_path / "set" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"uint16"', '"float32"'))
    with pytest.raises(ShardError, match=r"it has type uint16, expected float32|filters"):
        ShardDataset(tmp_path / "set", io=io).read(0)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_flipped_bit_of_what_is_compressed_is_told_when_it_is_read(
    tmp_path: Path, codec: Codec
) -> None:
    with ShardWriter(tmp_path / "set", codec=codec) as writer:
        for image in IMAGES:
            writer.add(image, mask=image[..., 0] // 200)
    shard = tmp_path / "set" / "shard-00000.h5"
    with h5py.File(shard, locking=False) as file:
        places = [file[name].id.get_chunk_info(2) for name in ("images", "masks")]
    for place in places:
        with shard.open("rb+") as opened:
            opened.seek(place.byte_offset + place.size // 2)
            byte = opened.read(1)[0]
            opened.seek(-1, 1)
            opened.write(bytes([byte ^ 16]))
    data = ShardDataset(tmp_path / "set")
    for read in (data.read, data.read_mask):
        with pytest.raises(ShardError, match=r"h5: chunk at image 0, row 512, column 0: checksum"):
            read(0)
        assert len(read(0, (0, 512, 0, W))) == 512
    assert (data.read(1) == IMAGES[1]).all()


def test_a_copy_that_cannot_be_read_is_left_for_the_source(tmp_path, caplog) -> None:
    tile = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    with ShardWriter(tmp_path / "set", codec="jpeg") as writer:
        writer.add(tile)
    dataset = ShardDataset(tmp_path / "set")
    expected = dataset.read(0)
    dataset.close()
    [info] = dataset.manifest.shards
    (tmp_path / f"{info.sha256}.h5").write_bytes(bytes(info.bytes))
    dataset.use_copies(tmp_path)
    for _ in range(2):
        assert (dataset.read(0) == expected).all()
    [told] = caplog.messages
    assert "is unusable" in told


@pytest.mark.parametrize("io", IOS)
def test_a_stack_without_rows_is_refused_when_read(tmp_path: Path, io: Io) -> None:
    """HDF5's own way of reading it ended with an `IndexError`."""
    with ShardWriter(tmp_path / "set") as out:
        out.add(np.zeros((8, 8, 3), np.uint8))
    shard = tmp_path / "set" / "shard-00000.h5"
    with h5py.File(shard, "a") as h5:
        del h5["images"]
        h5.create_dataset("images", (1, 0, 8, 3), np.uint8)
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=r"cannot read images from .*shard-00000\.h5"):
        ShardDataset(tmp_path / "set", io=io).read(0)


SHAPES = [(70, 33, 130), (5, 9, 3), (129, 64, 65)]
AFFINE = ((-0.7, 0.0, 0.1, 3.0), (0.0, 0.8, 0.0, -4.5), (0.1, 0.0, 2.5, 7.0))


def volumes_of(dtype: str, channels: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [(random.standard_normal((*s, channels)) * 1000).astype(dtype) for s in SHAPES]


def write_volumes(path: Path, images: list[np.ndarray], **settings: object) -> Path:
    with ShardWriter(path, ["a"], kind="volumes", **settings) as writer:
        for image in images:
            mask = (image[..., 0] > 0).astype(np.uint8)
            writer.add(image, 0, "train", mask=mask, spacing=(2.5, 0.8, 0.7), affine=AFFINE)
    return path


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("codec", ["raw", "zstd", "lz4"])
@pytest.mark.parametrize(("dtype", "channels"), [("int16", 1), ("uint8", 2), ("float32", 3)])
def test_boxes_of_volumes_are_read(
    tmp_path: Path, io: Io, stripes: int, codec: Codec, dtype: str, channels: int
) -> None:
    images = volumes_of(dtype, channels)
    path = write_volumes(tmp_path / "set", images, stripes=stripes, codec=codec)
    data = ShardDataset(path, io=io)
    data.verify()
    assert (data.kind, data.channels, data.dtype) == ("volumes", channels, np.dtype(dtype))
    random = np.random.default_rng(2)
    for number, image in enumerate(images):
        assert data.image_size(number) == image.shape[:3]
        assert (data.read(number) == image).all()
        for _ in range(6):
            cuts = [sorted(random.integers(0, n + 1, 2).tolist()) for n in image.shape[:3]]
            box = tuple(at for cut in cuts for at in cut)
            part = tuple(slice(start, stop) for start, stop in cuts)
            assert data.read(number, box).shape == image[part].shape
            assert (data.read(number, box) == image[part]).all()
            assert (data.read_mask(number, box) == (image[..., 0] > 0)[part]).all()


def test_of_a_volume_only_the_chunks_under_a_box_are_read(tmp_path: Path) -> None:
    image = volumes_of("int16", 1)[0]  # 2 x 1 x 3 chunks
    path = write_volumes(tmp_path / "set", [image], codec="zstd")
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
    with pytest.raises(ShardError, match=r"SHA-256.*damaged: sample 0"):
        data.verify()


def test_a_box_outside_of_a_volume_is_refused(tmp_path: Path) -> None:
    data = ShardDataset(write_volumes(tmp_path / "set", volumes_of("uint8", 1)))
    with pytest.raises(ValueError, match=r"slices 0:6, rows 0:9, columns 0:3 is not .* 5 x 9 x 3"):
        data.read(1, (0, 6, 0, 9, 0, 3))
    with pytest.raises(ValueError, match=r"box \(0, 5, 0, 9\) is not inside sample 1"):
        data.read(1, (0, 5, 0, 9))
    assert data.read(1, (2, 2, 0, 9, 0, 3)).shape == (0, 9, 3, 1)


def test_shards_under_a_box_of_a_volume_are_those_of_its_slices(tmp_path: Path) -> None:
    data = ShardDataset(write_volumes(tmp_path / "set", volumes_of("uint8", 1), stripes=2))
    assert [band.rows for band in data.sample(0).bands] == [35, 35]
    assert data.shards_under(0, (0, 35, 0, 33, 0, 130)) == (0,)
    assert data.shards_under(0, (34, 36, 0, 1, 0, 1)) == (0, 1)
    assert data.shards_under(0, (34, 36, 5, 5, 0, 1)) == ()
