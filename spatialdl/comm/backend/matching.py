"""Compares collectives of the `mpi4py` backend between ranks before they run.

Enabled by ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, or by `comm.check`. Without it mismatched calls hang
until the timeout, or reduce unrelated numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from mpi4py import MPI

from spatialdl.comm import check
from spatialdl.comm.backend.calls import Call, Job
from spatialdl.errors import CommMismatch

_MAY_DIFFER = ("all_gather", "gather", "scatter", "all_to_all_single", "all_to_all")
"""Collectives that allow different shapes on ranks."""


def is_requested() -> bool:
    """Whether the environment enables it."""
    return os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"


def checked(comm: MPI.Intracomm, call: Call, numbers: Iterator[int], job: Job) -> Job:
    """The job, preceded by a comparison.

    Calls are numbered when they run, not when they are created: callbacks of a future may be
    created earlier on one rank than on another, but follow the same call on all ranks. The job
    raises CommMismatch on all ranks if calls differ.
    """

    def compare_first() -> None:
        number = next(numbers)
        text = f"number {number}: {call}"
        loose = call.name in _MAY_DIFFER
        types = sorted({str(tensor.dtype) for tensor in call.tensors})
        key = f"number {number}: {call.name} {types}{call.detail}" if loose else text
        mine = check.encode(key) + check.encode(text)
        gathered = bytearray(len(mine) * comm.size)
        comm.Allgather(mine, gathered)
        texts = [gathered[i : i + len(mine)] for i in range(0, len(gathered), len(mine))]
        if any(other[: check.TEXT_BYTES] != mine[: check.TEXT_BYTES] for other in texts):
            calls = "; ".join(
                f"rank {rank} is at {check.decode(bytes(text[check.TEXT_BYTES :]))}"
                for rank, text in zip(call.group.ranks, texts, strict=True)
            )
            raise CommMismatch(
                f"ranks call different operations in {call.group}: {calls}; look for control flow "
                "that depends on the rank"
            )
        job()

    return compare_first
