"""What a virtual tile does with memory, operation by operation, and where its turn may end.

From this follows what of all tiles of a rank is in memory at a time, see `planning.store_use`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from spatialdl.comm.dry import DryEvent

EVER = 2**62
"""The end of what lives until its backward is over."""


class TouchedStep(NamedTuple):
    """An operation, or an event of a call of all ranks.

    Attributes:
        part: of the network.
        event: what the tile does of a call of all tiles; None of an operation.
        uses: memories that it reads or writes, by number.
        writes: those of them that it writes.
        makes: memories that it makes.
        adds: that of the gradient of a weight which is added to those of other virtual tiles; -1
            for none.
    """

    part: int
    event: DryEvent | None = None
    uses: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    adds: int = -1


@dataclass
class Touches:
    """The steps of a run of one virtual tile.

    Attributes:
        steps: in order.
        sizes: bytes of each memory.
        gone: for each memory the step before which it is freed.
        since: the step with which backward begins.
        made: the numbers of `planning.ledger.Ledger.memories`.
    """

    steps: list[TouchedStep] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    since: int = 0
    made: list[int] = field(default_factory=list)

    def add(self, size: int) -> int:
        """The number of a new memory."""
        self.sizes.append(size)
        self.gone.append(EVER)
        return len(self.sizes) - 1

    def forget(self, number: int) -> None:
        self.gone[number] = len(self.steps)

    def tell(self, part: int, event: DryEvent) -> None:
        self.steps.append(TouchedStep(part, event))

    def add_up(self, part: int, number: int) -> None:
        """The gradient of a weight is complete on this tile."""
        self.steps.append(TouchedStep(part, adds=number))

    def note(
        self, part: int, uses: Iterable[int], writes: Iterable[int], makes: Iterable[int]
    ) -> None:
        """An operation; memories that are not counted have the number -1."""
        used, changed, made = (
            tuple(n for n in dict.fromkeys(some) if n >= 0) for some in (uses, writes, makes)
        )
        step = TouchedStep(part, None, used, changed, made)
        if step.uses or step.makes:
            self.steps.append(step)


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            some = value if isinstance(value, list | tuple) else [value]
            found += [one for one in some if isinstance(one, Tensor)]
    return found


def touches_between(a: Touches | None, b: Touches | None, share: float) -> Touches | None:
    """On the straight line from `a` (share 0) through `b` (share 1); of other samples."""
    if a is None or b is None or len(a.steps) != len(b.steps) or a.gone != b.gone:
        return None
    steps = [_between(one, other, share) for one, other in zip(a.steps, b.steps, strict=True)]
    known = [one for one in steps if one is not None]
    if len(known) < len(steps):
        return None
    sizes = [round(x + share * (y - x)) for x, y in zip(a.sizes, b.sizes, strict=True)]
    return replace(a, steps=known, sizes=sizes)


def _between(a: TouchedStep, b: TouchedStep, share: float) -> TouchedStep | None:
    """None if the two do not do the same."""
    if a == b:
        return a
    one, other = a.event, b.event
    if one is None or other is None or len(one.pieces) != len(other.pieces):
        return None
    each = zip(one.pieces, other.pieces, strict=True)
    event = one._replace(pieces=tuple(round(x + share * (y - x)) for x, y in each))
    found = a._replace(event=event)
    return found if found == b._replace(event=other._replace(pieces=event.pieces)) else None
