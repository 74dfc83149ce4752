"""Batches: which samples, which box of them, in which order, and as what input."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.batches import Batch, Batching, BatchReader, Slice
from spatialdl.data.loader import DeviceCopy, Loader, sample_order
from spatialdl.data.synthetic_masks import SyntheticMasks
from spatialdl.data.views import Views
from tests.data.numbers import WHOLE, batching, contents, views

ALL = Augmentation("random", 0.5, True, 0.2, 0.2, 0.2, 0.1, 0.1, 1.0)


def loaders(samples, size, microbatches, replicas, seed=None):
    return [
        Loader(views(samples), batching(size, microbatches, replicas, replica), seed)
        for replica in range(replicas)
    ]


def labels(batches) -> list[int]:
    return [int(label) for batch in batches for part in batch for label in part.labels]


cases = st.tuples(st.integers(0, 20), st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))


@given(cases)
def test_every_sample_comes_once_by_microbatch_then_replica_and_shares_add_up(case):
    samples, size, microbatches, replicas = case
    order = sample_order(samples, seed=3, epoch=0)
    everyone = [list(loader.batches(0)) for loader in loaders(*case, seed=3)]
    assert [len(batches) for batches in everyone] == [-(-samples // size)] * replicas
    for number, batch in enumerate(zip(*everyone, strict=True)):
        parts = [batch[replica][m] for m in range(microbatches) for replica in range(replicas)]
        expected = order[number * size : (number + 1) * size]
        assert torch.cat([part.labels for part in parts]).tolist() == expected.tolist()
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert [part.share * len(expected) for part in parts] == pytest.approx(
            [len(part.labels) for part in parts]
        )
        lengths = [sum(len(b[m].labels) for b in batch) for m in range(microbatches)]
        assert max(lengths) - min(lengths) <= 1


def test_without_a_seed_samples_come_in_order_and_are_read_beside_the_training():
    (loader,) = loaders(5, 2, 1, 1)
    assert labels(loader.batches(0)) == labels(loader.batches(9)) == [0, 1, 2, 3, 4]
    assert [loader.samples(batch) for batch in range(len(loader))] == [2, 2, 1]
    assert threading.get_ident() not in loader.views.source.read_by
    assert labels(loader.batches(0, 2)) == [4]
    assert list(loader.batches(0, 3)) == []


@pytest.mark.parametrize("broken", [0, 3])
def test_an_error_while_reading_comes_out(broken):
    loader = Loader(views(4, broken=broken), batching(2))
    with pytest.raises(OSError, match=f"sample {broken} is gone"):
        list(loader.batches())


def test_who_stops_early_leaves_no_thread_behind():
    before = threading.enumerate()  # those of other tests, which are collected when they are
    (loader,) = loaders(8, 2, 1, 1)
    batches = loader.batches()
    next(batches)
    batches.close()
    new = [one for one in threading.enumerate() if one not in before]
    assert not [one for one in new if one.name.startswith("loader")]


def test_the_order_follows_from_seed_and_epoch():
    orders = {
        (seed, epoch): sample_order(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    for (seed, epoch), order in orders.items():
        assert sorted(order) == list(range(50))
        assert sample_order(50, seed, epoch).tolist() == order


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_goes_on_from_any_batch_with_what_remains(workers):
    """Read by other processes in another life, and augmented: the same bits."""
    images = SyntheticMasks(11, (21, 17))
    cut = batching(3, 2, box=(4, 19, 0, 13), mask_box=(0, 20, 5, 9))

    def loader() -> Loader:
        return Loader(Views(images, (21, 17), None, ALL, 4), cut, 4, workers=workers, prefetch=1)

    epoch, first, seen, epochs = 0, 0, [], []
    for batches in (3, 2, 4):  # of each life; epochs hold 4
        life, left = loader(), batches
        while left:
            for batch in life.batches(epoch, first):
                epochs.append(epoch)
                seen += contents([batch])
                first += 1
                left -= 1
                if not left:
                    break
            if first == len(life):
                epoch, first = epoch + 1, 0
        life.close()
    whole = Loader(Views(images, (21, 17), None, ALL, 4), cut, 4)
    expected = contents(whole.batches(0)) + contents(whole.batches(1)) + contents(whole.batches(2))
    assert seen == expected[:9]
    assert epochs == [0] * 4 + [1] * 4 + [2]
    assert seen[:4] != seen[4:8]


def test_numbers_that_make_no_sense_are_refused():
    for key, value in (("workers", -1), ("prefetch", 0)):
        with pytest.raises(ValueError, match=f"data.{key}={value} must be"):
            Loader(views(1), batching(1), **{key: value})


def test_on_a_cpu_nothing_is_copied():
    tiles = torch.arange(12, dtype=torch.uint8).view(1, 2, 2, 3)
    batch = [Slice(torch.tensor([3]), 1.0, tiles)]
    assert DeviceCopy(torch.device("cpu")).begin(batch)() is batch


def test_a_rank_reads_its_own_box_of_its_own_samples():
    reader = BatchReader(views(7), batching(4, 2, 2, 1, box=(2, 5, 1, 6)))
    for samples in ([0, 1, 2, 3], [4, 5, 6]):
        for part in reader.read(Batch(0, np.array(samples))):
            if part.tiles is None:
                assert len(part.labels) == 0
                continue
            assert part.tiles.shape == (len(part.labels), 3, 5, 3)
            assert part.tiles.dtype == torch.uint8
            assert part.tiles[:, 0, 0, 0].tolist() == part.labels.tolist()
            assert part.tiles[0, :, 0, 1].tolist() == [2, 3, 4]
            assert part.tiles[0, 0, :, 2].tolist() == [1, 2, 3, 4, 5]
    assert reader.views.source.asked == [1, 3, 4, 6]  # 0 1|2 3 and 4|5 6, cut 0|1, 2|3, |4, 5|6


def test_masks_are_read_in_their_own_box_and_unneeded_images_not_at_all():
    reader = BatchReader(views(2), batching(2, box=None, mask_box=(2, 5, 1, 6)))
    (part,) = reader.read(Batch(0, np.arange(2)))
    assert part.masks.shape == (2, 3, 5)
    assert part.masks[0, :, 0].tolist() == [2, 3, 4]
    assert part.tiles is None
    reader = BatchReader(views(5), batching(5, box=None))
    assert all(part.tiles is None for part in reader.read(Batch(0, np.arange(5))))
    assert reader.views.source.asked == []


def test_micro_batches_have_boxes_of_their_own():
    """As under GEMS, where a rank has another part of every other micro-batch, or none."""
    boxes = [(0, 8, 0, 3), None, (0, 8, 3, 6)]
    reader = BatchReader(views(5), Batching(5, 1, 0, boxes, [None, WHOLE, None]))
    left, neither, right = reader.read(Batch(0, np.arange(5)))
    assert left.tiles[0, 0, :, 2].tolist() == [0, 1, 2]
    assert (neither.tiles, left.masks) == (None, None)
    assert right.tiles[0, 0, :, 2].tolist() == [3, 4, 5]
    assert neither.masks.shape == (2, 8, 6)


def test_an_error_keeps_its_type_and_names_the_sample():
    reader = BatchReader(views(4, broken=2), batching(4))
    with pytest.raises(OSError, match="sample 2 is gone") as caught:
        reader.read(Batch(7, np.arange(4)))
    assert caught.value.__notes__ == ["(sample 2, epoch 7)"]


@pytest.mark.parametrize("in_parts", [("images",), ("masks",), ("images", "masks")])
def test_what_is_read_in_parts_is_left_to_later(in_parts):
    """A slice lists its samples; everything else is read as usual."""
    cut = replace(batching(4, 2, 2, 1, mask_box=WHOLE), in_parts=in_parts)
    reader = BatchReader(views(7), cut)
    first, second = reader.read(Batch(3, np.array([6, 2, 5, 1])))
    whole = BatchReader(views(7), replace(cut, in_parts=())).read(Batch(3, np.array([6, 2, 5, 1])))
    for part, other, sample in ((first, whole[0], 2), (second, whole[1], 1)):
        assert (part.epoch, part.samples) == (other.epoch, other.samples) == (3, (sample,))
        assert part.labels.tolist() == other.labels.tolist() == [sample]
        assert part.share == other.share == 0.25
        for name, found, full in (
            ("images", part.tiles, other.tiles),
            ("masks", part.masks, other.masks),
        ):
            assert (found is None) == (name in in_parts)
            assert found is None or torch.equal(found, full)
    asked = [] if len(in_parts) == 2 else [2, 1]
    assert reader.views.source.asked == asked
