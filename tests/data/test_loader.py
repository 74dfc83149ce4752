from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.data.loader import Batching, Loader, sample_order, to_input


class Numbers:
    """Images whose pixels say which sample, row and column they are; labels are the samples."""

    channels = 3
    classes = ("any",)

    def __init__(self, samples: int, broken: int | None = None) -> None:
        self.labels = np.arange(samples)
        self.broken = broken
        self.read_by: set[int] = set()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def image_size(self, sample: int) -> tuple[int, int]:
        return 8, 6

    def read(self, sample, box=None):
        self.read_by.add(threading.get_ident())
        self.asked.append(sample)
        if sample == self.broken:
            raise OSError(f"sample {sample} is gone")
        rows, cols = np.mgrid[0:8, 0:6].astype(np.uint8)
        image = np.stack([np.full_like(rows, sample), rows, cols], axis=-1)
        row0, row1, col0, col1 = box or (0, 8, 0, 6)
        return image[row0:row1, col0:col1]

    def read_mask(self, sample, box=None):
        return self.read(sample, box)[..., 1]


def loaders(samples, size, microbatches, replicas, box=None):
    boxes, none = [box] * microbatches, [None] * microbatches
    return [
        Loader(Numbers(samples), Batching(size, replicas, replica, boxes, none))
        for replica in range(replicas)
    ]


cases = st.tuples(st.integers(0, 20), st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))


@given(cases)
def test_every_sample_comes_exactly_once_an_epoch(case):
    samples, size, microbatches, _ = case
    order = sample_order(samples, seed=1, epoch=2)
    everyone = [list(loader.batches(order)) for loader in loaders(*case)]
    for loader, batches in zip(loaders(*case), everyone, strict=True):
        assert len(batches) == len(loader) == -(-samples // size)
        assert all(len(batch) == microbatches for batch in batches)
    seen = Counter(
        int(label)
        for batches in everyone
        for batch in batches
        for part in batch
        for label in part.labels
    )
    assert seen == Counter(range(samples))


@given(cases)
def test_slices_are_contiguous_by_microbatch_then_replica_and_shares_add_up(case):
    samples, size, microbatches, replicas = case
    order = sample_order(samples, seed=3, epoch=0)
    everyone = [list(loader.batches(order)) for loader in loaders(*case)]
    for number, batch in enumerate(zip(*everyone, strict=True)):
        parts = [batch[replica][m] for m in range(microbatches) for replica in range(replicas)]
        expected = order[number * size : (number + 1) * size]
        assert np.concatenate([part.labels for part in parts]).tolist() == expected.tolist()
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert [part.share * len(expected) for part in parts] == pytest.approx(
            [len(part.labels) for part in parts]
        )
        lengths = [sum(len(b[m].labels) for b in batch) for m in range(microbatches)]
        assert max(lengths) - min(lengths) <= 1


def test_a_rank_reads_its_own_box_of_its_own_samples():
    _, loader = loaders(7, 4, 2, 2, box=(2, 5, 1, 6))
    for batch in loader.batches(np.arange(7)):
        for part in batch:
            if part.tiles is None:
                assert len(part.labels) == 0
                continue
            assert part.tiles.shape == (len(part.labels), 3, 5, 3)
            assert part.tiles[:, 0, 0, 0].tolist() == part.labels.tolist()
            assert part.tiles[0, :, 0, 1].tolist() == [2, 3, 4]
            assert part.tiles[0, 0, :, 2].tolist() == [1, 2, 3, 4, 5]
    assert loader.source.asked == [1, 3, 4, 6]  # 0 1|2 3 and 4|5 6, cut 0|1, 2|3, |4, 5|6


def test_masks_are_read_in_their_own_box():
    loader = Loader(Numbers(3), Batching(2, 1, 0, [None], [(2, 5, 1, 6)]))
    parts = [part for batch in loader.batches(np.arange(3)) for part in batch]
    assert [part.masks.shape for part in parts] == [(2, 3, 5), (1, 3, 5)]
    assert parts[1].masks[0, :, 0].tolist() == [2, 3, 4]
    assert all(part.tiles is None for part in parts)


def test_a_rank_that_needs_no_images_reads_none():
    (loader,) = loaders(5, 2, 1, 1, box=None)
    assert all(part.tiles is None for batch in loader.batches(np.arange(5)) for part in batch)
    assert loader.source.asked == []


def test_micro_batches_have_boxes_of_their_own():
    """As under GEMS, where a rank has another part of every other micro-batch, or none."""
    boxes = [(0, 8, 0, 3), None, (0, 8, 3, 6)]
    loader = Loader(Numbers(5), Batching(5, 1, 0, boxes, [None, (0, 8, 0, 6), None]))
    ((left, neither, right),) = loader.batches(np.arange(5))
    assert left.tiles[0, 0, :, 2].tolist() == [0, 1, 2]
    assert (neither.tiles, left.masks) == (None, None)
    assert right.tiles[0, 0, :, 2].tolist() == [3, 4, 5]
    assert neither.masks.shape == (2, 8, 6)


def test_reading_is_done_beside_the_training():
    (loader,) = loaders(4, 2, 1, 1, box=(0, 8, 0, 6))
    assert len(list(loader.batches(np.arange(4)))) == 2
    assert threading.get_ident() not in loader.source.read_by


@pytest.mark.parametrize("broken", [0, 3])
def test_an_error_while_reading_comes_out(broken):
    loader = Loader(Numbers(4, broken), Batching(2, 1, 0, [(0, 8, 0, 6)], [None]))
    with pytest.raises(OSError, match=f"sample {broken} is gone"):
        list(loader.batches(np.arange(4)))


def test_who_stops_early_leaves_no_thread_behind():
    (loader,) = loaders(8, 2, 1, 1, box=(0, 8, 0, 6))
    batches = loader.batches(np.arange(8))
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("loader")]


def test_the_order_follows_from_seed_and_epoch():
    orders = {
        (seed, epoch): sample_order(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    for (seed, epoch), order in orders.items():
        assert sorted(order) == list(range(50))
        assert sample_order(50, seed, epoch).tolist() == order


def test_input_is_normalised_with_channels_first():
    tiles = np.array([0, 255], np.uint8).repeat(3).reshape(1, 1, 2, 3)
    x = to_input(tiles, torch.float64, torch.device("cpu"))
    assert x.dtype == torch.float64
    assert x.is_contiguous()
    assert x.tolist() == [[[[-2.0, 2.0]]] * 3]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
def test_pixels_are_scaled_by_their_type(dtype: str) -> None:
    whole = np.linspace(0, 1, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    most = np.iinfo(dtype).max if dtype.startswith("u") else 1
    tiles = (whole * most).astype(dtype)
    before = tiles.copy()
    made = to_input(tiles, torch.float64, torch.device("cpu"))
    assert made.shape == (2, 5, 3, 4)
    assert made.is_contiguous()
    wanted = (tiles.astype(float) / most - 0.5) / 0.25
    assert np.abs(made.numpy() - wanted.transpose(0, 3, 1, 2)).max() < 1e-12
    assert (tiles == before).all()  # they are the loader's own
