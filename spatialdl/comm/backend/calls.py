"""What this process is doing over MPI, so that nothing waits for ever without a word.

Every operation of the `mpi4py` backend is noted while it runs, with its timeout, see
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
    """A group as messages name it.

    Attributes:
        name: that torch.distributed gave it.
        ranks: of the world, in the order of the group.
        rank: of this process in the world.
        title: what messages call it.
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
        group: in which it is done.
        name: as in torch.distributed.
        tensors: of this rank.
        timeout_s: after which the job ends.
        options: of torch.distributed, with reduction and root if the operation has them.
        words: whatever else tells it apart.
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
        """Do the job, noted as running.

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
        """What tells it apart besides name and tensors."""
        op = getattr(self.options, "reduceOp", None)
        root = getattr(self.options, "rootRank", None)
        by = f" by {op.op.name}" if op is not None else ""
        at = f" with root {self.group.ranks[root]}" if root is not None else ""
        return f"{by}{at}{self.words}"


def describe(tensor: Tensor) -> str:
    """Type and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def seconds(timeout: timedelta, default: float) -> float:
    """Seconds of a timeout; the default for the negative one that says that none was given."""
    return timeout.total_seconds() if timeout > _NONE else default


_NONE = timedelta(0)


def fail(call: Call, error: BaseException) -> None:
    """End the job because of an error where no one would see an exception."""
    print_stderr(
        f"spatialdl: rank {call.group.rank}: {call} in {call.group} failed: {error}; ending the job"
    )
    end_job_for_sure()
