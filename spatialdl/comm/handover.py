"""Hand-over between pipeline stages: a repartition from N ranks to M other ranks.

The two sides come to its messages at different times; a rank that knows what it will be given next
is ready for it before, so that they may land while it still works. Backward is the adjoint, times
(ranks of the sender / ranks of the receiver): each stage's objective is the mean over its own
ranks, and both must learn at one rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm import trace
from spatialdl.comm.boxed import BoxedTensor, Exchange, Route
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_transport import Lane
from spatialdl.comm.exchange import PlanMessages
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import add_up, rooms_back
from spatialdl.comm.waiting import noted
from spatialdl.parallel.layout import Box, Layout, empty_box

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class HandoverShape:
    """What passes between two stages for a micro-batch: known to both sides beforehand.

    Attributes:
        shape: global shape.
        sender, receiver: layouts on the two stages, of images or, of what is none, of (samples,
            elements of a sample). Of a layout of one part every rank of the stage has a copy.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sender: Layout
    receiver: Layout

    @property
    def _is_image(self) -> bool:
        size = self.sender.size
        return len(self.shape) > len(size) and self.shape[-len(size) :] == size

    def local_shape(self, layout: Layout, part: int) -> tuple[int, ...]:
        """The shape of what one rank holds."""
        samples, *spatial = layout.boxes[part if len(layout.boxes) > 1 else 0].shape
        if self._is_image:
            return (samples, *self.shape[1 : -len(spatial)], *spatial)
        return (samples, *self.shape[1:]) if self.shape else ()

    def boxed(self, local: Tensor) -> Tensor:
        """What one rank holds, seen so that boxes apply to it: (N, ..., *spatial)."""
        if self._is_image:
            return local
        return local.contiguous().view(len(local) if self.shape else 1, *self.sender.size)


@lru_cache(maxsize=4096)
def _plan(what: HandoverShape, senders: int, receivers: int, me: int) -> Plan:
    """Among [*senders, *receivers]; of equal copies the first one is sent."""
    nothing = empty_box(len(what.sender.size))
    given, taken = what.sender.boxes, what.receiver.boxes
    owned = (*given, *(nothing,) * (senders + receivers - len(given)))
    needed: tuple[Box, ...] = taken * receivers if len(taken) == 1 else taken
    return Plan(owned, (*(nothing,) * senders, *needed), me)


class _Arriving(NamedTuple):
    """What a rank is ready for.

    Attributes:
        tile: what it is for.
        rooms: backward, what the messages fill, because they overlap in the tile.
    """

    tile: Tensor
    rooms: list[BoxedTensor]
    messages: PlanMessages


@dataclass
class Handover:
    """One rank's side of the border between a stage and the next.

    Args:
        comm: contains both stages.
        senders: ranks of the sending stage, in the order of its parts.
        receivers: ranks of the receiving stage.
        me: index of this rank in ``[*senders, *receivers]``.
        tag: a number for this border, below `tags`; borders between the same ranks differ.
        lanes: for tensors on an accelerator, if both sides take all micro-batches in one order:
            the host does not wait for them then.
    """

    comm: Communicator
    senders: Sequence[int]
    receivers: Sequence[int]
    me: int
    tag: int
    tags: int
    lanes: Mapping[Direction, Lane] = field(default_factory=dict)
    _leaving: dict[int, list[PlanMessages]] = field(default_factory=dict)
    _arriving: dict[int, deque[_Arriving]] = field(default_factory=dict)

    def send(self, tile: Tensor, what: HandoverShape, microbatch: int) -> None:
        """Sender, forward: start to send this rank's tile; returns at once.

        Raises:
            TypeError: if it is of another type than the receiver waits for.
        """
        if tile.dtype != what.dtype:
            raise TypeError(
                f"a stage gives {tile.dtype} of {tuple(tile.shape)}, but the next one waits for "
                f"{what.dtype}: the type must not depend on data or on training"
            )
        plan, tile = self._plan(what), tile.detach()
        if "forward" in self.lanes:  # a network may make tensors on the host
            tile = tile.to(self.lanes["forward"].device, non_blocking=True)
        self._leave(plan, BoxedTensor(what.boxed(tile), plan.own), microbatch, "forward")

    def expect(self, what: HandoverShape, microbatch: int, device: torch.device) -> None:
        """Receiver, forward: be ready for what the stage before makes; returns at once.

        What a micro-batch is given is received in the order in which it was expected.
        """
        plan = self._plan(what)
        shape = what.local_shape(what.receiver, self.me - len(self.senders))
        tile = torch.empty(shape, dtype=what.dtype, device=device)
        self._expect(plan, tile, [BoxedTensor(what.boxed(tile), plan.need)], microbatch, "forward")

    def receive(self, what: HandoverShape, microbatch: int, device: torch.device) -> Tensor:
        """Receiver, forward: this rank's part of what the stage before made."""
        if not self._arriving.get(self._tag(microbatch, "forward")):
            self.expect(what, microbatch, device)
        return self._arrived(microbatch, "forward").tile

    def send_back(self, grad: Tensor, what: HandoverShape, microbatch: int) -> None:
        """Receiver, backward: start to send the gradient of its part."""
        plan = self._plan(what)
        self._leave(plan, BoxedTensor(what.boxed(grad), plan.need), microbatch, "backward")

    def expect_back(self, what: HandoverShape, microbatch: int, device: torch.device) -> None:
        """Sender, backward: be ready for the gradient of its tile; returns at once."""
        plan, shape = self._plan(what), what.local_shape(what.sender, self.me)
        tile = torch.zeros(shape, dtype=what.dtype, device=device)
        rooms = rooms_back(what.boxed(tile), plan)
        self._expect(plan, tile, rooms, microbatch, "backward")

    def receive_back(self, what: HandoverShape, microbatch: int, device: torch.device) -> Tensor:
        """Sender, backward: the gradient of its tile."""
        if not self._arriving.get(self._tag(microbatch, "backward")):
            self.expect_back(what, microbatch, device)
        grad, rooms, _ = self._arrived(microbatch, "backward")
        # the stage after has it then, and the tile may go
        self._wait(self._tag(microbatch, "forward"))
        add_up(what.boxed(grad), self._plan(what), rooms)
        if len(self.senders) != len(self.receivers):
            grad.mul_(len(self.senders) / len(self.receivers))
        return grad

    def wait_sent(self) -> None:
        """Wait until all that was sent has left; the end of a step."""
        with trace.span("hand-over", "until all has left"):
            for tag in list(self._leaving):
                self._wait(tag)

    def _wait(self, tag: int) -> None:
        for messages in self._leaving.pop(tag, ()):
            noted("until it has left", None, messages.wait_unrecorded)

    def _plan(self, what: HandoverShape) -> Plan:
        return _plan(what, len(self.senders), len(self.receivers), self.me)

    def _leave(self, plan: Plan, held: BoxedTensor, microbatch: int, direction: Direction) -> None:
        self._let_go()
        messages = self._messages(plan, [held], [], held.tensor.device, microbatch, direction)
        self._leaving.setdefault(self._tag(microbatch, direction), []).append(messages)

    def _let_go(self) -> None:
        """Of what has left; or all micro-batches would be kept until the step ends."""
        for tag, leaving in list(self._leaving.items()):
            if all(messages.is_done() for messages in leaving):
                del self._leaving[tag]

    def _expect(
        self,
        plan: Plan,
        tile: Tensor,
        rooms: list[BoxedTensor],
        microbatch: int,
        direction: Direction,
    ) -> None:
        messages = self._messages(plan, [], rooms, tile.device, microbatch, direction)
        queue = self._arriving.setdefault(self._tag(microbatch, direction), deque())
        queue.append(_Arriving(tile, rooms, messages))

    def _arrived(self, microbatch: int, direction: Direction) -> _Arriving:
        tag = self._tag(microbatch, direction)
        arriving = self._arriving[tag].popleft()
        if not self._arriving[tag]:
            del self._arriving[tag]
        arriving.messages.wait()
        return arriving

    def _messages(
        self,
        plan: Plan,
        sends: list[BoxedTensor],
        receives: list[BoxedTensor],
        device: torch.device,
        microbatch: int,
        direction: Direction,
    ) -> PlanMessages:
        lane = self.lanes.get(direction)
        # in a lane nothing overtakes, nor what is said of it if the check is on
        tag = self._tag(0 if lane else microbatch, direction)
        route = Route((*self.senders, *self.receivers), tag)
        is_adjoint = direction == "backward"
        exchange = Exchange(plan, sends, receives, device, is_adjoint, route)
        name = f"hand-over {direction} of micro-batch {microbatch}"
        return PlanMessages(self.comm, exchange, name, lane.start_exchange if lane else None)

    def _tag(self, microbatch: int, direction: Direction) -> int:
        return (microbatch * 2 + (direction == "backward")) * self.tags + self.tag
