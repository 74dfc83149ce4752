"""Before a collective of the `mpi4py` backend ranks compare what they are about to do.

On with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, or with `comm.check`. Without it ranks whose calls do
not match hang until the timeout, or add up unrelated numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from mpi4py import MPI

from spatialdl.comm import check
from spatialdl.comm.backend.calls import Call, Job
from spatialdl.errors import CommMismatch

_MAY_DIFFER = ("all_gather", "gather", "scatter", "all_to_all_single", "all_to_all")
"""Collectives in which ranks may bring different shapes."""


def asked_for() -> bool:
    """Whether the environment switches it on."""
    return os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"


def checked(comm: MPI.Intracomm, call: Call, numbers: Iterator[int], job: Job) -> Job:
    """The job, after a comparison.

    Calls are numbered when they run, not when they are made: what is chained to a future may be
    made earlier on one rank than on another, but follows the same call everywhere. The job raises
    CommMismatch, on all ranks, if ranks are about to do different things.
    """

    def compare_first() -> None:
        number = next(numbers)
        text = f"number {number}: {call}"
        loose = call.name in _MAY_DIFFER
        types = sorted({str(tensor.dtype) for tensor in call.tensors})
        key = f"number {number}: {call.name} {types}{call.detail}" if loose else text
        mine = check.encode(key) + check.encode(text)
        everybody = bytearray(len(mine) * comm.size)
        comm.Allgather(mine, everybody)
        said = [everybody[i : i + len(mine)] for i in range(0, len(everybody), len(mine))]
        if any(other[: check.TEXT_BYTES] != mine[: check.TEXT_BYTES] for other in said):
            calls = "; ".join(
                f"rank {rank} is at {check.decode(bytes(text[check.TEXT_BYTES :]))}"
                for rank, text in zip(call.group.ranks, said, strict=True)
            )
            raise CommMismatch(
                f"ranks do different things in {call.group}: {calls}; look for control flow that "
                "depends on the rank"
            )
        job()

    return compare_first
