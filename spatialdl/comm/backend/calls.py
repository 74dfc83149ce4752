"""Calls of this process over MPI, recorded for hang reports.

Every operation of the `mpi4py` backend is recorded while it runs, with its timeout, see
`comm.watchdog`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.ending import end_job_for_sure
from spatialdl.comm.liveness import print_stderr
from spatialdl.comm.waiting import noted

MANY = 32

Job = Callable[[], object]


class Group(NamedTuple):
    """Identity of a group in messages.

    Attributes:
        name: given by torch.distributed.
        ranks: world ranks, in the order of the group.
        rank: world rank of this process.
        title: description, shown instead of the name.
    """

    name: str
    ranks: Sequence[int]
    rank: int
    title: str = ""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:MANY]))
        more = f" and {len(self.ranks) - MANY} more" if len(self.ranks) > MANY else ""
        return f"group '{self.title or self.name}' (ranks {ranks}{more})"


class Call:
    """An operation of this rank.

    Args:
        group: its group.
        name: as in torch.distributed.
        tensors: tensors of this rank.
        timeout_s: timeout after which the job aborts.
        options: of torch.distributed, with reduction and root if the operation has them.
        words: further details for messages.
    """

    __slots__ = ("group", "name", "options", "tensors", "timeout_s", "words")

    def __init__(
        self,
        group: Group,
        name: str,
        tensors: Sequence[Tensor],
        timeout_s: float,
        options: Any = None,
        words: str = "",
    ) -> None:
        self.group, self.name, self.tensors = group, name, tensors
        self.timeout_s, self.options, self.words = timeout_s, options, words

    def run(self, job: Job) -> None:
        """Run the job, recorded as a wait.

        Raises:
            RuntimeError: if MPI fails, naming the operation.
        """
        try:
            noted(self.group, self.group.ranks, noted, self, None, job)
        except MPI.Exception as error:
            raise RuntimeError(f"{self} in {self.group} failed: {error}") from error

    def __str__(self) -> str:
        shown = [describe(tensor) for tensor in self.tensors[:4]]
        if len(self.tensors) > 4:
            shown.append(f"{len(self.tensors) - 4} more")
        tensors = f" of {', '.join(shown)}" if shown else ""
        return f"{self.name}{tensors}{self.detail}"

    @property
    def detail(self) -> str:
        """Details besides name and tensors."""
        op = getattr(self.options, "reduceOp", None)
        root = getattr(self.options, "rootRank", None)
        by = f" by {op.op.name}" if op is not None else ""
        at = f" with root {self.group.ranks[root]}" if root is not None else ""
        return f"{by}{at}{self.words}"


def describe(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def seconds(timeout: timedelta, default: float) -> float:
    """Seconds of a timeout; `default` for a negative one, which means unset."""
    return timeout.total_seconds() if timeout > _NONE else default


_NONE = timedelta(0)


def fail(call: Call, error: BaseException) -> None:
    """Abort the job because of an error in a thread whose exceptions are not propagated."""
    print_stderr(
        f"spatialdl: rank {call.group.rank}: {call} in {call.group} failed: {error}; "
        "aborting the job"
    )
    end_job_for_sure()
