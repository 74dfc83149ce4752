from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spatialdl.streaming.watch import Watch, storages_of


class Seen:
    """Records the calls that it receives."""

    def __init__(self) -> None:
        self.on_operation = None
        self.needed: list[tuple[int, bool]] = []
        self.made: list[int] = []
        self.tiles: list[int] = []

    def begin(self, tile: int) -> None:
        self.tiles.append(tile)

    def make_room(self, needed: Any) -> None:
        list(needed)

    def need(self, storage: torch.UntypedStorage, writes: bool = False) -> None:
        self.needed.append((storage._cdata, writes))

    def note(self, storage: torch.UntypedStorage) -> None:
        self.made.append(storage._cdata)

    def look_ahead(self) -> None:
        pass


def of(x: Tensor) -> int:
    (storage,) = storages_of([x])
    return storage._cdata


def test_what_is_read_written_and_made_is_shown():
    seen, x, y = Seen(), torch.ones(5), torch.ones(5)
    with Watch(seen, 3, None):
        made = torch.stack([x, y])  # of a list
        x.add_(made[0])
        torch.add(x, 1, out=y)
    assert set(seen.tiles) == {3}
    assert (of(x), False) in seen.needed
    assert (of(x), True) in seen.needed
    assert (of(y), True) in seen.needed
    assert (of(made), True) not in seen.needed
    assert seen.made == [of(made)]  # a view is nothing new


def test_backward_is_shown_and_what_has_no_memory_is_not():
    seen, x = Seen(), torch.ones(5, requires_grad=True)
    with Watch(seen, 0, None):
        y = (x * 3).exp()
        before = len(seen.needed)
        y.sum().backward()
        assert len(seen.needed) > before
        count = len(seen.made)
        torch.empty(5, device="meta") + 1
        assert len(seen.made) == count
    assert of(x.grad) in seen.made
