"""What is asked of a communicator, whichever transport is behind it.

There are three: MPI (`comm.mpi`), torch.distributed (`comm.distributed`), and a process by itself
(`comm.alone`). Names in one word are those of mpi4py, and do what they do there; they take any
object that can be pickled. The others take tensors on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from spatialdl.comm.boxed import Exchange


class Pending(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Return when it is done, and its buffers may be used again."""


class UnderWay(Pending, Protocol):
    """Messages to and from other ranks."""

    def is_done(self) -> bool:
        """Whether their buffers may be used again; does not wait."""

    def peers(self) -> Sequence[int]:
        """Ranks, as the communicator numbers them, of what `wait` is at."""


Message = tuple[Callable[[], object], Callable[[], bool], int | None]
"""One that is under way, or a collective: returns when it is done; whether it is, without waiting;
the other rank, numbered in the communicator, None of a collective."""


class Messages:
    """Messages under way, waited for in their order, and what to unpack when all are there.

    Args:
        arrivals: views, and the buffers of which they get the contents.
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
        for view, landed in self._arrivals:
            view.copy_(landed)
        self._arrivals, self._keep = (), None

    def is_done(self) -> bool:
        return all(is_done() for _, is_done, _ in self._under_way)

    def peers(self) -> list[int]:
        """The rank of the message that `wait` is at."""
        return [peer for _, _, peer in self._under_way[:1] if peer is not None]


Start = Callable[[Exchange], UnderWay]
"""Starts to move tensors along a plan."""


class Communicator(Protocol):
    """A number of ranks, as one of them sees them."""

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def world_ranks(self) -> Sequence[int]:
        """What they are called in the world, for messages."""

    @property
    def overlaps(self) -> bool:
        """Whether it saves time to sum tensors while this rank computes."""

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """Some of the ranks, numbered in this order; all of these, and no others, must call it.

        Ranks that are in several subsets must make them in the same order.
        """

    def duplicate(self) -> Communicator:
        """The same ranks with messages of their own; all ranks must call it."""

    def nodes(self) -> list[int]:
        """For each rank the first one on the same machine; all ranks must call it."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def bcast(self, obj: Any, root: int = 0, /) -> Any:
        """The object of rank `root`."""

    def gather(self, obj: Any, root: int = 0, /) -> list[Any] | None:
        """The objects of all ranks on rank `root`, None elsewhere."""

    def allgather(self, obj: Any, /) -> list[Any]:
        """The objects of all ranks."""

    def allreduce(self, obj: Any, /, op: Any = ...) -> Any:
        """The objects of all ranks put together by `op`, a function of two; their sum without."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of `values` over the ranks, a new tensor, the same bits on every rank.

        Raises:
            TypeError: for types that cannot be added on the transport.
        """

    def all_reduce_(self, values: Tensor) -> None:
        """Add up, in place, a contiguous tensor."""

    def start_all_reduce(self, values: Tensor) -> Pending:
        """Start to add up, in place, a contiguous tensor."""

    def all_gather(self, values: Tensor) -> Tensor:
        """(ranks, ...): the tensors of all ranks, which have one shape."""

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        """Start to move tensors along a plan, see `comm.exchange`.

        With a route, messages of one tag arrive in the order in which they were sent.
        """


def fold(objects: Sequence[Any], op: Callable[[Any, Any], Any]) -> Any:
    """Objects put together from left to right."""
    total = objects[0]
    for value in objects[1:]:
        total = op(total, value)
    return total
