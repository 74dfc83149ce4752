"""Memory accesses of a virtual tile by operation, and the points where its turn may end.

`planning.store_use` derives from them what is in memory for all tiles of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from spatialdl.comm.dry import DryEvent

EVER = 2**62
"""Step at which memory is freed that lives until the end of backward."""


class TouchedStep(NamedTuple):
    """An operation, or an event of a collective call.

    Attributes:
        part: of the network.
        event: the tile's event in a call of all tiles; None for an operation.
        uses: numbers of memories that it reads or writes.
        writes: those of them that it writes.
        makes: memories that it allocates.
        adds: memory of a weight's gradient to add to those of other virtual tiles; -1 for none.
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
        since: the step at which backward begins.
        made: the numbers of `planning.ledger.Ledger.memories`.
    """

    steps: list[TouchedStep] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    since: int = 0
    made: list[int] = field(default_factory=list)

    def add(self, size: int) -> int:
        """Register a new memory; return its number."""
        self.sizes.append(size)
        self.gone.append(EVER)
        return len(self.sizes) - 1

    def forget(self, number: int) -> None:
        self.gone[number] = len(self.steps)

    def note_event(self, part: int, event: DryEvent) -> None:
        self.steps.append(TouchedStep(part, event))

    def add_up(self, part: int, number: int) -> None:
        """Record that the gradient of a weight is complete on this tile."""
        self.steps.append(TouchedStep(part, adds=number))

    def note(
        self, part: int, uses: Iterable[int], writes: Iterable[int], makes: Iterable[int]
    ) -> None:
        """Record an operation; memories that are not counted have number -1."""
        used, changed, made = (
            tuple(n for n in dict.fromkeys(numbers) if n >= 0) for numbers in (uses, writes, makes)
        )
        step = TouchedStep(part, None, used, changed, made)
        if step.uses or step.makes:
            self.steps.append(step)


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    written_to: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, list | tuple) else [value]
            written_to += [value for value in values if isinstance(value, Tensor)]
    return written_to


def touches_between(a: Touches | None, b: Touches | None, share: float) -> Touches | None:
    """Extrapolate linearly from `a` (share 0) through `b` (share 1), over samples."""
    if a is None or b is None or len(a.steps) != len(b.steps) or a.gone != b.gone:
        return None
    steps = [_between(step, step_b, share) for step, step_b in zip(a.steps, b.steps, strict=True)]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return None
    sizes = [round(x + share * (y - x)) for x, y in zip(a.sizes, b.sizes, strict=True)]
    return replace(a, steps=known, sizes=sizes)


def _between(a: TouchedStep, b: TouchedStep, share: float) -> TouchedStep | None:
    """None if the two steps differ in more than sizes."""
    if a == b:
        return a
    event_a, event_b = a.event, b.event
    if event_a is None or event_b is None or len(event_a.pieces) != len(event_b.pieces):
        return None
    each = zip(event_a.pieces, event_b.pieces, strict=True)
    event = event_a._replace(pieces=tuple(round(x + share * (y - x)) for x, y in each))
    result = a._replace(event=event)
    return result if result == b._replace(event=event_b._replace(pieces=event.pieces)) else None
