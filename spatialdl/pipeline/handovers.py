"""How what a stage makes gets to the stages after, and gradients back, on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import device_path
from spatialdl.comm.device_transport import Lane
from spatialdl.comm.handover import DIRECTIONS, Direction, Handover
from spatialdl.parallel.placement import Placement, Position
from spatialdl.pipeline.action import Kind, Lists, Schedule
from spatialdl.pipeline.shapes import Border

MOST_LANES = 16
"""Of a rank: PyTorch has 32 streams for all groups, and two in one would wait for each other."""

_Key = tuple[int, Border, Direction]


class Handovers:
    """All borders of a network, of which this rank takes part in some.

    Args:
        comm: all ranks of the placement, which make it together.
        borders: over which something passes.
        device: of what passes.
    """

    def __init__(
        self,
        placement: Placement,
        schedule: Schedule,
        comm: Communicator,
        borders: Sequence[Border],
        device: torch.device,
    ) -> None:
        self._placement, self._comm, self.borders = placement, comm.duplicate(), borders
        self._lanes: dict[_Key, Lane] = {}
        if device.type != "cpu" and device_path().name == "nccl":
            replica = placement.positions(comm.rank)[0].replica
            for key, ranks in lanes_of(placement, schedule, borders, replica).items():
                if comm.rank in ranks:
                    self._lanes[key] = Lane(self._comm, ranks, device)

    def at(self, position: Position) -> dict[Border, Handover]:
        """By border those of a stage."""
        return {
            border: self._handover(position, border, tag)
            for tag, border in enumerate(self.borders)
            if position.stage in border
        }

    def _handover(self, position: Position, border: Border, tag: int) -> Handover:
        replica, stage, part, copy, _ = position
        senders, receivers = (self._placement.ranks(s, replica, copy) for s in border)
        me = part if stage == border.giver else len(senders) + part
        lanes: dict[Direction, Lane] = {
            direction: self._lanes[copy, border, direction]
            for direction in DIRECTIONS
            if (copy, border, direction) in self._lanes
        }
        return Handover(self._comm, senders, receivers, me, tag, len(self.borders), lanes)


def lanes_of(
    placement: Placement, schedule: Schedule, borders: Sequence[Border], replica: int
) -> Mapping[_Key, list[int]]:
    """The ranks of each lane of a replica, in the order in which they are to be made.

    Empty if the schedule lets micro-batches overtake each other, or there would be too many.
    """
    if not (keeps_order(schedule.train) and keeps_order(schedule.evaluate)):
        return {}
    found: dict[_Key, list[int]] = {}
    for copy, border, direction in product(range(placement.copies), borders, DIRECTIONS):
        senders, receivers = (placement.ranks(stage, replica, copy) for stage in border)
        if not set(senders) & set(receivers):  # or it would wait for itself
            found[copy, border, direction] = [*senders, *receivers]
    lanes = Counter(rank for ranks in found.values() for rank in ranks)
    return found if max(lanes.values(), default=0) <= MOST_LANES else {}


def keeps_order(lists: Lists) -> bool:
    """Whether all stages take the micro-batches in one order, and their gradients in one, too."""
    orders: dict[tuple[Kind, int], dict[int, list[int]]] = {}
    for actions in lists:
        for kind, stage, microbatch, copy in actions:
            orders.setdefault((kind, copy), {}).setdefault(stage, []).append(microbatch)
    return all(
        len({tuple(order) for order in by_stage.values()}) == 1
        for (kind, _), by_stage in orders.items()
        if kind != "weight"
    )
