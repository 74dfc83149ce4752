"""Streams of keys, with an index for each call: one for `keyed`, one for each mesh."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import noop_context_fn

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.reduce import gather_over_ranks
from spatialdl.comm.replay import aside
from spatialdl.spatial.random.generator import TensorRegion, key_of, signed
from spatialdl.torch_internals import current_graph_task_id


@dataclass
class Stream:
    key: int
    calls: int = 0
    own: range | None = None


class _Thread(threading.local):
    stream: Stream | None = None
    again: int = 0  # depth of open recomputation contexts
    drawn: int = 0  # number of calls so far, over all streams


thread = _Thread()
of_meshes: WeakKeyDictionary[Mesh, Stream] = WeakKeyDictionary()


def next_key(mesh: Mesh | None = None) -> int:
    """Key of the next call.

    Args:
        mesh: mesh of the split image; outside of `keyed` collective over its ranks.

    Raises:
        RuntimeError: in backward without `checkpoint_contexts`, as the mask would differ from that
            of forward. Within `keyed` already in forward.
    """
    if not thread.again and (current_graph_task_id() != -1 or _would_differ()):
        raise RuntimeError(
            "a random mask is drawn in backward, where it would differ from that of forward: "
            "pass context_fn=spatialdl.random.checkpoint_contexts (and use_reentrant=False) to "
            "torch.utils.checkpoint.checkpoint"
        )
    stream = thread.stream
    if stream is None:
        if mesh is None:
            raise RuntimeError("outside of keyed() random numbers are drawn for split images only")
        stream = _stream_of(mesh)
    stream.calls += 1
    thread.drawn += 1
    return key_of(stream.key, stream.calls)


def numbers_drawn() -> int:
    """Number of calls of this thread that have drawn random numbers so far."""
    return thread.drawn


def _would_differ() -> bool:
    """Whether a checkpoint without these contexts would recompute the current call in backward.

    Inspects stack frames: in backward plain tensors draw without a call to this module.
    """
    frame = sys._getframe() if thread.stream is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == noop_context_fn.__module__:
            return frame.f_locals.get("context_fn", noop_context_fn) is noop_context_fn
        frame = frame.f_back
    return False


def _stream_of(mesh: Mesh) -> Stream:
    """Stream of a mesh, with the seed of rank 0; data replicas draw different numbers."""
    if mesh not in of_meshes:
        own = torch.tensor(signed(torch.initial_seed()))
        with aside():
            seed = int(gather_over_ranks(mesh.grid_comm, own, "random seed")[0])
        of_meshes[mesh] = Stream(key_of(seed, mesh.replica))
    return of_meshes[mesh]


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Within `keyed`: count calls from zero for a named part of a network.

    Its numbers then do not depend on earlier parts, for instance on another pipeline stage. The
    name must be unique.
    """
    around = thread.stream
    if around is not None:
        digest = blake2b(name.encode(), digest_size=8).digest()
        thread.stream = Stream(key_of(around.key, int.from_bytes(digest, "big")), own=around.own)
    try:
        yield
    finally:
        thread.stream = around


def full_region(shape: Sequence[int]) -> TensorRegion:
    """Region of a whole tensor; with one row for each own sample, the region of these samples."""
    positions = [torch.arange(size) for size in shape]
    own = thread.stream.own if thread.stream is not None else None
    if own is not None and positions and len(positions[0]) == len(own):
        positions[0] += own.start
    return TensorRegion(tuple(positions), tuple(shape))
