"""Simulates memory and store use of a rank's virtual tiles in a training step.

Replays the steps of one tile for all tiles, in the order of `comm.turns.Turns`. Memory is managed
nearly as in `streaming.memory.Memory`: recently used memory stays, and memory is stored ahead of
its eviction.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from spatialdl.comm.dry import DryEvent, Givers
from spatialdl.pipeline.action import Action
from spatialdl.planning.touches import TouchedStep, Touches
from spatialdl.streaming.memory import AHEAD, SMALL
from spatialdl.streaming.store import PAGE

Owner = tuple[int, int, int]
"""A copy of the network, a stage and a micro-batch."""

Key = tuple[Owner, int, int]
"""A memory: its owner, its tile (-1 if all tiles share it), and its number."""


@dataclass(frozen=True)
class StoreUse:
    """Memory and store use of the virtual tiles of a rank in a step, in bytes.

    Attributes:
        here: peak in memory.
        stored: peak in the store.
        written, read: to and from the store.
    """

    here: int = 0
    stored: int = 0
    written: int = 0
    read: int = 0


class TileWork(NamedTuple):
    """Next work of a tile.

    Attributes:
        step: of its trace.
        frees: memories that are freed after it.
    """

    step: TouchedStep
    frees: tuple[int, ...]


@dataclass
class StageSteps:
    """Forward and backward of a stage on one tile.

    Attributes:
        sizes: bytes of each memory.
    """

    forward: list[TileWork]
    backward: list[TileWork]
    sizes: Sequence[int]


def steps_of(
    touches: Touches,
    parts: tuple[int, int],
    kept_outputs: Iterable[int],
    loss: bool,
    recompute: bool,
) -> StageSteps:
    """Extract a stage from a trace.

    Args:
        parts: the first, and the one after the last.
        kept_outputs: memories that are kept until the end of backward.
        loss: whether the loss follows these parts.
        recompute: whether the stage is recomputed in backward, and keeps only its inputs.
    """
    first, after = parts
    own = [first <= step.part < after for step in touches.steps]
    end = [loss and step.part == after for step in touches.steps]
    since, kept = touches.since, set(kept_outputs)
    counted = [size > SMALL for size in touches.sizes]
    front = [n for n in range(since) if own[n]]
    back = [n for n in range(len(own)) if end[n] or (own[n] and n >= since)]
    forward = _works(touches, front, counted, kept, since)
    if not recompute:
        later = _works(touches, back, counted, kept, None)
        return StageSteps(forward, later, touches.sizes)
    entering = {n for work in forward for n in work.step.uses}
    entering -= {n for work in forward for n in work.step.makes}
    kept |= entering
    first_forward = _without_graph(forward, kept)
    later = [*(TileWork(work.step, work.frees) for work in forward if work.step.event is None)]
    later += _works(touches, back, counted, kept, None)
    return StageSteps(first_forward, later, touches.sizes)


def _without_graph(works: Sequence[TileWork], kept: set[int]) -> list[TileWork]:
    """A forward that keeps nothing for backward: memory is freed after its last use."""
    last = {n: at for at, work in enumerate(works) for n in (*work.step.uses, *work.step.makes)}
    frees: dict[int, list[int]] = {}
    for memory, at in last.items():
        if memory not in kept:
            frees.setdefault(at, []).append(memory)
    return [TileWork(work.step, tuple(frees.get(at, ()))) for at, work in enumerate(works)]


def _works(
    touches: Touches,
    numbers: Sequence[int],
    counted: Sequence[bool],
    kept: set[int],
    until: int | None,
) -> list[TileWork]:
    """The steps of these numbers.

    Args:
        until: memory freed before this step is freed by the end; None to keep the rest.
    """
    ends = [*numbers[1:], until]
    gone: dict[int, list[int]] = {}
    for memory, when in enumerate(touches.gone):
        if counted[memory] and memory not in kept:
            gone.setdefault(when, []).append(memory)
    works = []
    for number, end in zip(numbers, ends, strict=True):
        frees = [
            memory
            for when in range(number + 1, (number + 1 if end is None else end) + 1)
            for memory in gone.get(when, ())
        ]
        step = touches.steps[number]
        if step.event is None:
            uses, writes, makes = (
                tuple(memory for memory in memories if counted[memory])
                for memories in (step.uses, step.writes, step.makes)
            )
            adds = step.adds if step.adds >= 0 and counted[step.adds] else -1
            step = TouchedStep(step.part, None, uses, writes, makes, adds)
        if step.event is not None or step.uses or step.makes or step.adds >= 0 or frees:
            works.append(TileWork(step, tuple(frees)))
    return works


# --- memory


class SimulatedMemory:
    """Simulated memory within a limit.

    Args:
        limit: bytes; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._here: OrderedDict[Key, int] = OrderedDict()  # most recently used last
        self._leaving: OrderedDict[Key, int] = OrderedDict()  # stored, and still in memory
        self._away: dict[Key, int] = {}
        self._slots: dict[Key, int] = {}
        self._in_store = self._staying = 0  # bytes; `_staying` is in memory and not leaving
        self.here = self.peak = self.stored = self.written = self.read = 0

    def touch(self, uses: Sequence[Key], writes: Sequence[Key], makes: dict[Key, int]) -> None:
        """Simulate an operation."""
        self._make_room(uses)
        for key in uses:
            if key in self._away:
                size = self._away.pop(key)
                self._add(key, size)
                self.read += size
            elif key in self._leaving:
                self._stay(key, self._leaving.pop(key))
            elif key in self._here:
                self._here.move_to_end(key)
        for key in writes:
            self._free(key)
        for key, size in makes.items():
            if not self.has(key):
                self._add(key, size)
        self._make_room([*uses, *makes])

    def forget(self, key: Key) -> None:
        """Free a memory."""
        size = self._here.pop(key, 0)
        self._staying -= size
        self.here -= size + self._leaving.pop(key, 0)
        self._away.pop(key, None)
        self._free(key)

    def has(self, key: Key) -> bool:
        return key in self._here or key in self._leaving or key in self._away

    def add_up(self, own: Key, total: Key) -> None:
        """Add a memory to another one, or rename it if there is none."""
        if self.has(total):
            self.touch((own, total), (total,), {})
            self.forget(own)
            return
        places: tuple[dict[Key, int], ...]
        places = self._here, self._leaving, self._away, self._slots
        for place in places:
            if own in place:
                place[total] = place.pop(own)

    def forget_all(self, owner: Owner) -> None:
        for key in [key for key in (*self._here, *self._leaving, *self._away) if key[0] == owner]:
            self.forget(key)

    def _add(self, key: Key, size: int) -> None:
        self._stay(key, size)
        self.here += size
        self.peak = max(self.peak, self.here)

    def _stay(self, key: Key, size: int) -> None:
        self._here[key] = size
        self._staying += size

    def _make_room(self, needed: Sequence[Key]) -> None:
        if self.limit is None:
            return
        room, keep = self.limit - sum(self._away.get(key, 0) for key in needed), {*needed}
        early = room - int(AHEAD * self.limit)
        if self._staying > early:
            staying, leaving = self._staying, []
            for key, size in self._here.items():
                if staying <= early:
                    break
                if key not in keep:
                    leaving.append(key)
                    staying -= size
            for key in leaving:
                self._store(key)
        for key in [key for key in self._leaving if key not in keep]:
            if self.here <= room:
                break
            size = self._away[key] = self._leaving.pop(key)
            self.here -= size

    def _store(self, key: Key) -> None:
        size = self._leaving[key] = self._here.pop(key)
        self._staying -= size
        if key not in self._slots:
            self._slots[key] = -(-size // PAGE) * PAGE
            self._in_store += self._slots[key]
            self.stored = max(self.stored, self._in_store)
            self.written += size

    def _free(self, key: Key) -> None:
        self._in_store -= self._slots.pop(key, 0)

    @property
    def use(self) -> StoreUse:
        return StoreUse(self.peak, self.stored, self.written, self.read)


# --- turns


class Replay:
    """Simulates the actions of a rank on its virtual tiles one after the other.

    Args:
        stages: of the rank, by number.
        stream: virtual tiles of the rank along each spatial dim.
        limit: bytes in memory; None for no limit.

    Attributes:
        room: the simulated memory.
    """

    def __init__(
        self, stages: Mapping[int, StageSteps], stream: Sequence[int], limit: int | None
    ) -> None:
        self._stages, self.room = stages, SimulatedMemory(limit)
        self._tiles = prod(stream)

    def run(self, action: Action) -> int:
        """Run an action; return the bytes written to the store and read from it."""
        before = self.room.written + self.room.read
        stage, owner = self._stages[action.stage], (action.copy, action.stage, action.microbatch)
        is_forward = action.kind == "forward"
        works = stage.forward if is_forward else stage.backward
        _Turns(self.room, self._tiles, stage, owner, works).run()
        if not is_forward:
            self.room.forget_all(owner)
        return self.room.written + self.room.read - before


class _Turns:
    """One action, in the order of `comm.turns.Turns`."""

    def __init__(
        self,
        room: SimulatedMemory,
        tiles: int,
        stage: StageSteps,
        owner: Owner,
        works: Sequence[TileWork],
    ) -> None:
        self._room, self._tiles, self._stage = room, tiles, stage
        self._owner, self._works = owner, works
        self._next, self._brought = [0] * tiles, [0] * tiles
        self._open: list[list[int]] = [[] for _ in range(tiles)]  # calls not waited for yet
        self._givers: dict[int, Givers] = {}
        self._arrived: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._copied: dict[int, list[Key]] = {}
        self._sent = 0
        self._waits: list[tuple[bool, int]] = [(False, 0)] * tiles

    def run(self) -> None:
        me, count = 0, self._tiles
        while True:
            self._turn(me)
            others = [(me + step) % count for step in range(1, count + 1)]
            unfinished = [tile for tile in others if self._next[tile] < len(self._works)]
            if not unfinished:
                break
            me = next(filter(self._is_ready, unfinished), unfinished[0])
        for key in [key for keys in self._copied.values() for key in keys]:
            self._room.forget(key)

    def _is_ready(self, tile: int) -> bool:
        all_tiles, call = self._waits[tile]
        if all_tiles:
            return self._arrived[call] == self._tiles
        givers = self._givers.get(call)
        return givers is None or all(self._brought[other] >= call for other in givers[tile])

    def _turn(self, tile: int) -> None:
        """Run a tile until it waits for peers, or ends."""
        works = self._works
        self._leave(self._waits[tile][1])
        while self._next[tile] < len(works):
            step, frees = works[self._next[tile]]
            self._next[tile] += 1
            if step.event is None:
                self._touch(tile, step)
            for number in frees:
                self._room.forget((self._owner, tile, number))
            if step.event is not None and not self._continues(tile, step.event):
                return

    def _continues(self, tile: int, event: DryEvent) -> bool:
        if event.kind == "bring":
            self._brought[tile] += 1
            call = self._brought[tile]
            self._open[tile].append(call)
            self._arrived[call] += 1
            self._givers[call] = event.givers
            self._room.touch((), (), self._copies(tile, call, event.pieces))
            return True
        if not self._open[tile]:  # the call started in another stage's part
            return True
        to_all = event.kind == "wait for all"
        call = self._open[tile].pop(-1 if to_all else 0)
        self._waits[tile] = to_all, call
        if not self._is_ready(tile):
            return False
        self._leave(call)
        return True

    def _copies(self, tile: int, call: int, pieces: Sequence[int]) -> dict[Key, int]:
        """Buffers that a tile sends; kept until all tiles have received from the call."""
        copies = {
            (self._owner, tile, -1 - number): size
            for number, size in enumerate(pieces, self._sent)
            if size > SMALL
        }
        self._sent += len(pieces)
        self._copied.setdefault(call, []).extend(copies)
        return copies

    def _leave(self, call: int) -> None:
        self._left[call] += 1
        if self._left[call] == self._tiles:
            for key in self._copied.pop(call, ()):
                self._room.forget(key)

    def _touch(self, tile: int, step: TouchedStep) -> None:
        """Simulate an operation; inputs that it lacks are read, or come from another stage."""
        owner, sizes = self._owner, self._stage.sizes
        uses, makes = [], {(owner, tile, number): sizes[number] for number in step.makes}
        for number in step.uses:
            key = owner, tile, number
            if self._room.has(key):
                uses.append(key)
            else:
                makes[key] = sizes[number]
        self._room.touch(uses, [(owner, tile, number) for number in step.writes], makes)
        if step.adds >= 0:
            self._room.add_up((owner, tile, step.adds), (owner, -1, step.adds))
