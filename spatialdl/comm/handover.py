"""Hand-over between pipeline stages: a repartition from N ranks to M other ranks.

Messages are point-to-point and nonblocking, tagged by stage and micro-batch, because the two sides
come to them at different times; a rank that knows what it will be given next is ready for it
before, so that the message may land while it still works. Backward is the adjoint, times (ranks of
the sender / ranks of the receiver): each stage's objective is the mean over its own ranks, and both
must learn at one rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from spatialdl.comm import check, trace
from spatialdl.comm.communicator import Communicator, Pending, Sending
from spatialdl.comm.plan import Piece, Plan
from spatialdl.comm.repartition import shape_of, view_of
from spatialdl.comm.waiting import noted
from spatialdl.errors import CommMismatch
from spatialdl.parallel.layout import Box, Layout, empty_box


@dataclass(frozen=True)
class HandoverShape:
    """What passes between two stages for a micro-batch: known to both sides beforehand.

    Attributes:
        shape: global shape.
        sender: layout of an image on the sending stage; None for a tensor of which every sending
            rank holds the same copy.
        receiver: layout on the receiving stage; None: every receiving rank gets all of it.
        by_sample: whether layouts cut the first dim of a tensor that is no image; they are those
            of (samples, elements of a sample).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sender: Layout | None
    receiver: Layout | None
    by_sample: bool = False

    def local_shape(self, layout: Layout | None, part: int) -> tuple[int, ...]:
        """The shape of what one rank holds."""
        if layout is None:
            return self.shape
        samples, *spatial = layout.boxes[part].shape
        if self.by_sample:
            return (samples, *self.shape[1:])
        return (samples, *self.shape[1 : -len(spatial)], *spatial)

    def boxes(self, layout: Layout | None, ranks: int, copies: bool) -> tuple[Box, ...]:
        """Boxes per rank; of equal copies, the first one is sent."""
        if layout is not None:
            return layout.boxes
        whole = self.flat_box
        return (whole,) * ranks if copies else (whole, *(self.nothing,) * (ranks - 1))

    @property
    def is_image(self) -> bool:
        return not self.by_sample and (self.sender is not None or self.receiver is not None)

    @property
    def flat_box(self) -> Box:
        """The box of everything: of the image, or of the tensor seen as signals."""
        layout = self.sender or self.receiver
        if self.by_sample:
            return Box(((0, self.shape[0]), (0, prod(self.shape[1:]))))
        if layout is not None:
            return Box(((0, self.shape[0]), *((0, size) for size in layout.size)))
        return Box(((0, 1), (0, prod(self.shape))))

    @property
    def nothing(self) -> Box:
        """The box of a rank that has, or needs, no part of it."""
        return empty_box(len(self.flat_box) - 1)


@dataclass
class _Arriving:
    """Messages that a rank is ready for.

    Attributes:
        tile: what they are for.
        headers, messages: per piece of the plan; headers only if calls are compared.
        pieces: backward, what the messages fill, because they overlap in the tile.
    """

    tile: Tensor
    headers: list[tuple[Tensor, Pending]] = field(default_factory=list)
    messages: list[Pending] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)


@dataclass
class Handover:
    """One rank's side of the border between a stage and the next.

    Args:
        comm: contains both stages.
        senders: ranks of the sending stage, in the order of its parts.
        receivers: ranks of the receiving stage.
        me: index of this rank in ``[*senders, *receivers]``.
        tag: a number for this border, below `tags`; borders between the same ranks differ.
    """

    comm: Communicator
    senders: Sequence[int]
    receivers: Sequence[int]
    me: int
    tag: int
    tags: int
    _pending: dict[int, list[Sending]] = field(default_factory=dict)
    _plans: dict[HandoverShape, Plan] = field(default_factory=dict)
    _arriving: dict[int, deque[_Arriving]] = field(default_factory=dict)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return (*self.senders, *self.receivers)

    def _plan(self, what: HandoverShape) -> Plan:
        if what not in self._plans:
            n, m = len(self.senders), len(self.receivers)
            owned = what.boxes(what.sender, n, copies=False) + (what.nothing,) * m
            needed = (what.nothing,) * n + what.boxes(what.receiver, m, copies=True)
            self._plans[what] = Plan(owned, needed, self.me)
        return self._plans[what]

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
        plan, tile = self._plan(what), _as_boxed(tile.detach(), what)
        for piece in plan.sends:
            self._send(view_of(tile, plan.own, piece.box), piece.peer, microbatch, "forward")

    def expect(self, what: HandoverShape, microbatch: int, device: torch.device) -> None:
        """Receiver, forward: be ready for what the stage before makes; returns at once.

        What a micro-batch is given is received in the order in which it was expected.
        """
        plan = self._plan(what)
        part = self.me - len(self.senders)
        tile = torch.empty(what.local_shape(what.receiver, part), dtype=what.dtype, device=device)
        boxed = _as_boxed(tile, what)
        arriving = _Arriving(tile)
        for piece in plan.receives:
            view = view_of(boxed, plan.need, piece.box)
            self._start(arriving, view, piece.peer, self._tag(microbatch, "forward"))
        self._arriving.setdefault(self._tag(microbatch, "forward"), deque()).append(arriving)

    def receive(self, what: HandoverShape, microbatch: int, device: torch.device) -> Tensor:
        """Receiver, forward: this rank's part of what the stage before made."""
        if not self._arriving.get(self._tag(microbatch, "forward")):
            self.expect(what, microbatch, device)
        return self._land(self._plan(what).receives, microbatch, "forward").tile

    def send_back(self, grad: Tensor, what: HandoverShape, microbatch: int) -> None:
        """Receiver, backward: start to send the gradient of its part."""
        plan, grad = self._plan(what), _as_boxed(grad, what)
        for piece in plan.receives:
            self._send(view_of(grad, plan.need, piece.box), piece.peer, microbatch, "backward")

    def expect_back(self, what: HandoverShape, microbatch: int, device: torch.device) -> None:
        """Sender, backward: be ready for the gradient of its tile; returns at once."""
        plan = self._plan(what)
        shape = what.local_shape(what.sender, self.me)
        arriving = _Arriving(torch.zeros(shape, dtype=what.dtype, device=device))
        boxed = _as_boxed(arriving.tile, what)
        arriving.pieces = [boxed.new_empty(shape_of(boxed, piece.box)) for piece in plan.sends]
        for piece, room in zip(plan.sends, arriving.pieces, strict=True):
            self._start(arriving, room, piece.peer, self._tag(microbatch, "backward"))
        self._arriving.setdefault(self._tag(microbatch, "backward"), deque()).append(arriving)

    def receive_back(self, what: HandoverShape, microbatch: int, device: torch.device) -> Tensor:
        """Sender, backward: the gradient of its tile."""
        if not self._arriving.get(self._tag(microbatch, "backward")):
            self.expect_back(what, microbatch, device)
        plan = self._plan(what)
        arrived = self._land(plan.sends, microbatch, "backward")
        # the stage after has it then, and the tile may go
        self._wait(self._tag(microbatch, "forward"))
        grad = arrived.tile
        boxed = _as_boxed(grad, what)
        for piece, room in zip(plan.sends, arrived.pieces, strict=True):
            view_of(boxed, plan.own, piece.box).add_(room)
        if len(self.senders) != len(self.receivers):
            grad.mul_(len(self.senders) / len(self.receivers))
        return grad

    def wait_sent(self) -> None:
        """Wait until all that was sent has left; the end of a step."""
        with trace.span("hand-over", "until all has left"):
            for tag in list(self._pending):
                self._wait(tag)

    def _others(self) -> list[int]:
        """The ranks on the other side of the border, as the world calls them."""
        others = self.receivers if self.me < len(self.senders) else self.senders
        return [self.comm.world_ranks[rank] for rank in others]

    def _wait(self, tag: int) -> None:
        for sending in self._pending.pop(tag, ()):
            noted("hand-over, until it has left,", self._others, sending.wait)

    def _send(self, view: Tensor, peer: int, microbatch: int, direction: str) -> None:
        self._let_go()
        tag = self._tag(microbatch, direction)
        rank = self._ranks[peer]
        pending = self._pending.setdefault(tag, [])
        if check.enabled():
            header = check.as_tensor(self._text(microbatch, direction))
            pending.append(self.comm.start_send(header, rank, tag))
        pending.append(self.comm.start_send(view, rank, tag))

    def _let_go(self) -> None:
        """Of what has left; or all micro-batches would be kept until the step ends."""
        for tag, sendings in list(self._pending.items()):
            if all(sending.is_done() for sending in sendings):
                del self._pending[tag]

    def _start(self, arriving: _Arriving, view: Tensor, peer: int, tag: int) -> None:
        rank = self._ranks[peer]
        if check.enabled():
            header = check.as_tensor(bytes(check.TEXT_BYTES))
            arriving.headers.append((header, self.comm.start_receive(header, rank, tag)))
        arriving.messages.append(self.comm.start_receive(view, rank, tag))

    def _land(self, pieces: Sequence[Piece], microbatch: int, direction: str) -> _Arriving:
        tag = self._tag(microbatch, direction)
        arriving = self._arriving[tag].popleft()
        if not self._arriving[tag]:
            del self._arriving[tag]
        for number, message in enumerate(arriving.messages):
            rank = self._ranks[pieces[number].peer]
            name = f"{direction} {microbatch} from rank {rank}"
            what = f"hand-over {direction} of micro-batch {microbatch}"
            sender = (self.comm.world_ranks[rank],)
            if arriving.headers:
                header, announced = arriving.headers[number]
                noted(what, sender, announced.wait)
                self._compare(header, rank, microbatch, direction)
            with trace.span("hand-over", name):
                noted(what, sender, message.wait)
        return arriving

    def _compare(self, header: Tensor, rank: int, microbatch: int, direction: str) -> None:
        theirs, mine = bytes(header.numpy()), self._text(microbatch, direction)
        if theirs != mine:
            raise CommMismatch(
                f"ranks do different things: rank {self.comm.rank} expects "
                f"'{check.decode(mine)}', rank {rank} sends '{check.decode(theirs)}'"
            )

    def _text(self, microbatch: int, direction: str) -> bytes:
        return check.encode(f"hand-over {self.tag} {direction} micro-batch {microbatch}")

    def _tag(self, microbatch: int, direction: str) -> int:
        return (microbatch * 2 + (direction == "backward")) * self.tags + self.tag


def _as_boxed(tensor: Tensor, what: HandoverShape) -> Tensor:
    """(N, ..., *spatial) as it is; anything else as signals, so that boxes apply to it."""
    if what.by_sample:
        return tensor.contiguous().view(len(tensor), what.flat_box.shape[1])
    return tensor if what.is_image else tensor.contiguous().view(1, -1)
