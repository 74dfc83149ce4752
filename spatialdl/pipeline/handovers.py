"""Hand-overs of activations and gradients between stages, on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import device_path
from spatialdl.comm.device_transport import Lane
from spatialdl.comm.handover import DIRECTIONS, Direction, Handover
from spatialdl.layout.placement import Placement, Position
from spatialdl.pipeline.shapes import Border
from spatialdl.pipeline.simulate import Kind, Lists, Schedule

MOST_LANES = 16
"""Maximum lanes of a rank: PyTorch has 32 streams for all groups; lanes must not share one."""

_Pair = tuple[int, int]
"""Index of the channel part at the giver and at the taker."""

_Key = tuple[int, Border, Direction, _Pair]


class StageLink(NamedTuple):
    """One rank's side of a border, where each stage may divide channels over several ranks.

    What passes is whole, and identical on the ranks that divide the channels of a part. So each
    rank of the taker receives from one rank of the giver, and each rank of the giver receives the
    gradient from one rank of the taker.

    Attributes:
        forward: all hand-overs to send by, at the giver; the one to receive by, at the taker.
        backward: all to send gradients by, at the taker; the one to receive by, at the giver.
    """

    forward: tuple[Handover, ...]
    backward: tuple[Handover, ...]


class Handovers:
    """Links of this rank over the borders of a network.

    Args:
        comm: all ranks of the placement; construction is collective.
        borders: all over which tensors pass.
        device: of the tensors.
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

    def at(self, position: Position) -> dict[Border, StageLink]:
        """The links of a stage, by border."""
        return {
            border: self._link(position, border)
            for border in self.borders
            if position.stage in border
        }

    def _link(self, position: Position, border: Border) -> StageLink:
        side = border.index(position.stage)
        own = {
            direction: [
                pair
                for pair in _pairs(self._placement, border, direction)
                if pair[side] == position.tensor
            ]
            for direction in DIRECTIONS
        }
        made = {
            pair: self._handover(position, border, pair)
            for pair in dict.fromkeys(pair for pairs in own.values() for pair in pairs)
        }
        forward, backward = (
            tuple(made[pair] for pair in own[direction]) for direction in DIRECTIONS
        )
        return StageLink(forward, backward)

    def _handover(self, position: Position, border: Border, pair: _Pair) -> Handover:
        replica, stage, part, copy, _ = position
        senders, receivers = _sides(self._placement, border, pair, replica, copy)
        me = part if stage == border.giver else len(senders) + part
        lanes: dict[Direction, Lane] = {
            direction: self._lanes[copy, border, direction, pair]
            for direction in DIRECTIONS
            if (copy, border, direction, pair) in self._lanes
        }
        tag, tags = self.borders.index(border), len(self.borders)
        return Handover(self._comm, senders, receivers, me, tag, tags, lanes)


def _pairs(placement: Placement, border: Border, direction: Direction) -> list[_Pair]:
    """Pairs of channel parts that communicate across a border."""
    giving, taking = (placement.tensor_parts(stage) for stage in border)
    if direction == "forward":
        return [(taker % giving, taker) for taker in range(taking)]
    return [(giver, giver % taking) for giver in range(giving)]


def _sides(
    placement: Placement, border: Border, pair: _Pair, replica: int, copy: int
) -> tuple[Sequence[int], Sequence[int]]:
    senders, receivers = (
        placement.ranks(stage, replica, copy, tensor)
        for stage, tensor in zip(border, pair, strict=True)
    )
    return senders, receivers


def lanes_of(
    placement: Placement, schedule: Schedule, borders: Sequence[Border], replica: int
) -> Mapping[_Key, list[int]]:
    """The ranks of each lane of a replica, in creation order.

    Empty if the schedule lets micro-batches overtake each other, or a rank exceeds `MOST_LANES`.
    """
    if not (keeps_order(schedule.train) and keeps_order(schedule.evaluate)):
        return {}
    lanes: dict[_Key, list[int]] = {}
    for copy, border, direction in product(range(placement.copies), borders, DIRECTIONS):
        for pair in _pairs(placement, border, direction):
            senders, receivers = _sides(placement, border, pair, replica, copy)
            if not set(senders) & set(receivers):  # a rank in both would wait for itself
                lanes[copy, border, direction, pair] = [*senders, *receivers]
    per_rank = Counter(rank for ranks in lanes.values() for rank in ranks)
    return lanes if max(per_rank.values(), default=0) <= MOST_LANES else {}


def keeps_order(lists: Lists) -> bool:
    """Whether all stages run forwards in one order, and backwards in one order."""
    orders: dict[tuple[Kind, int], dict[int, list[int]]] = {}
    for actions in lists:
        for kind, stage, microbatch, copy in actions:
            orders.setdefault((kind, copy), {}).setdefault(stage, []).append(microbatch)
    return all(
        len({tuple(order) for order in by_stage.values()}) == 1 for by_stage in orders.values()
    )
