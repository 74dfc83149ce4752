"""Hand-over between pipeline stages: a repartition from N ranks to M other ranks.

The two sides start its messages at different times; a rank that knows its next input posts the
receive early, so that messages arrive while it still computes. Backward is the adjoint, times
(ranks of the sender / ranks of the receiver): each stage's objective is the mean over its ranks,
and both stages must have the same learning rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange, Route
from spatialdl.comm.communicator import Communicator, UnderWay
from spatialdl.comm.device_transport import Lane
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import add_up, rooms_back
from spatialdl.comm.waiting import noted
from spatialdl.layout.layout import Box, Layout, empty_box

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class HandoverShape:
    """Tensor that passes between two stages for a micro-batch; known to both sides in advance.

    Attributes:
        shape: global shape.
        sender, receiver: layouts on the two stages: of images, or of (samples, elements of a
            sample) for other tensors. With a layout of one part every rank of the stage has a copy.
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
        """Shape of one rank's part."""
        samples, *spatial = layout.boxes[part if len(layout.boxes) > 1 else 0].shape
        if self._is_image:
            return (samples, *self.shape[1 : -len(spatial)], *spatial)
        return (samples, *self.shape[1:]) if self.shape else ()

    def boxed(self, local: Tensor) -> Tensor:
        """One rank's part as (N, ..., *spatial), so that boxes apply to it."""
        if self._is_image:
            return local
        return local.contiguous().view(len(local) if self.shape else 1, *self.sender.size)


@lru_cache(maxsize=4096)
def _plan(what: HandoverShape, senders: int, receivers: int, me: int) -> Plan:
    """Plan over [*senders, *receivers]; of equal copies the first is sent."""
    nothing = empty_box(len(what.sender.size))
    sent, received = what.sender.boxes, what.receiver.boxes
    owned = (*sent, *(nothing,) * (senders + receivers - len(sent)))
    needed: tuple[Box, ...] = received * receivers if len(received) == 1 else received
    return Plan(owned, (*(nothing,) * senders, *needed), me)


class _Arriving(NamedTuple):
    """A posted receive.

    Attributes:
        tile: the result.
        rooms: in backward, separate buffers of the messages, because they overlap in the tile.
    """

    tile: Tensor
    rooms: list[BoxedTensor]
    messages: UnderWay


@dataclass
class Handover:
    """One rank's side of the border between a stage and the next.

    Args:
        comm: contains both stages.
        senders: ranks of the sending stage, in the order of its parts.
        receivers: ranks of the receiving stage.
        me: index of this rank in ``[*senders, *receivers]``.
        tag: number of this border, below `tags`; differs between borders of the same ranks.
        lanes: for accelerator tensors, if both sides process micro-batches in the same order:
            avoids host synchronisation.
    """

    comm: Communicator
    senders: Sequence[int]
    receivers: Sequence[int]
    me: int
    tag: int
    tags: int
    lanes: Mapping[Direction, Lane] = field(default_factory=dict)
    _leaving: dict[int, list[UnderWay]] = field(default_factory=dict)
    _arriving: dict[int, deque[_Arriving]] = field(default_factory=dict)

    def send(self, tile: Tensor, what: HandoverShape, microbatch: int) -> None:
        """Sender, forward: start to send this rank's tile; does not block.

        Raises:
            TypeError: if its dtype differs from the receiver's.
        """
        if tile.dtype != what.dtype:
            raise TypeError(
                f"a stage outputs {tile.dtype} of {tuple(tile.shape)}, but the next stage expects "
                f"{what.dtype}: the dtype must not depend on data or on training"
            )
        plan, tile = self._plan(what), tile.detach()
        if "forward" in self.lanes:  # a network may output host tensors
            tile = tile.to(self.lanes["forward"].device, non_blocking=True)
        self._leave(plan, BoxedTensor(what.boxed(tile), plan.own), microbatch, "forward")

    def expect(self, what: HandoverShape, microbatch: int, device: torch.device) -> None:
        """Receiver, forward: post the receive from the previous stage; does not block.

        Receives of a micro-batch complete in the order in which they were posted.
        """
        plan = self._plan(what)
        shape = what.local_shape(what.receiver, self.me - len(self.senders))
        tile = torch.empty(shape, dtype=what.dtype, device=device)
        self._expect(plan, tile, [BoxedTensor(what.boxed(tile), plan.need)], microbatch, "forward")

    def receive(self, what: HandoverShape, microbatch: int, device: torch.device) -> Tensor:
        """Receiver, forward: this rank's part of the previous stage's output."""
        if not self._arriving.get(self._tag(microbatch, "forward")):
            self.expect(what, microbatch, device)
        return self._arrived(microbatch, "forward").tile

    def send_back(self, grad: Tensor, what: HandoverShape, microbatch: int) -> None:
        """Receiver, backward: start to send the gradient of its part."""
        plan = self._plan(what)
        self._leave(plan, BoxedTensor(what.boxed(grad), plan.need), microbatch, "backward")

    def expect_back(self, what: HandoverShape, microbatch: int, device: torch.device) -> None:
        """Sender, backward: post the receive of its tile's gradient; does not block."""
        plan, shape = self._plan(what), what.local_shape(what.sender, self.me)
        tile = torch.zeros(shape, dtype=what.dtype, device=device)
        rooms = rooms_back(what.boxed(tile), plan)
        self._expect(plan, tile, rooms, microbatch, "backward")

    def receive_back(self, what: HandoverShape, microbatch: int, device: torch.device) -> Tensor:
        """Sender, backward: gradient of its tile."""
        if not self._arriving.get(self._tag(microbatch, "backward")):
            self.expect_back(what, microbatch, device)
        grad, rooms, _ = self._arrived(microbatch, "backward")
        # the gradient implies that the next stage has received the tile
        self._wait(self._tag(microbatch, "forward"))
        add_up(what.boxed(grad), self._plan(what), rooms)
        if len(self.senders) != len(self.receivers):
            grad.mul_(len(self.senders) / len(self.receivers))
        return grad

    def wait_sent(self) -> None:
        """Wait until all sends are complete, at the end of a step."""
        for tag in list(self._leaving):
            self._wait(tag)

    def _wait(self, tag: int) -> None:
        for messages in self._leaving.pop(tag, ()):
            noted("completion of sends", None, messages.wait)

    def _plan(self, what: HandoverShape) -> Plan:
        return _plan(what, len(self.senders), len(self.receivers), self.me)

    def _leave(self, plan: Plan, held: BoxedTensor, microbatch: int, direction: Direction) -> None:
        self._release_sent()
        messages = self._messages(plan, [held], [], held.tensor.device, microbatch, direction)
        self._leaving.setdefault(self._tag(microbatch, direction), []).append(messages)

    def _release_sent(self) -> None:
        """Drop completed sends, which would keep all micro-batches until the end of the step."""
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
    ) -> UnderWay:
        lane = self.lanes.get(direction)
        # lanes match messages by order
        tag = self._tag(0 if lane else microbatch, direction)
        route = Route((*self.senders, *self.receivers), tag)
        is_adjoint = direction == "backward"
        what = "hand-over" if receives else "completion of hand-over"
        name = f"{what} {direction} of micro-batch {microbatch}"
        exchange = Exchange(plan, sends, receives, device, is_adjoint, route, name)
        comm: Communicator = lane or self.comm  # type: ignore[assignment]
        return start_exchange(comm, exchange)

    def _tag(self, microbatch: int, direction: Direction) -> int:
        return (microbatch * 2 + (direction == "backward")) * self.tags + self.tag
