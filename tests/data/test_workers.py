from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch

from spatialdl.data.batches import Batch, BatchReader, Slice
from spatialdl.data.loader import Loader
from spatialdl.data.views import Views
from spatialdl.data.workers import Workers, pack, unpack
from tests.data.numbers import SIZE, Numbers, batching, contents, views

CLONE_NEWNS, MS_PRIVATE = 0x20000, 0x44000  # of sched.h, and of mount.h with all below


class Snoop(Numbers):
    """Reports the state of its process."""

    def read(self, sample, box=None):
        from mpi4py import rc

        facts = [
            os.getpid(),
            "mpi4py.MPI" in sys.modules,
            rc.initialize,
            torch.get_num_threads(),
            int(os.environ["OMP_NUM_THREADS"]),
            len(os.listdir("/proc/self/task")) <= 4,  # this one, and those that send
        ]
        return np.array(facts, np.int64).reshape(1, 1, 6).repeat(8, 0).repeat(6, 1)


class Unpicklable(Numbers):
    def __reduce__(self):
        raise TypeError("cannot pickle an open file")


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Odd(Numbers):
    def read(self, sample, box=None):
        raise Stubborn("rain", "snow")


def test_any_number_of_workers_gives_the_same_batches():
    cut = batching(3, 2, 2, 1, box=(1, 8, 0, 5), mask_box=(0, 3, 2, 6))
    expected = [contents(Loader(views(11), cut, 1).batches(epoch)) for epoch in (0, 1)]
    assert expected[0] != expected[1]
    before = torch.get_rng_state()
    for workers in (1, 3):
        loader = Loader(views(11), cut, 1, workers=workers, prefetch=1)
        early = loader.batches(1)
        next(early)
        early.close()
        assert [contents(loader.batches(epoch)) for epoch in (0, 1)] == expected
        loader.close()
    assert (torch.get_rng_state() == before).all()


def test_a_worker_is_no_rank_and_has_one_thread():
    workers = Workers(BatchReader(Views(Snoop(4), SIZE), batching(2)), workers=2, prefetch=1)
    found = list(workers.batches([Batch(0, np.arange(2)), Batch(0, np.arange(2, 4))]))
    facts = [batch[0].tiles[0, 0, 0].tolist() for batch in found]
    workers.close()
    assert len({os.getpid(), *(pid for pid, *_ in facts)}) == 3
    assert [rest for _, *rest in facts] == [[0, 0, 1, 1, 1]] * 2


def test_an_error_in_a_worker_comes_out_with_its_sample_and_traceback():
    loader = Loader(views(9, broken=4), batching(2), workers=2, prefetch=2)
    batches = loader.batches()
    assert [next(batches)[0].labels.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="sample 4 is gone") as caught:
        next(batches)
    loader.close()
    assert caught.value.__notes__ == ["(sample 4, epoch 0)"]
    assert "in read" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
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
    loader = Loader(Views(source, SIZE), batching(2), workers=1, prefetch=1)
    with pytest.raises(error, match=says):
        list(loader.batches())
    loader.close()


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


class Slow(Numbers):
    """Blocks the start of its process until a pipe is written to."""

    gate = ""

    def __setstate__(self, state):
        self.__dict__.update(state)
        with open(self.gate) as gate:
            gate.read()


def test_a_process_that_is_ended_before_it_begins_ends(tmp_path):
    """It lost the signal once, and a program stopped at that moment waited for it for ever."""
    source = Slow(40)
    source.gate = str(tmp_path / "gate")
    os.mkfifo(source.gate)
    workers = Workers(BatchReader(Views(source, SIZE), batching(2)), 1, 1)
    workers._start()
    (child,) = multiprocessing.active_children()
    child.terminate()
    Path(source.gate).write_text("go on")
    child.join(20)
    assert child.exitcode == 0
    workers.close()


def test_signals_of_a_launcher_do_not_end_a_worker():
    """They are sent to whole groups of processes, and the run has a checkpoint to write."""
    loader = Loader(views(40), batching(2), workers=2)
    batches = loader.batches()
    for _ in range(4):  # of both
        next(batches)
    told = [child.pid for child in multiprocessing.active_children()]
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
