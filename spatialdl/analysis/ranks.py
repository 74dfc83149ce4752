"""Collective operations that raise an error of one rank on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.world import as_communicator

if TYPE_CHECKING:
    from mpi4py import MPI

    from spatialdl.comm.communicator import Communicator

Result = TypeVar("Result")
Comm = Any  # communicator of mpi4py or of this package, or None; Any avoids importing MPI


class Ranks:
    """Ranks that share the rows.

    Args:
        comm: communicator of mpi4py or of this package; None: single process.
    """

    def __init__(self, comm: Communicator | MPI.Intracomm | None) -> None:
        self.comm: Communicator = SingleProcess() if comm is None else as_communicator(comm)
        self.rank, self.size = self.comm.rank, self.comm.size

    def generator(self, seed: int | None) -> np.random.RandomState:
        """Generator with the same state on all ranks, from rank 0's seed, or a random one."""
        fresh = int(np.random.RandomState().randint(2**31 - 1)) if seed is None else seed
        return np.random.RandomState(self.comm.bcast(fresh))

    def together(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which must not communicate, on every rank.

        Raises:
            ValueError: `work` failed on another rank; the failed rank raises its own error.
        """
        result, error = _tried(work)
        self._check(error)
        return result  # type: ignore[return-value]

    def on_first(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 and raise its error on all ranks; collective."""
        self.together(work if self.rank == 0 else lambda: None)

    def total(
        self,
        shapes: Sequence[tuple[int, ...]],
        work: Callable[[list[Tensor]], object],
        device: torch.device,
    ) -> list[Tensor]:
        """Sum over ranks by one all-reduce; bitwise the same on every rank.

        Args:
            shapes: shapes of the sums.
            work: adds this rank's part to float64 zeros of these shapes; must not communicate.
            device: device of the sums.

        Raises:
            ValueError: `work` failed on another rank; the failed rank raises its own error.
        """
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.zeros(sum(sizes) + 1, dtype=torch.float64, device=device)
        parts = torch.split(flat[:-1], sizes)
        sums = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        _, error = _tried(lambda: work(sums))
        if error is not None:
            flat[-1] = 1
        if self.size > 1:
            host = flat.cpu()
            self.comm.all_reduce_(host)
            flat.copy_(host)
        if float(flat[-1]):
            self._check(error)
        return sums

    def _check(self, error: Exception | None) -> None:
        messages = self.comm.allgather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise ValueError(f"rank {rank}: {message}")


def _tried(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # raised by `_check` after all ranks have received it
        return None, error
