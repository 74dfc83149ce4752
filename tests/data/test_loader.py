from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.batches import Batching, Slice
from spatialdl.data.loader import DeviceCopy, Loader, sample_order, to_input
from spatialdl.data.normalisation import Normalisation
from spatialdl.data.synthetic_masks import SyntheticMasks
from spatialdl.data.views import Views
from tests.data.numbers import batching, contents, views

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
def test_every_sample_comes_exactly_once_an_epoch(case):
    samples, size, microbatches, _ = case
    seen: Counter[int] = Counter()
    for loader in loaders(*case, seed=1):
        batches = list(loader.batches(2))
        assert len(batches) == len(loader) == -(-samples // size)
        assert all(len(batch) == microbatches for batch in batches)
        seen.update(labels(batches))
    assert seen == Counter(range(samples))


@given(cases)
def test_slices_are_contiguous_by_microbatch_then_replica_and_shares_add_up(case):
    samples, size, microbatches, replicas = case
    order = sample_order(samples, seed=3, epoch=0)
    everyone = [list(loader.batches(0)) for loader in loaders(*case, seed=3)]
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


def test_without_a_seed_samples_come_in_order():
    (loader,) = loaders(5, 2, 1, 1)
    assert labels(loader.batches(0)) == labels(loader.batches(9)) == [0, 1, 2, 3, 4]
    assert [loader.samples(batch) for batch in range(len(loader))] == [2, 2, 1]


def test_reading_is_done_beside_the_training():
    (loader,) = loaders(4, 2, 1, 1)
    assert len(list(loader.batches())) == 2
    assert threading.get_ident() not in loader.views.source.read_by


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


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_from_any_batch_with_what_remains(workers):
    """Read by other processes in another life, and augmented: the same bits."""
    images = SyntheticMasks(11, (21, 17))
    cut = batching(3, 2, box=(4, 19, 0, 13), mask_box=(0, 20, 5, 9))

    def loader() -> Loader:
        return Loader(Views(images, (21, 17), None, ALL, 4), cut, 4, workers=workers, prefetch=1)

    epoch, first, seen, epochs = 0, 0, [], []
    for batches in (2, 1, 2, 4):  # of each life; epochs hold 4
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


def test_nothing_remains_after_the_last_batch():
    (loader,) = loaders(5, 2, 1, 1)
    assert list(loader.batches(0, 3)) == []
    assert labels(loader.batches(0, 2)) == [4]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [({"workers": -1}, "data.workers=-1 must be"), ({"prefetch": 0}, "data.prefetch=0 must be")],
)
def test_numbers_that_make_no_sense_are_refused(how, sentence):
    with pytest.raises(ValueError, match=sentence):
        Loader(views(1), batching(1), **how)


def test_input_is_normalised_with_channels_first():
    tiles = torch.tensor([0, 255], dtype=torch.uint8).repeat_interleave(3).view(1, 1, 2, 3)
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
    made = to_input(torch.from_numpy(tiles), torch.float64, torch.device("cpu"))
    assert made.shape == (2, 5, 3, 4)
    assert made.is_contiguous()
    wanted = (tiles.astype(float) / most - 0.5) / 0.25
    assert np.abs(made.numpy() - wanted.transpose(0, 3, 1, 2)).max() < 1e-12
    assert (tiles == before).all()  # they are the loader's own


@pytest.mark.parametrize(
    ("dtype", "most", "given"),
    [
        ("uint8", 255, {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}),
        ("uint16", 4095, {"scale": 4095}),
        ("uint16", 65535, {"mean": (0.1, 0.2, 0.3), "std": (0.5,)}),
        ("float32", 1, {"mean": (0.0,), "std": (1.0,)}),
        ("float32", 3000, {"mean": (0.2,), "std": (0.1, 0.2, 0.3), "scale": 3000.0}),
    ],
)
def test_statistics_of_each_channel(dtype, most, given):
    tiles = np.random.default_rng(0).uniform(0, most, (2, 5, 4, 3)).astype(dtype)
    before = tiles.copy()
    normalisation = Normalisation(**given)
    x = to_input(torch.from_numpy(tiles), torch.float64, torch.device("cpu"), normalisation)
    mean, std = (np.array(one) for one in normalisation.by_channel(3))
    wanted = (tiles.astype(np.float64) / most - mean) / std
    assert x.is_contiguous()
    assert np.abs(x.numpy() - wanted.transpose(0, 3, 1, 2)).max() < 1e-12
    assert (tiles == before).all()
    if given.get("std") == (1.0,):
        assert (x.numpy().transpose(0, 2, 3, 1) == tiles).all()  # floats as they are


@pytest.mark.parametrize("workers", [0, 1])
def test_tiles_of_volumes_are_handed_out_by_boxes(tmp_path, workers):
    volumes = np.random.default_rng(0).integers(-999, 999, (5, 7, 9, 6, 2)).astype(np.int16)
    with ShardWriter(tmp_path / "set", ["a", "b"], kind="volumes", stripes=2) as writer:
        for number, volume in enumerate(volumes):
            writer.add(volume, number % 2, mask=np.abs(volume[..., 0]) % 3)
    box = (2, 7, 0, 5, 1, 6)
    cut = Batching(2, 1, 0, [box], [box])
    loader = Loader(Views(ShardDataset(tmp_path / "set"), (7, 9, 6)), cut, workers=workers)
    parts = [part for batch in loader.batches() for part in batch]
    loader.close()
    tiles, masks = (torch.cat([getattr(p, name) for p in parts]) for name in ("tiles", "masks"))
    expected = volumes[:, 2:7, 0:5, 1:6]
    assert (tiles.numpy() == expected).all()
    assert (masks.numpy() == np.abs(expected[..., 0]) % 3).all()
    normalisation = Normalisation((10.0, -20.0), (2.0, 3.0), 1.0)
    x = to_input(tiles, torch.float64, torch.device("cpu"), normalisation)
    assert x.shape == (5, 2, 5, 5, 5)
    assert x.is_contiguous()
    for channel, (mean, std) in enumerate([(10, 2), (-20, 3)]):
        assert (x[:, channel].numpy() == (expected[..., channel] - mean) / std).all()


def test_on_a_cpu_nothing_is_copied():
    tiles = torch.arange(12, dtype=torch.uint8).view(1, 2, 2, 3)
    batch = [Slice(torch.tensor([3]), 1.0, tiles)]
    assert DeviceCopy(torch.device("cpu")).begin(batch)() is batch
