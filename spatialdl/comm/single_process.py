"""Communicator of a single process, without MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spatialdl.comm.boxed import Exchange


class Completed:
    """An operation that is complete from the start."""

    def wait(self) -> None:
        return None

    def is_done(self) -> bool:
        return True

    def peers(self) -> list[int]:
        return []


class SingleProcess:
    """A `Communicator` of one rank."""

    rank = 0
    size = 1
    overlaps = False

    @property
    def world_ranks(self) -> range:
        return range(self.size)

    def subset(self, ranks: Sequence[int]) -> SingleProcess:
        return self

    def duplicate(self) -> SingleProcess:
        return self

    def nodes(self) -> list[int]:
        return [0]

    def barrier(self) -> None:
        return None

    def bcast(self, obj: Any, root: int = 0, /) -> Any:
        return obj

    def gather(self, obj: Any, root: int = 0, /) -> list[Any] | None:
        return [obj]

    def allgather(self, obj: Any, /) -> list[Any]:
        return [obj]

    def allreduce(self, obj: Any, /, op: Any = None) -> Any:
        return obj

    def all_reduce(self, values: Tensor) -> Tensor:
        return values.clone()

    def all_reduce_(self, values: Tensor) -> None:
        return None

    def start_all_reduce(self, values: Tensor) -> Completed:
        return Completed()

    def all_gather(self, values: Tensor) -> Tensor:
        return values.clone().unsqueeze(0)

    def start_exchange(self, exchange: Exchange) -> Completed:
        if exchange.plan.communicates:
            raise RuntimeError(f"a single process cannot execute a {exchange.plan.describe()}")
        return Completed()
