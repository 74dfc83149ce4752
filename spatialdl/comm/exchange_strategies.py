"""Exchange strategies over MPI, and a measurement of the fastest.

One neighbourhood collective, one message for each piece from and into its own memory, or one
message for each packed piece. The fastest depends on the MPI library and the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.boxed import Exchange, owners_of, pieces_of
from spatialdl.comm.communicator import Message, Messages
from spatialdl.comm.plan import Piece, Plan
from spatialdl.comm.waiting import noted
from spatialdl.layout.layout import Box

TAG = 32767
"""Tag of exchange messages: the largest that the MPI standard guarantees."""

TRIALS, IN_A_ROW = 5, 4
"""Repetitions for each strategy, and exchanges per timing: single exchanges are too noisy."""

CLEARLY = 0.9
"""A strategy other than the first is chosen only below this fraction of its time."""


class Neighbours(MPI.Intracomm):
    """Ranks of MPI, their world ranks, and their neighbours in a plan."""

    @cached_property
    def world_ranks(self) -> tuple[int, ...]:
        """World ranks of all ranks, for messages."""
        here, world = self.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = here.Translate_ranks(range(here.size), world)
        here.Free()
        world.Free()
        return tuple(ranks)

    @cached_property
    def _graphs(self) -> dict[tuple[bytes, bool], MPI.Distgraphcomm]:
        return {}

    def graph(self, plan: Plan, adjoint: bool) -> MPI.Distgraphcomm:
        """Communicator in which a rank's neighbours are the plan's peers.

        One per set of neighbours, because MPI libraries have few context ids. Creation depends on
        the whole plan only, so it is collective.
        """
        key = (plan.graph, adjoint)
        if key not in self._graphs:
            sends, receives = pieces_of(plan, adjoint)
            sources, targets = [p.peer for p in receives], [p.peer for p in sends]
            make = self.Create_dist_graph_adjacent
            self._graphs[key] = noted(
                "creation of a neighbourhood", self.world_ranks, make, sources, targets
            )
        return self._graphs[key]


Strategy = Callable[[Neighbours, Exchange], Messages]


def by_neighbours(comm: Neighbours, exchange: Exchange) -> Messages:
    """One collective among the plan's peers.

    Optimised for few Python steps, which dominate its overhead over a hand-written exchange.
    """
    key, bases = _described(exchange)
    outgoing, incoming = _both_sides(key)
    request = comm.graph(exchange.plan, exchange.adjoint).Ineighbor_alltoallw(
        _absolute(outgoing, bases), _absolute(incoming, bases)
    )
    return Messages([under_way(request)], keep=exchange)


def _absolute(messages: tuple[_Message, ...], bases: list[int]) -> list[Any]:
    """Messages as arguments of the collective, with absolute addresses."""
    addresses = [bases[message.tensor] + message.offset for message in messages]
    types = [message.datatype for message in messages]
    return [MPI.BOTTOM, [1] * len(messages), addresses, types]


def by_messages(comm: Neighbours, exchange: Exchange) -> Messages:
    """One message for each piece, from and into its own memory."""
    key, bases = _described(exchange)
    outgoing, incoming = _both_sides(key)
    ranks, tag = exchange.route or (range(comm.size), TAG)
    memory = MPI.buffer.fromaddress
    requests = [
        under_way(start([memory(bases[tensor] + at, span), 1, kind], ranks[peer], tag), ranks[peer])
        for start, messages in ((comm.Irecv, incoming), (comm.Isend, outgoing))
        for tensor, at, span, kind, peer in messages
    ]
    return Messages(requests, keep=exchange)


def by_packing(comm: Neighbours, exchange: Exchange) -> Messages:
    """One message for each piece, packed into contiguous memory."""
    views, packed = exchange.landing(), [view.contiguous() for view in exchange.leaving()]
    buffers = [torch.empty(view.shape, dtype=view.dtype) for view in views]
    requests = [
        under_way(start([buffer(room), MPI.BYTE], piece.peer, TAG), piece.peer)
        for start, rooms, pieces in (
            (comm.Irecv, buffers, exchange.incoming),
            (comm.Isend, packed, exchange.outgoing),
        )
        for room, piece in zip(rooms, pieces, strict=True)
    ]
    return Messages(requests, list(zip(views, buffers, strict=True)), packed)


STRATEGIES: dict[str, Strategy] = {
    "a message for each piece": by_messages,
    "neighbourhood collective": by_neighbours,
    "packed pieces": by_packing,
}


def fastest(comm: Neighbours, exchange: Exchange) -> str:
    """Fastest strategy for this exchange, by trial; collective, the same result on all ranks."""
    own: list[list[float]] = [[] for _ in STRATEGIES]
    for trial in range(1 + TRIALS):  # interleaved, so that a disturbance affects all of them
        for number, strategy in enumerate(STRATEGIES.values()):
            started = time.perf_counter()
            for _ in range(IN_A_ROW):
                strategy(comm, exchange).wait()
            if trial > 0:  # the first sets up connections and datatypes
                own[number].append(time.perf_counter() - started)
    medians = comm.allgather([statistics.median(times) for times in own])
    slowest = [max(times) for times in zip(*medians, strict=True)]
    first, *rest = zip(slowest, STRATEGIES, strict=True)
    best = min(rest)
    return best[1] if best[0] < CLEARLY * first[0] else first[1]


def under_way(request: MPI.Request, peer: int | None = None) -> Message:
    """Message of an MPI request to or from a peer."""
    return request.Wait, request.Test, peer


class _Message(NamedTuple):
    """Location of a piece, relative to the tensor that holds it.

    Attributes:
        tensor: index among the tensors of an exchange.
        offset, span: bytes from its first element, and number of bytes.
    """

    tensor: int
    offset: int
    span: int
    datatype: MPI.Datatype
    peer: int


def _described(exchange: Exchange) -> tuple[tuple[Any, ...], list[int]]:
    """An exchange without addresses, as the key of `_both_sides`; and the addresses."""
    key: list[object] = [exchange.plan, exchange.adjoint, len(exchange.sends)]
    bases = []
    for tensor, box in (*exchange.sends, *exchange.receives):
        bases.append(tensor.data_ptr())
        key += (box, tensor.shape, tensor.stride(), tensor.dtype)
    return tuple(key), bases


@lru_cache(maxsize=4096)
def _both_sides(key: tuple[Any, ...]) -> tuple[tuple[_Message, ...], tuple[_Message, ...]]:
    """Sent and received messages, with tensors numbered over both.

    Cached for each plan and memory layout of tensors: a repeated exchange needs no slicing.

    Args:
        key: plan, adjoint, number of tensors to send, then of each tensor its box, shape,
            strides and dtype.
    """
    plan, adjoint, sent, *rest = key
    described = [tuple(rest[i : i + 3]) for i in range(0, len(rest), 4)]
    itemsize = rest[3].itemsize if rest else 1
    sends, receives = pieces_of(plan, adjoint)
    return (
        _messages(sends, described[:sent], 0, itemsize),
        _messages(receives, described[sent:], sent, itemsize),
    )


def _messages(
    pieces: tuple[Piece, ...],
    described: Sequence[tuple[Box, tuple[int, ...], tuple[int, ...]]],
    first_tensor: int,
    itemsize: int,
) -> tuple[_Message, ...]:
    messages = []
    inside = owners_of(pieces, tuple(box for box, _, _ in described))
    for piece, tensor in zip(pieces, inside, strict=True):
        box, shape, strides = described[tensor]
        samples, *spatial = piece.box.slices_in(box)
        starts = [samples.start, *(0,) * (len(shape) - len(box)), *(s.start for s in spatial)]
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        sizes = (piece.box.shape[0], *shape[1 : -len(spatial)], *piece.box.shape[1:])
        last = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        span = 0 if 0 in sizes else last + 1  # nothing is sent without channels or samples
        datatype = strided_type(sizes, strides, itemsize)
        place = (first_tensor + tensor, first * itemsize, span * itemsize)
        messages.append(_Message(*place, datatype, piece.peer))
    return tuple(messages)


# --- datatypes: strided views are sent and received without packing. Elements travel in the logical
# order of the dims, not in memory order, so that a channels-last tile matches a contiguous one.
# Moves depend on the size of an element only, so bfloat16 and bool are supported.


def mpi_type(view: Tensor) -> MPI.Datatype:
    """Committed datatype that describes `view` relative to its first element."""
    return strided_type(tuple(view.shape), tuple(view.stride()), view.element_size())


@lru_cache(maxsize=4096)
def strided_type(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> MPI.Datatype:
    """`mpi_type` from shape, strides in elements and itemsize in bytes."""
    datatype = MPI.BYTE.Create_contiguous(itemsize)
    for count, stride in reversed(_merge(shape, strides)):
        if stride * itemsize == datatype.extent:
            datatype = datatype.Create_contiguous(count)
        else:
            datatype = datatype.Create_hvector(count, 1, stride * itemsize)
    return datatype.Commit()


def _merge(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(count, stride) per dim in logical order, with contiguous dims merged."""
    merged: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if merged and merged[-1][1] == count * stride:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    return merged


def reduction_type(tensor: Tensor) -> MPI.Datatype:
    """MPI type to sum `tensor` with.

    Raises:
        TypeError: for dtypes that MPI cannot sum (half precision).
    """
    types = {
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.int64: MPI.INT64_T,
        torch.int32: MPI.INT32_T,
        torch.uint8: MPI.UINT8_T,
    }
    if tensor.dtype not in types:
        raise TypeError(f"MPI cannot sum {tensor.dtype}; convert to float32 first")
    return types[tensor.dtype]


def buffer(tensor: Tensor) -> MPI.buffer:
    """Memory of a contiguous CPU tensor, for mpi4py."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
