"""Which number of call it is: streams of keys, one for what is `keyed`, one for each mesh."""

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
from spatialdl.random.generator import TensorRegion, key_of, signed


@dataclass
class Stream:
    key: int
    calls: int = 0
    own: range | None = None


class _Thread(threading.local):
    stream: Stream | None = None
    again: int = 0  # contexts open in which a part of the network runs again
    drawn: int = 0  # calls so far, of all streams


thread = _Thread()
of_meshes: WeakKeyDictionary[Mesh, Stream] = WeakKeyDictionary()


def next_key(mesh: Mesh | None = None) -> int:
    """The key of the next call.

    Args:
        mesh: of the split image; outside of `keyed` all its ranks must call this alike.

    Raises:
        RuntimeError: in backward, outside of what `checkpoint_contexts` restores: the mask would
            not be that of forward. Within `keyed` already in forward.
    """
    if not thread.again and (torch._C._current_graph_task_id() != -1 or _would_differ()):
        raise RuntimeError(
            "a random mask is drawn during backward, where it would differ from that of forward: "
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
    """How many calls of this thread have drawn random numbers so far."""
    return thread.drawn


def _would_differ() -> bool:
    """Does a checkpoint that knows nothing of `keyed` run what draws now once more in backward?

    Seen from its frames: in backward plain tensors draw without asking here.
    """
    frame = sys._getframe() if thread.stream is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == noop_context_fn.__module__:
            return frame.f_locals.get("context_fn", noop_context_fn) is noop_context_fn
        frame = frame.f_back
    return False


def _stream_of(mesh: Mesh) -> Stream:
    """Ranks agree on a seed once: that of rank 0; data replicas draw numbers of their own."""
    if mesh not in of_meshes:
        own = torch.tensor(signed(torch.initial_seed()))
        with aside():
            seed = int(gather_over_ranks(mesh.grid_comm, own, "random seed")[0])
        of_meshes[mesh] = Stream(key_of(seed, mesh.replica))
    return of_meshes[mesh]


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Within `keyed`: count calls from zero for a named part of a network.

    Its numbers then do not depend on what ran before it, for instance on another pipeline stage.
    Give each part a name of its own.
    """
    around = thread.stream
    if around is not None:
        digest = blake2b(name.encode(), digest_size=8).digest()
        thread.stream = Stream(key_of(around.key, int.from_bytes(digest, "big")), own=around.own)
    try:
        yield
    finally:
        thread.stream = around


def whole(shape: Sequence[int]) -> TensorRegion:
    """All of a tensor; of one with a number for each own sample, these, see `keyed`."""
    positions = [torch.arange(size) for size in shape]
    own = thread.stream.own if thread.stream is not None else None
    if own is not None and positions and len(positions[0]) == len(own):
        positions[0] += own.start
    return TensorRegion(tuple(positions), tuple(shape))
