"""Messages under way, over whichever transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

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
