"""Batches: which samples, which box of them, in which order; read by threads or processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.batches import Batch, Batching, BatchReader, Slice
from spatialdl.data.loader import Loader, sample_order
from spatialdl.data.synthetic import SyntheticMasks
from spatialdl.data.views import Views
from spatialdl.data.workers import Workers, pack, unpack
from tests.data.numbers import (
    SIZE,
    WHOLE,
    Numbers,
    Odd,
    Slow,
    Snoop,
    Unpicklable,
    batching,
    contents,
    views,
)

CLONE_NEWNS, MS_PRIVATE = 0x20000, 0x44000  # of sched.h, and of mount.h with all below


def test_workers_give_the_same_batches():
    cut = batching(3, 2, 2, 1, box=(1, 8, 0, 5), mask_box=(0, 3, 2, 6))
    expected = [contents(Loader(views(11), cut, 1).batches(epoch)) for epoch in (0, 1)]
    assert expected[0] != expected[1]
    before = torch.get_rng_state()
    loader = Loader(views(11), cut, 1, workers=2)
    early = loader.batches(1)
    next(early)
    early.close()
    assert [contents(loader.batches(epoch)) for epoch in (0, 1)] == expected
    assert contents(loader.batches(1, 2)) == expected[1][2:]
    loader.close()
    assert (torch.get_rng_state() == before).all()


def test_a_worker_is_no_rank_and_has_one_thread():
    workers = Workers(BatchReader(Views(Snoop(2), SIZE), batching(2)), workers=1)
    (batch,) = workers.batches([Batch(0, np.arange(2))])
    pid, *facts = batch[0].tiles[0, 0, 0].tolist()
    workers.close()
    assert pid != os.getpid()
    assert facts == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        (Numbers(6, broken=4), OSError, "sample 4 is gone"),
        (Odd(2), RuntimeError, r"Stubborn: rain and snow \(sample 0, epoch 0\)"),
        (
            Numbers(6, deadly=4),
            ChildProcessError,
            r"while reading samples .*4, 5 of .*data.workers",
        ),
        (Unpicklable(2), ValueError, r"cannot be pickled .*cannot pickle an open.*workers=0"),
    ],
)
def test_what_ends_a_worker_is_told(source, error, says):
    loader = Loader(Views(source, SIZE), batching(2), workers=1)
    with pytest.raises(error, match=says) as caught:
        list(loader.batches())
    loader.close()
    if error is OSError:
        assert caught.value.__notes__ == ["(sample 4, epoch 0)"]
        assert "in read" in str(caught.value.__cause__)


def test_a_batch_is_one_block():
    tiles = torch.arange(2 * 3 * 5 * 1, dtype=torch.uint8).view(2, 3, 5, 1)
    batch = [
        Slice(torch.tensor([3, 1]), 0.5, tiles, None),
        Slice(torch.tensor([], dtype=torch.int64), 0.0, None),
        Slice(torch.tensor([7]), 0.5, None, tiles[:1, ..., 0]),
        Slice(torch.tensor([8]), 0.5, (tiles * 1000.5).double(), None),
    ]
    block, rest = pack(batch)
    assert block.is_shared()
    found = unpack(block, rest)
    assert contents([found]) == contents([batch])
    storages = {x.untyped_storage().data_ptr() for one in found for x in one.tensors()}
    assert storages - {0} == {block.untyped_storage().data_ptr()}
    nothing = [Slice(torch.tensor([], dtype=torch.int64), 0.0, None)]
    assert contents([unpack(*pack(nothing))]) == contents([nothing])


def train_alone(pipe) -> None:
    """Say which workers a program has, batch by batch, until the pipe is closed."""
    forkserver._forkserver.__init__()  # that of the parent is none of a fork
    loader = Loader(views(40), batching(2), workers=2)
    for _ in loader.batches():
        pipe.send([child.pid for child in multiprocessing.active_children()])
        with suppress(EOFError):
            pipe.recv()


@pytest.mark.parametrize(
    ("method", "ending"),
    [
        ("fork", signal.SIGKILL),
        *(
            pytest.param("spawn", ending, marks=pytest.mark.slow)
            for ending in (signal.SIGINT, signal.SIGTERM, None)  # None: reads to the end
        ),
    ],
)
def test_no_process_stays_behind(method, ending):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    program = context.Process(target=train_alone, args=(theirs,))
    program.start()
    workers = [os.pidfd_open(pid) for pid in ours.recv()]
    assert len(workers) == 2
    if ending is None:
        while program.is_alive():
            ours.send("go on")
            with suppress(EOFError):
                ours.poll(1) and ours.recv()
    else:
        os.kill(program.pid, ending)
    program.join(60)
    program.kill()
    for one in workers:
        assert select.select([one], [], [], 60)[0], "a worker is still there"
        os.close(one)


def test_a_process_that_is_ended_before_it_begins_ends(tmp_path):
    """It lost the signal once, and a program stopped at that moment waited for it for ever."""
    source = Slow(40)
    source.gate = str(tmp_path / "gate")
    os.mkfifo(source.gate)
    others = set(multiprocessing.active_children())
    workers = Workers(BatchReader(Views(source, SIZE), batching(2)), 1)
    workers._start()
    (child,) = set(multiprocessing.active_children()) - others
    child.terminate()
    Path(source.gate).write_text("go on")
    child.join(20)
    assert child.exitcode == 0
    workers.close()


def test_signals_of_a_launcher_do_not_end_a_worker():
    """They are sent to whole groups of processes, and the run has a checkpoint to write."""
    others = set(multiprocessing.active_children())
    loader = Loader(views(40), batching(2), workers=1)
    batches = loader.batches()
    for _ in range(4):
        next(batches)
    told = [child.pid for child in set(multiprocessing.active_children()) - others]
    told.append(forkserver._forkserver._forkserver_pid)
    for name in ("INT", "TERM", "USR1"):  # by somebody else: their own parent may end them
        subprocess.run(["kill", f"-{name}", *map(str, told)], check=True)
    assert len(list(batches)) == 16
    loader.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes /dev/shm small for one process")
def test_shared_memory_that_is_full_is_told(tmp_path):
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        private = libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_PRIVATE, None)
        if private or libc.mount(b"small", b"/dev/shm", b"tmpfs", 0, b"size=1m"):
            os._exit(2)
        try:
            pack([Slice(torch.zeros(1), 1.0, torch.zeros(4 * 2**20, dtype=torch.uint8))])
        except OSError as error:
            (tmp_path / "said").write_text(str(error))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        pytest.skip("needs the right to mount")
    said = (tmp_path / "said").read_text()
    assert "cannot allocate 4.0 MB of shared memory for a batch, 1.0 MB are free" in said
    assert "--shm-size" in said


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
def test_an_error_while_reading_keeps_its_type_and_names_the_sample(broken):
    loader = Loader(views(4, broken=broken), batching(2))
    with pytest.raises(OSError, match=f"sample {broken} is gone") as caught:
        list(loader.batches())
    assert caught.value.__notes__ == [f"(sample {broken}, epoch 0)"]


def test_who_stops_early_leaves_no_thread_behind():
    before = threading.enumerate()  # those of other tests, which are collected when they are
    (loader,) = loaders(8, 2, 1, 1)
    batches = loader.batches()
    next(batches)
    batches.close()
    new = [one for one in threading.enumerate() if one not in before]
    assert not [one for one in new if one.name.startswith("loader")]


def test_an_epoch_goes_on_from_any_batch_with_what_remains():
    """In another life, and augmented: the same bits."""
    images = SyntheticMasks(11, (21, 17))
    cut = batching(3, 2, box=(4, 19, 0, 13), mask_box=(0, 20, 5, 9))

    def loader() -> Loader:
        return Loader(Views(images, (21, 17), None, ALL, 4), cut, 4)

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
