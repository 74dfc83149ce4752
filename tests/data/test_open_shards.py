"""Shards that are open, copies of them on local disks, and which of them a rank needs when."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter, open_shards
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.batches import Batch, Batching, BatchReader
from spatialdl.data.format import Manifest
from spatialdl.data.loader import sample_order
from spatialdl.data.open_shards import OpenShards
from spatialdl.data.samples import ShardInfo
from spatialdl.data.shard_usage import (
    ShardUse,
    combined_usage,
    one_after_another,
    select_fitting,
    training_usage,
    validation_usage,
)
from spatialdl.data.staging.cache import local_name
from spatialdl.data.views import Views
from spatialdl.errors import ShardError

TILES = np.random.default_rng(0).integers(0, 256, (4, 20, 30, 3), np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "set", shard_size=1) as writer:
        for tile in TILES:
            writer.add(tile)
    return tmp_path / "set"


@pytest.fixture
def infos(folder: Path) -> list[ShardInfo]:
    return Manifest.load(folder).shards


@pytest.fixture
def shards(folder: Path) -> OpenShards:
    return OpenShards(folder)


def is_read(shards: OpenShards, infos: list[ShardInfo], number: int = 0) -> bool:
    out = np.empty((17, 7, 3), np.uint8)
    shards.get(infos[number]).read("images", out, (0, slice(3, 20), slice(0, 7)))
    return (out == TILES[number, 3:20, :7]).all()


def test_a_file_that_was_written_to_is_opened_again(shards, infos, folder) -> None:
    assert is_read(shards, infos)
    path = folder / infos[0].file
    opened = shards.get(infos[0])
    assert shards.get(infos[0]) is opened
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 0))
    assert is_read(shards, infos)
    assert shards.get(infos[0]) is not opened


@pytest.mark.parametrize("replaced", [False, True])
def test_a_shard_that_became_another_is_refused(shards, infos, folder, replaced) -> None:
    assert is_read(shards, infos)
    path, other = folder / infos[0].file, folder / infos[3].file
    assert path.stat().st_size == other.stat().st_size
    if replaced:
        path.unlink()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(0, 0))
    shards.close()
    for _ in range(2):
        with pytest.raises(ShardError, match=r"00000\.h5 was changed or replaced since"):
            is_read(shards, infos)
    assert is_read(shards, infos, 1)


def test_a_file_that_is_replaced_while_it_is_open_is_still_the_old_one(shards, infos, folder):
    opened, other = shards.get(infos[0]), shards.get(infos[2])
    opened.h5  # noqa: B018
    (folder / infos[1].file).replace(folder / infos[0].file)
    assert is_read(shards, infos)
    (folder / infos[3].file).replace(folder / infos[2].file)
    with pytest.raises(OSError, match="it was replaced or changed while it was opened"):
        other.h5  # noqa: B018


def test_few_files_are_open_and_descriptors_given_back(shards, infos, monkeypatch) -> None:
    def held() -> int:
        paths = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(path).startswith(str(shards._folder)) for path in paths)

    assert all(is_read(shards, infos, number) for number in range(4))
    assert 4 <= held() <= 12
    shards.close()
    assert held() == 0
    monkeypatch.setattr(open_shards, "_OPEN_SHARDS", 2)
    assert all(is_read(shards, infos, number) for number in range(4))
    assert 2 <= held() <= 6
    shards.close()


@pytest.fixture
def staged(shards, tmp_path, monkeypatch) -> Path:
    """A folder of copies; the shards look into it before each read."""
    monkeypatch.setattr(open_shards, "_LOOK_EVERY_S", 0.0)
    (tmp_path / "job").mkdir()
    shards.local = tmp_path / "job"
    return shards.local


def arrives(staged: Path, infos: list[ShardInfo], number: int) -> Path:
    copy = staged / local_name(infos[number])
    copy.write_bytes((staged.parent / "set" / infos[number].file).read_bytes())
    return copy


def test_a_copy_is_read_when_it_has_arrived(shards, infos, folder, staged, caplog) -> None:
    for _ in range(2):
        assert not shards.get(infos[0]).is_local
        assert is_read(shards, infos)
    arrives(staged, infos, 0)
    before = shards.get(infos[0])
    assert before.is_local
    assert shards.get(infos[0]) is before
    assert not shards.get(infos[1]).is_local
    assert is_read(shards, infos)
    (folder / infos[0].file).unlink()
    assert is_read(shards, infos)
    assert pickle.loads(pickle.dumps(shards)).get(infos[0]).is_local
    assert not caplog.messages


@pytest.mark.parametrize("fault", ["cut", "written to", "gone", "cut before"])
def test_a_copy_that_is_no_good_is_not_read(shards, infos, staged, caplog, fault) -> None:
    copy = arrives(staged, infos, 0)
    if fault != "cut before":
        assert shards.get(infos[0]).is_local
    if fault == "written to":
        copy.write_bytes(bytes(infos[0].bytes))
        os.utime(copy, ns=(0, 0))
    elif fault == "gone":
        copy.unlink()
        shards.close()
    else:
        os.truncate(copy, 1000)
    for _ in range(3):
        assert not shards.get(infos[0]).is_local
        assert is_read(shards, infos)
    [told] = caplog.messages
    assert f"the copy of {infos[0].file} in {staged} is unusable" in told
    # others of the node find out for themselves, and do not say it again
    other = OpenShards(shards._folder, staged)
    assert other.get(infos[0]).is_local == (fault == "written to")
    assert len(caplog.messages) == 1


@pytest.fixture
def dataset(written: Path) -> ShardDataset:
    return ShardDataset(written)


@pytest.fixture(scope="module")
def regions(tmp_path_factory) -> ShardDataset:
    """Five regions with masks in stripes of four shards each."""
    draw = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("regions") / "set"
    with ShardWriter(folder, ("a",), kind="regions", stripes=4, shard_size=200_000) as writer:
        for _ in range(5):
            image = draw.integers(0, 256, (2100, 40, 3), np.uint8)
            writer.add(image, 0, "train", mask=image[..., 0])
    return ShardDataset(folder)


def seen(dataset, augmentation=None) -> Views:
    return Views(dataset, dataset.image_size(0), augmentation=augmentation, seed=3)


def read_by_the_loader(views, batching, epochs, seed=3, batches=None):
    """Shards in the order in which a loader opens them."""
    opened, dataset = [], views.source
    get = dataset._shards.get

    def getting(info):
        opened.append([shard.file for shard in dataset.manifest.shards].index(info.file))
        return get(info)

    dataset._shards.get = getting
    reader = BatchReader(views, batching)
    try:
        for epoch in range(epochs):
            order = sample_order(len(views), seed, epoch)
            for start in range(0, len(order), batching.size)[:batches]:
                reader.read(Batch(epoch, order[start : start + batching.size]))
    finally:
        dataset._shards.get = get
    return opened


def check(views, batching, *, batches=None):
    """What the loader opens, after what was foretold was found to be that."""
    needs = training_usage(views, batching, 3, batches=batches or 9)
    opened = read_by_the_loader(views, batching, 1, batches=batches)
    assert set(needs) == set(opened)
    assert sorted(needs, key=lambda shard: needs[shard].first) == list(dict.fromkeys(opened))
    return needs, opened


UPPER, SOME = (0, 1050, 0, 40), (1000, 1200, 3, 8)


@pytest.mark.parametrize("box", [(0, 2100, 0, 40), UPPER, SOME, (5, 5, 0, 40)])
@pytest.mark.parametrize("mask", [None, UPPER])
def test_needs_are_what_the_loader_reads(regions, box, mask):
    needs, opened = check(seen(regions), Batching(2, 1, 0, [box] * 2, [mask] * 2), batches=3)
    assert {shard: need.uses for shard, need in needs.items()} == {
        shard: opened.count(shard) for shard in opened
    }


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_replica_needs_its_own_slices_and_everything_in_the_end(dataset, replica):
    for batches in (1, 2):
        batching = Batching(5, 3, replica, [(0, 90, 0, 70), None], [None, None])
        check(seen(dataset), batching, batches=batches)
    batching = Batching(6, 2, replica % 2, [(0, 90, 0, 70)], [None])
    first = list(dict.fromkeys(read_by_the_loader(seen(dataset), batching, 1)))
    needs = training_usage(seen(dataset), batching, 3, batches=20)
    assert set(needs) == set(range(6))
    assert sorted(needs, key=lambda shard: needs[shard].first)[: len(first)] == first
    assert {need.uses for need in needs.values()} == {1.0}  # two tiles, one of them its own


def test_validation_comes_after_training(written):
    train, validation = (seen(ShardDataset(written, split)) for split in ("train", "val"))
    batching = Batching(2, 1, 0, [(0, 90, 0, 70)], [None])
    later = validation_usage(validation, batching, times=0.5)
    assert later == {5: ShardUse(0, 1.0)}
    needs = one_after_another(training_usage(train, batching, 0, 5), later)
    assert max(needs, key=lambda shard: needs[shard].first) == 5


def test_cropped_and_turned_images_need_what_lies_under_them(regions):
    views = Views(regions, (600, 40), augmentation=Augmentation(crop="random", flip=0.5), seed=3)
    batching = Batching(2, 1, 0, [(0, 300, 0, 40)], [None])
    needs, _ = check(views, batching, batches=2)
    every = set(range(len(regions.manifest.shards)))
    assert set(needs) < every
    assert set(training_usage(views, batching, 3, batches=9)) == every
    views = seen(regions, Augmentation(flip=0.5))  # what is left of an epoch
    needs = training_usage(views, batching, 3, batches=1, position=(1, 2))
    (last,) = sample_order(5, 3, 1)[4:]
    expected = regions.shards_under(int(last), views.stored_box(1, int(last), (0, 300, 0, 40)))
    assert set(needs) == set(expected)


def test_ranks_together_need_what_any_needs():
    one, two = {0: ShardUse(5, 1), 1: ShardUse(0, 2)}, {0: ShardUse(2, 3), 2: ShardUse(1, 1)}
    assert combined_usage([one, two]) == {0: ShardUse(2, 4), 1: ShardUse(0, 2), 2: ShardUse(1, 1)}
    assert combined_usage([]) == {}


@pytest.mark.parametrize(
    ("room", "chosen"),
    [(60, [2, 0, 1, 3]), (59, [2, 0, 1]), (40, [2, 0, 1]), (30, [2, 0]), (25, [2, 1]), (9, [])],
)
def test_what_is_used_most_is_taken_first(room, chosen):
    needs = {0: ShardUse(1, 4), 1: ShardUse(2, 1), 2: ShardUse(0, 4), 3: ShardUse(3, 1)}
    sizes = {0: 20, 1: 10, 2: 10, 3: 20}
    shards = [ShardInfo(f"shard-{n:05d}.h5", sizes[n], "", 1) for n in range(4)]
    assert select_fitting(needs, shards, room) == chosen


def test_boxes_of_volumes_need_the_shards_of_their_slices(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", kind="volumes", stripes=4) as writer:
        for _ in range(3):
            writer.add(np.zeros((8, 5, 6), np.uint8))
    views = Views(ShardDataset(tmp_path / "set"), (8, 5, 6))
    upper = Batching(3, 1, 0, [(0, 4, 0, 5, 0, 6)], [None])
    assert set(validation_usage(views, upper)) == {0, 1}
    moving = Views(views.source, (8, 5, 6), augmentation=Augmentation(flip=0.5))
    assert set(training_usage(moving, upper, 0, 9)) == {0, 1, 2, 3}
