"""Simulated lanes of hand-overs: both sides use one message order, without deadlocks.

A lane is a stream of messages without tags, as NCCL has: each waits until its peer has come to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from spatialdl.layout.placement import Placement
from spatialdl.pipeline.gradients import stage_groups
from spatialdl.pipeline.handovers import MOST_LANES, keeps_order, lanes_of
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.shapes import Border, own_samples
from spatialdl.pipeline.simulate import Action, Lists, Schedule, actions_of

ONE, TWO = (1, 1), (2, 1)
SIMPLE = [
    (name, Placement(1, grids), microbatches, 1)
    for name in ("gpipe", "1f1b")
    for grids in ((TWO, ONE), (ONE, TWO, ONE), (ONE,) * 4)
    for microbatches in (1, 5)
]
INTERLEAVED = [
    ("interleaved", Placement(1, grids * interleave, interleave), microbatches, 1)
    for grids, interleave in (((TWO, ONE), 2), ((ONE,) * 3, 3))
    for microbatches in (1, 5)
]
MIRRORED = [
    (name, Placement(1, grids, mirrored=True), 2 * times * size, times)
    for name, times in (("mast", 1), ("basic", 1), ("master", 3))
    for grids, size in (((TWO, ONE), 3), ((ONE, ONE, TWO), 1), ((ONE,) * 4, 1))
]
BY_SAMPLES = [
    (name, Placement(1, grids, batch=batch), 5, 1)
    for name in ("gpipe", "1f1b")
    for grids, batch in (((TWO, ONE), (1, 2)), ((ONE,) * 3, (1, 3, 2)))
]
BY_CHANNELS = [
    (name, Placement(1, grids, tensor=tensor), 5, 1)
    for name in ("gpipe", "1f1b")
    for grids, tensor in (((TWO, ONE), (1, 3)), ((ONE, TWO), (3, 1)), ((ONE,) * 3, (1, 4, 2)))
]
BY_CHANNELS.append(("mast", Placement(1, (ONE,) * 3, mirrored=True, tensor=(2,) * 3), 4, 1))
CASES = SIMPLE + INTERLEAVED + MIRRORED + BY_SAMPLES + BY_CHANNELS


def name_of(case: tuple[str, Placement, int, int]) -> str:
    name, placement, microbatches, _ = case
    return f"{name}-{placement.describe()}-m{microbatches}"


def borders_of(placement: Placement) -> list[Border]:
    """Between neighbours, and of what skips a stage, as far as there are lanes for them."""
    found = [Border(stage, stage + 1) for stage in range(placement.stages - 1)]
    return found + [Border(stage, stage + 2) for stage in range(min(4, placement.stages - 2))]


Message = tuple[int, Border, str, tuple[int, int], int]
Item = tuple[str, object]


class Ranks:
    """The streams of all ranks, after the host of each has queued a step in them.

    Args:
        samples: of each micro-batch.
        shared: one lane for both directions of a border.
    """

    def __init__(
        self,
        placement: Placement,
        schedule: Schedule,
        lists: Lists,
        samples: list[int],
        shared: bool = False,
    ) -> None:
        self.placement, self.samples, self.shared = placement, samples, shared
        self.lanes = lanes_of(placement, schedule, borders_of(placement), 0)
        self.streams: dict[tuple[int, object], deque[Item]] = {}
        for rank in range(placement.world_size):
            self.queue_step(rank, actions_of(rank, placement, lists))

    def at_work(self, stage: int, microbatch: int, copy: int, tensor: int = 0) -> list[int]:
        """Ranks of a stage that have samples of a micro-batch."""
        ranks, samples = self.placement.ranks(stage, 0, copy, tensor), self.samples[microbatch]
        return [r for n, r in enumerate(ranks) if own_samples(self.placement, stage, n, samples)]

    def given(self, rank: int, action: Action, leaving: bool) -> Iterator[Message]:
        """The messages that an action of a rank sends, or waits for."""
        for (copy, border, direction, pair), ranks in self.lanes.items():
            is_forward = direction == "forward"
            end = border.giver if is_forward == leaving else border.taker
            is_here = rank in ranks and copy == action.copy and end == action.stage
            if is_here and direction == action.kind:
                yield copy, border, direction, pair, action.microbatch

    def put(self, rank: int, stream: object, *items: Item) -> None:
        self.streams.setdefault((rank, stream), deque()).extend(items)

    def lane(self, message: Message) -> object:
        copy, border, direction, pair, _ = message
        return (copy, border) if self.shared else (copy, border, direction, pair)

    def queue_step(self, rank: int, actions: list[Action]) -> None:
        """As `Pipeline.train_step`: the next action is expected before one runs."""
        parts = range(self.placement.most_tensor_parts)
        todo = [
            a
            for a in actions
            if any(rank in self.at_work(a.stage, a.microbatch, a.copy, n) for n in parts)
        ]
        numbers, left = count(), []
        coming = deque(todo)

        def expect(computed: Item) -> None:
            for message in self.given(rank, coming[0], leaving=False) if coming else ():
                self.put(rank, self.lane(message), computed, ("message", message))

        computed: Item = ("done", (rank, next(numbers)))
        self.put(rank, "compute", computed)
        expect(("wait", computed[1]))
        for action in todo:
            coming.popleft()
            expect(("wait", computed[1]))
            arriving = list(self.given(rank, action, leaving=False))
            self.put(rank, "compute", *(("wait", (rank, message)) for message in arriving))
            computed = ("done", (rank, next(numbers)))
            self.put(rank, "compute", computed)
            for message in self.given(rank, action, leaving=True):
                self.put(rank, self.lane(message), ("wait", computed[1]), ("message", message))
                left.append(message)
        self.put(rank, "compute", *(("wait", (rank, message)) for message in left))

    def peers(self, rank: int, message: Message) -> list[int]:
        copy, border, _, pair, microbatch = message
        ends = [
            self.at_work(stage, microbatch, copy, tensor)
            for stage, tensor in zip(border, pair, strict=True)
        ]
        return ends[1] if rank in ends[0] else ends[0]

    def run(self) -> list[tuple[int, object]]:
        """Let all streams go on as far as they can; those that do not come to their end."""
        over: set[object] = set()
        met: set[tuple[Message, int, int]] = set()
        moved = True
        while moved:
            moved = False
            for (rank, stream), items in self.streams.items():
                while items and self.is_over(rank, stream, items[0], over, met):
                    kind, what = items.popleft()
                    over.add((rank, what) if kind == "message" else what)
                    moved = True
        return [key for key, items in self.streams.items() if items]

    def is_over(
        self,
        rank: int,
        stream: object,
        item: Item,
        over: set[object],
        met: set[tuple[Message, int, int]],
    ) -> bool:
        kind, what = item
        if kind != "message":
            return kind == "done" or what in over
        message: Message = what  # type: ignore[assignment]
        for peer in self.peers(rank, message):
            first = next(iter(self.streams.get((peer, stream), ())), None)
            is_met = (message, rank, peer) in met
            if is_met or first is None or first[0] != "message":
                continue
            other: Message = first[1]  # type: ignore[assignment]
            is_for_me = rank in self.peers(peer, other) and (other, peer, rank) not in met
            if other[:4] == message[:4] and is_for_me:  # NCCL would take the one for the other
                assert other == message, f"rank {rank} is at {message}, rank {peer} at {other}"
                met |= {(message, rank, peer), (message, peer, rank)}
        return all((message, rank, peer) in met for peer in self.peers(rank, message))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_all_messages_of_a_step_meet(case: tuple[str, Placement, int, int]) -> None:
    """In training and in evaluation, also where some ranks have no samples, or a micro-batch."""
    name, placement, microbatches, times = case
    schedule = make_schedule(name, placement, microbatches, times)
    assert keeps_order(schedule.train)
    assert keeps_order(schedule.evaluate)
    for lists in (schedule.train, schedule.evaluate):
        for samples in ([3] * microbatches, [(m + 1) % 3 for m in range(microbatches)]):
            ranks = Ranks(placement, schedule, lists, samples)
            assert ranks.lanes
            assert ranks.run() == []


def test_one_lane_for_both_directions_waits_for_ever() -> None:
    placement = Placement(1, (ONE, ONE))
    schedule = make_schedule("1f1b", placement, 3)
    stuck = Ranks(placement, schedule, schedule.train, [1] * 3, shared=True).run()
    assert {rank for rank, _ in stuck} == {0, 1}


def test_what_overtakes_has_no_lanes() -> None:
    placement = Placement(1, (ONE, ONE))
    forwards = [[Action("forward", stage, m) for m in range(2)] for stage in range(2)]
    crossed = [forwards[0], forwards[1][::-1]]
    assert lanes_of(placement, Schedule(forwards, forwards, 2), borders_of(placement), 0)
    for train, evaluate in ((crossed, forwards), (forwards, crossed)):
        schedule = Schedule(train, evaluate, 2)
        assert not lanes_of(placement, schedule, borders_of(placement), 0)


def test_each_direction_of_each_border_of_each_copy_has_a_lane() -> None:
    """Those of a replica; senders come first, whichever way gradients go."""
    placement = Placement(2, (TWO, ONE), mirrored=True)
    schedule = make_schedule("basic", placement, 2)
    border = Border(0, 1)
    assert lanes_of(placement, schedule, [border], 1) == {
        (0, border, "forward", (0, 0)): [3, 4, 5],
        (0, border, "backward", (0, 0)): [3, 4, 5],
        (1, border, "forward", (0, 0)): [5, 4, 3],
        (1, border, "backward", (0, 0)): [5, 4, 3],
    }


def test_ranks_that_divide_channels_give_and_get_each_thing_once() -> None:
    placement = Placement(1, (ONE, ONE), tensor=(2, 3))
    schedule = make_schedule("gpipe", placement, 2)
    border = Border(0, 1)
    assert lanes_of(placement, schedule, [border], 0) == {
        (0, border, "forward", (0, 0)): [0, 2],
        (0, border, "forward", (1, 1)): [1, 3],
        (0, border, "forward", (0, 2)): [0, 4],
        (0, border, "backward", (0, 0)): [0, 2],
        (0, border, "backward", (1, 1)): [1, 3],
    }


def test_ranks_that_hold_both_stages_need_tags_and_so_do_too_many_borders() -> None:
    placement = Placement(1, (ONE,) * 4, 2)
    schedule = make_schedule("interleaved", placement, 4)
    borders = borders_of(placement)
    assert Border(0, 2) in borders
    assert {border for _, border, *_ in lanes_of(placement, schedule, borders, 0)} == {
        Border(stage, stage + 1) for stage in range(3)
    }
    stages = MOST_LANES // 2 + 2
    placement = Placement(1, (ONE,) * stages, stages // 2)
    schedule = make_schedule("interleaved", placement, 2)
    borders = [Border(stage, stage + 1) for stage in range(stages - 1)]
    assert len(lanes_of(placement, schedule, borders[:-1], 0)) == MOST_LANES
    assert not lanes_of(placement, schedule, borders, 0)


# --- stage groups


FIRST = SimpleNamespace(channels=0)  # a mesh


def test_ranks_with_two_stages_meet_in_one_order():
    """A rank has its stages copy by copy, another one the other way round: they would hang."""
    asked = []
    comm = SimpleNamespace(subset=lambda ranks: asked.append(ranks) or len(asked))
    placement = Placement(1, (ONE,) * 4, mirrored=True)
    for stages in ((1, 2), (2, 1)):
        asked.clear()
        stage_groups(placement, dict.fromkeys(stages, FIRST), comm)
        assert asked == [[1, 2], [1, 2]]
    placement = Placement(1, (TWO, ONE), mirrored=True)
    found = stage_groups(placement, dict.fromkeys((1, 0), FIRST), comm)
    assert asked[2:] == [[0, 1, 2], [0, 2]]
    assert list(found) == [0, 1]
