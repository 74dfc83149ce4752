"""Interface of a communicator, independent of the transport.

Implementations: MPI (`comm.mpi`), torch.distributed (`comm.distributed`), virtual ranks
(`comm.virtual`) and a single process (`comm.single_process`). Methods named as in mpi4py behave as
in mpi4py and take any object that can be pickled. The other methods take tensors on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from spatialdl.comm.boxed import Exchange


class Pending(Protocol):
    """A pending operation."""

    def wait(self) -> None:
        """Block until it is complete and its buffers may be reused."""


class UnderWay(Pending, Protocol):
    """Pending messages to and from other ranks."""

    def is_done(self) -> bool:
        """Whether buffers may be reused; does not block."""

    def peers(self) -> Sequence[int]:
        """Communicator ranks of the message that `wait` would block on."""


Message = tuple[Callable[[], object], Callable[[], bool], int | None]
"""A pending message or collective: its blocking wait; its non-blocking test; the peer's rank in the
communicator, None of a collective."""


class Messages:
    """Pending messages, waited for in order, and buffers to unpack when all are complete.

    Args:
        arrivals: pairs of a view and the buffer to copy into it.
        keep: memory that must outlive the messages.
    """

    def __init__(
        self,
        under_way: Sequence[Message],
        arrivals: Sequence[tuple[Tensor, Tensor]] = (),
        keep: object = None,
    ) -> None:
        self._under_way, self._arrivals, self._keep = list(under_way), arrivals, keep

    def wait(self) -> None:
        while self._under_way:
            self._under_way[0][0]()
            del self._under_way[0]
        for view, received in self._arrivals:
            view.copy_(received)
        self._arrivals, self._keep = (), None

    def is_done(self) -> bool:
        return all(is_done() for _, is_done, _ in self._under_way)

    def peers(self) -> list[int]:
        """Rank of the message that `wait` would block on."""
        return [peer for _, _, peer in self._under_way[:1] if peer is not None]


Start = Callable[[Exchange], UnderWay]
"""Starts an exchange."""


class Communicator(Protocol):
    """A group of ranks, from the view of one of them."""

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def world_ranks(self) -> Sequence[int]:
        """World ranks of all ranks, for messages."""

    @property
    def overlaps(self) -> bool:
        """Whether a sum that overlaps with computation saves time."""

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """Communicator of some ranks, numbered in this order; collective over exactly these.

        Ranks in several subsets must create them in the same order.
        """

    def duplicate(self) -> Communicator:
        """Communicator of the same ranks with separate messages; collective."""

    def nodes(self) -> list[int]:
        """For each rank the first rank on the same machine; collective."""

    def barrier(self) -> None:
        """Block until all ranks have called it."""

    def bcast(self, obj: Any, root: int = 0, /) -> Any:
        """Object of rank `root`."""

    def gather(self, obj: Any, root: int = 0, /) -> list[Any] | None:
        """Objects of all ranks on rank `root`, None elsewhere."""

    def allgather(self, obj: Any, /) -> list[Any]:
        """Objects of all ranks."""

    def allreduce(self, obj: Any, /, op: Any = ...) -> Any:
        """Objects of all ranks reduced by the binary function `op`; by default their sum."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks, a new tensor, bitwise equal on all ranks.

        Raises:
            TypeError: for dtypes that the transport cannot sum.
        """

    def all_reduce_(self, values: Tensor) -> None:
        """Sum a contiguous tensor in place."""

    def start_all_reduce(self, values: Tensor) -> Pending:
        """Start to sum a contiguous tensor in place."""

    def all_gather(self, values: Tensor) -> Tensor:
        """Tensors of all ranks, of equal shape, as (ranks, ...)."""

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        """Start an exchange, see `comm.exchange`.

        With a route, messages of one tag arrive in the order in which they were sent.
        """


def fold(objects: Sequence[Any], op: Callable[[Any, Any], Any]) -> Any:
    """Reduce objects from left to right."""
    total = objects[0]
    for value in objects[1:]:
        total = op(total, value)
    return total
