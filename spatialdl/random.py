"""Random numbers that are the same picture in every layout.

A number is a function of (seed, step, micro-batch, number of the call, place in the whole tensor),
and of nothing else: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", 2014), whose state of place i is simply ``key + i * gamma``. So a rank draws the
numbers of its own pixels alone, and PyTorch's default generator is never touched.

    with spatialdl.random.keyed(seed, step, microbatch):
        loss = model(images)

makes dropout, ``torch.rand``, ``torch.randn`` and ``bernoulli`` draw so, on split images and on
plain tensors alike: one process and any number of ranks drop the same pixels, channels, paths.
Outside of it only split images draw so, with the seed of rank 0 and a running number of calls.

What runs again in backward must draw the same numbers again:

    torch.utils.checkpoint.checkpoint(
        block, x, use_reentrant=False, context_fn=spatialdl.random.checkpoint_contexts
    )

Without `checkpoint_contexts` a mask that would be drawn again in backward raises an error.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import noop_context_fn

from spatialdl.comm.reduce import gather_over_ranks
from spatialdl.comm.tape import aside
from spatialdl.composite import inside
from spatialdl.mesh import Mesh

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORD = 2**64 - 1
_BITS = 53  # of a random number; float64 has no more
_CHUNK = 2**16  # numbers drawn at a time, so that integers on the way stay in the cache


# --- the generator


def _mixed(word: int) -> int:
    for shift, factor in _ROUNDS:
        word = (word ^ (word >> shift)) * factor & _WORD
    return word ^ (word >> 31)


def key_of(*numbers: int) -> int:
    """One key of 64 bits for several integers."""
    key = 0
    for number in numbers:
        key = _mixed((key ^ _mixed((number + _GAMMA) & _WORD)) + _GAMMA & _WORD)
    return key


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(words: Tensor, shift: int) -> Tensor:
    """A shift to the right that fills with zeros; int64 has a sign."""
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _bits(key: int, places: Tensor) -> Tensor:
    """Random integers of 53 bits for places in a tensor."""
    words = places * _signed(_GAMMA) + _signed((key + _GAMMA) & _WORD)
    for shift, factor in _ROUNDS:
        words ^= _shifted(words, shift)
        words *= _signed(factor)
    words ^= _shifted(words, 31)
    return _shifted(words, 64 - _BITS)


class Region(NamedTuple):
    """The part of a whole tensor that this rank holds.

    Attributes:
        positions: for each dim where the own elements are in it; int64.
        shape: of the whole tensor.
    """

    positions: tuple[Tensor, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(len(places) for places in self.positions)

    def of_channels(self) -> Region:
        """The same for one number a sample and channel: (N, C, 1, ...)."""
        rest = len(self.shape) - 2
        one = torch.zeros(1, dtype=torch.int64)
        return Region(self.positions[:2] + (one,) * rest, self.shape[:2] + (1,) * rest)


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor; of one with a number for each own sample, these, see `keyed`."""
    positions = [torch.arange(size) for size in shape]
    own = _thread.stream.own if _thread.stream is not None else None
    if own is not None and positions and len(positions[0]) == len(own):
        positions[0] += own.start
    return Region(tuple(positions), tuple(shape))


def _drawn(
    region: Region,
    key: int,
    out: Tensor,
    made: Callable[[Callable[[int], Tensor], Tensor], Tensor],
) -> Tensor:
    """Fill `out` chunk by chunk by what is made of random integers.

    `made` is given a function from a number of the stream to integers, and the part to be filled.
    """
    if out.device.type == "meta":
        return out
    positions = [places.to(out.device) for places in region.positions]
    steps = [math.prod(region.shape[dim + 1 :]) for dim in range(len(region.shape))]

    def fill(part: Tensor, base: Tensor, dim: int) -> None:
        inner = math.prod(part.shape[1:])
        if part.dim() == 0 or part.numel() <= _CHUNK:
            for places, step in zip(positions[dim:], steps[dim:], strict=True):
                base = base[..., None] + places * step
            places = base.view(part.shape)
            part.copy_(made(lambda stream: _bits(key_of(key, stream), places), part))
            return
        if inner > _CHUNK:
            for row, place in zip(part.unbind(0), positions[dim], strict=True):
                fill(row, base + place * steps[dim], dim + 1)
            return
        rows = max(1, _CHUNK // inner)
        kept = positions[dim]
        for start in range(0, len(kept), rows):
            positions[dim] = kept[start : start + rows]
            fill(part[start : start + rows], base, dim)
        positions[dim] = kept

    fill(out, torch.zeros((), dtype=torch.int64, device=out.device), 0)
    return out


def keep_mask(region: Region, probability: float, key: int, device: torch.device) -> Tensor:
    """True with `probability`; exact, whatever the device."""
    limit = round(probability * 2**_BITS)
    out = torch.empty(region.size, dtype=torch.bool, device=device)
    return _drawn(region, key, out, lambda bits, part: bits(0) < limit)


def uniform(region: Region, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in [0, 1), with as many bits as `dtype` has."""
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    out = torch.empty(region.size, dtype=dtype, device=device)

    def made(bits: Callable[[int], Tensor], part: Tensor) -> Tensor:
        return _shifted(bits(0), _BITS - digits).double() * 2.0**-digits

    return _drawn(region, key, out, made)


def normal(region: Region, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers (Box and Muller, 1958)."""
    out = torch.empty(region.size, dtype=dtype, device=device)

    def made(bits: Callable[[int], Tensor], part: Tensor) -> Tensor:
        radius = (-2 * ((bits(0).double() + 1) * 2.0**-_BITS).log()).sqrt()
        return radius * (bits(1).double() * (2 * math.pi * 2.0**-_BITS)).cos()

    return _drawn(region, key, out, made)


def exponential(region: Region, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the exponential distribution of rate 1; never 0, of which logarithms are taken."""
    out = torch.empty(region.size, dtype=dtype, device=device)

    def made(bits: Callable[[int], Tensor], part: Tensor) -> Tensor:
        smallest = torch.finfo(dtype).tiny
        return -((bits(0).double() + 1) * 2.0**-_BITS).log().clamp_(max=-smallest)

    return _drawn(region, key, out, made)


def bernoulli(probabilities: Tensor, region: Region, key: int) -> Tensor:
    """Ones where a number in [0, 1) is below the probability; in the type of `probabilities`."""
    numbers = uniform(region, key, torch.float64, probabilities.device)
    return (numbers < probabilities).to(probabilities.dtype)


# --- which number of call it is


@dataclass
class _Stream:
    key: int
    calls: int = 0
    own: range | None = None


class _Thread(threading.local):
    stream: _Stream | None = None
    again: int = 0  # contexts open in which a part of the network runs again
    drawn: int = 0  # calls so far, of all streams


_thread = _Thread()
_of_meshes: WeakKeyDictionary[Mesh, _Stream] = WeakKeyDictionary()


def next_key(mesh: Mesh | None = None) -> int:
    """The key of the next call.

    Args:
        mesh: of the split image; outside of `keyed` all its ranks must call this alike.

    Raises:
        RuntimeError: in backward, outside of what `checkpoint_contexts` restores: the mask would
            not be that of forward. Within `keyed` already in forward.
    """
    if not _thread.again and (torch._C._current_graph_task_id() != -1 or _would_differ()):
        raise RuntimeError(
            "a random mask is drawn during backward, where it would differ from that of forward: "
            "pass context_fn=spatialdl.random.checkpoint_contexts (and use_reentrant=False) to "
            "torch.utils.checkpoint.checkpoint"
        )
    stream = _thread.stream
    if stream is None:
        if mesh is None:
            raise RuntimeError("outside of keyed() random numbers are drawn for split images only")
        stream = _stream_of(mesh)
    stream.calls += 1
    _thread.drawn += 1
    return key_of(stream.key, stream.calls)


def numbers_drawn() -> int:
    """How many calls of this thread have drawn random numbers so far."""
    return _thread.drawn


def _would_differ() -> bool:
    """Does a checkpoint that knows nothing of `keyed` run what draws now once more in backward?

    Seen from its frames: in backward plain tensors draw without asking here.
    """
    frame = sys._getframe() if _thread.stream is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == noop_context_fn.__module__:
            return frame.f_locals.get("context_fn", noop_context_fn) is noop_context_fn
        frame = frame.f_back
    return False


def _stream_of(mesh: Mesh) -> _Stream:
    """Ranks agree on a seed once: that of rank 0; data replicas draw numbers of their own."""
    if mesh not in _of_meshes:
        own = torch.tensor(_signed(torch.initial_seed() & _WORD))
        with aside():
            seed = int(gather_over_ranks(mesh.grid_comm, own, "random seed")[0])
        _of_meshes[mesh] = _Stream(key_of(seed, mesh.replica))
    return _of_meshes[mesh]


class _Again:
    """The state of all streams as it was; may be entered any number of times."""

    def __init__(self) -> None:
        stream = _thread.stream
        self._start = None if stream is None else (stream.key, stream.calls, stream.own)
        self._meshes = {mesh: stream.calls for mesh, stream in _of_meshes.items()}
        self._left: list[tuple[_Keyed | None, list[tuple[_Stream, int]]]] = []

    def __enter__(self) -> None:
        saved = [(stream, stream.calls) for stream in _of_meshes.values()]
        for mesh, stream in _of_meshes.items():
            stream.calls = self._meshes.get(mesh, 0)
        mode = None if self._start is None else _Keyed(_Stream(*self._start))
        if mode is not None:
            mode.__enter__()
        self._left.append((mode, saved))
        _thread.again += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.again -= 1
        mode, saved = self._left.pop()
        if mode is not None:
            mode.__exit__(kind, error, trace)
        for stream, calls in saved:
            stream.calls = calls


def same_again() -> AbstractContextManager[None]:
    """A context that draws what is drawn from now on, once more; to be entered later."""
    return _Again()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The ``context_fn`` of ``torch.utils.checkpoint``: the second run draws as the first."""
    return nullcontext(), same_again()


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Within `keyed`: count calls from zero for a named part of a network.

    Its numbers then do not depend on what ran before it, for instance on another pipeline stage.
    Give each part a name of its own.
    """
    around = _thread.stream
    if around is not None:
        digest = blake2b(name.encode(), digest_size=8).digest()
        _thread.stream = _Stream(key_of(around.key, int.from_bytes(digest, "big")), own=around.own)
    try:
        yield
    finally:
        _thread.stream = around


# --- plain tensors


class _Keyed(TorchFunctionMode):
    """Random functions of PyTorch on plain tensors draw from the stream; all else as it is."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self._stream = stream
        self._around: list[_Stream | None] = []

    def __enter__(self) -> _Keyed:
        self._around.append(_thread.stream)
        _thread.stream = self._stream
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _thread.stream = self._around.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from spatialdl.plain_random import PLAIN

        kwargs = kwargs or {}
        if _is_split(types) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        drawn = PLAIN.get(func)
        if drawn is not None:
            return drawn(*args, **kwargs)
        composite = inside(func) if getattr(func, "__module__", "") == F.__name__ else None
        if composite is None:
            return func(*args, **kwargs)
        super().__enter__()  # type: ignore[no-untyped-call]  # what it calls may draw
        try:
            return composite(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _is_split(types: Any) -> bool:
    return any(hasattr(kind, "full_tensor") for kind in types)


def keyed(
    seed: int, step: int, microbatch: int = 0, own: range | None = None
) -> AbstractContextManager[object]:
    """Within it random numbers depend on these and on the number of the call only.

    Args:
        seed: of the run.
        step: number of the optimiser step.
        microbatch: number of the micro-batch in the step, over all data replicas, so that
            replicas draw different numbers.
        own: the samples of the micro-batch that this rank has, if others have the rest.
    """
    return _Keyed(_Stream(key_of(seed, step, microbatch), own=own))
