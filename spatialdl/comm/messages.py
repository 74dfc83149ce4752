"""Messages under way, over whichever transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Message(NamedTuple):
    """A message under way, or a collective.

    Attributes:
        wait: returns when it is done.
        is_done: whether it is; does not wait.
        peer: the other rank, numbered in the communicator; none of a collective.
    """

    wait: Callable[[], object]
    is_done: Callable[[], bool]
    peer: int | None = None


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
            self._under_way[0].wait()
            del self._under_way[0]
        for view, landed in self._arrivals:
            view.copy_(landed)
        self._arrivals, self._keep = (), None

    def is_done(self) -> bool:
        return all(message.is_done() for message in self._under_way)

    def peers(self) -> list[int]:
        """The rank of the message that `wait` is at."""
        return [one.peer for one in self._under_way[:1] if one.peer is not None]
