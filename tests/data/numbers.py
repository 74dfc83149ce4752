"""Images whose pixels encode sample, row and column; labels are the sample indices."""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np
import torch

from spatialdl.data.batches import Batching
from spatialdl.data.views import Views

SIZE = 8, 6
WHOLE = 0, 8, 0, 6


class Numbers:
    """Args:
    broken: reading this sample fails.
    deadly: reading this sample kills the process.
    """

    channels = 3
    classes = ("any",)
    has_masks = True

    def __init__(self, samples: int, broken: int | None = None, deadly: int | None = None) -> None:
        self.labels = np.arange(samples)
        self.broken, self.deadly = broken, deadly
        self.read_by: set[int] = set()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def image_size(self, sample: int) -> tuple[int, int]:
        return SIZE

    def read(self, sample, box=None):
        self.read_by.add(threading.get_ident())
        self.asked.append(sample)
        if sample == self.broken:
            raise OSError(f"sample {sample} is gone")
        if sample == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        rows, cols = np.mgrid[0:8, 0:6].astype(np.uint8)
        image = np.stack([np.full_like(rows, sample), rows, cols], axis=-1)
        row0, row1, col0, col1 = box or WHOLE
        return image[row0:row1, col0:col1]

    def read_mask(self, sample, box=None):
        return self.read(sample, box)[..., 1]


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


class Slow(Numbers):
    """Blocks the start of its process until a pipe is written to."""

    gate = ""

    def __setstate__(self, state):
        self.__dict__.update(state)
        with open(self.gate) as gate:
            gate.read()


def views(samples: int, **how) -> Views:
    return Views(Numbers(samples, **how), SIZE)


def batching(size, microbatches=1, replicas=1, replica=0, box=WHOLE, mask_box=None) -> Batching:
    return Batching(size, replicas, replica, [box] * microbatches, [mask_box] * microbatches)


def contents(batches) -> list[list[tuple]]:
    """Everything in batches, to be compared."""
    return [
        [
            (
                part.share,
                *((x.dtype, tuple(x.shape), x.numpy().tobytes()) for x in part.tensors()),
                (part.tiles is None, part.masks is None),
            )
            for part in batch
        ]
        for batch in batches
    ]
