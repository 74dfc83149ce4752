"""Contexts in which PyTorch's random functions draw from a stream, also in recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from spatialdl.comm.mesh import Mesh
from spatialdl.spatial.random.composite import inside
from spatialdl.spatial.random.generator import key_of
from spatialdl.spatial.random.plain import PLAIN
from spatialdl.spatial.random.streams import Stream, of_meshes, thread


class _Keyed(TorchFunctionMode):
    """Mode in which random functions on plain tensors draw from the stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._around: list[Stream | None] = []

    def __enter__(self) -> _Keyed:
        self._around.append(thread.stream)
        thread.stream = self._stream
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        thread.stream = self._around.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_split(types) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        drawn = PLAIN.get(func)
        if drawn is not None:
            return drawn(*args, **kwargs)
        composite = inside(func) if getattr(func, "__module__", "") == F.__name__ else None
        if composite is None:
            return func(*args, **kwargs)
        super().__enter__()  # type: ignore[no-untyped-call]  # inner calls may draw
        try:
            return composite(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _is_split(types: Any) -> bool:
    return any(hasattr(kind, "full_tensor") for kind in types)


def keyed(
    seed: int, step: int, microbatch: int = 0, own: range | None = None
) -> AbstractContextManager[object]:
    """Context in which random numbers depend only on these arguments and the index of the call.

    Args:
        seed: seed of the run.
        step: index of the optimizer step.
        microbatch: index of the micro-batch in the step, over all data replicas, so that
            replicas draw different numbers.
        own: samples of the micro-batch that this rank has, if other ranks have the rest.
    """
    return _Keyed(Stream(key_of(seed, step, microbatch), own=own))


class _Again:
    """Saved state of all streams; may be entered repeatedly."""

    def __init__(self) -> None:
        stream = thread.stream
        self._start = None if stream is None else (stream.key, stream.calls, stream.own)
        self._meshes = {mesh: stream.calls for mesh, stream in of_meshes.items()}
        self._left: list[tuple[_Keyed | None, list[tuple[Stream, int]]]] = []

    def __enter__(self) -> None:
        saved = [(stream, stream.calls) for stream in of_meshes.values()]
        for mesh, stream in of_meshes.items():
            stream.calls = self._meshes.get(mesh, 0)
        mode = None if self._start is None else _Keyed(Stream(*self._start))
        if mode is not None:
            mode.__enter__()
        self._left.append((mode, saved))
        thread.again += 1

    def __exit__(self, *raised: Any) -> None:
        thread.again -= 1
        mode, saved = self._left.pop()
        if mode is not None:
            mode.__exit__(*raised)
        for stream, calls in saved:
            stream.calls = calls


def repeat_later() -> AbstractContextManager[None]:
    """Context, to be entered later, that repeats the numbers drawn from now on."""
    return _Again()


class OnThreads:
    """Draws this thread's next numbers identically on other threads, with a stream each.

    Args:
        meshes: meshes of the other threads; outside of `keyed` their split images draw with a seed
            from PyTorch's default generator.
    """

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self._around = thread.stream
        self._drawn = 0
        if self._around is None:
            key = key_of(int(torch.empty((), dtype=torch.int64).random_()))
            of_meshes.update({mesh: Stream(key) for mesh in meshes})

    @contextmanager
    def of(self) -> Iterator[None]:
        """Context for another thread."""
        if self._around is None:
            yield
            return
        stream = Stream(self._around.key, self._around.calls, self._around.own)
        with _Keyed(stream):
            yield
        self._drawn = stream.calls

    def finish(self) -> None:
        """Advance this thread's stream past the numbers drawn by the other threads."""
        if self._around is not None:
            self._around.calls = max(self._drawn, self._around.calls)


class PartsOfSamples:
    """Samples that pass a network in parts, with the numbers of a single pass.

    To be created within `keyed`. Each part begins at the current call index, and may be repeated.

    Attributes:
        drawn: number of calls of the last part.

    Raises:
        RuntimeError: outside of `keyed`.
    """

    def __init__(self) -> None:
        if thread.stream is None:
            raise RuntimeError("samples in parts can draw random numbers within keyed() only")
        self._around, self._first = thread.stream, thread.stream.calls
        self.drawn = 0

    @contextmanager
    def of(self, own: range) -> Iterator[None]:
        """Context to draw for these samples."""
        stream = Stream(self._around.key, self._first, own)
        with _Keyed(stream):
            yield
        self.drawn = stream.calls - self._first

    def finish(self, drawn: int) -> None:
        """Advance the stream by `drawn` calls of all samples."""
        self._around.calls = self._first + drawn


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` for ``torch.utils.checkpoint``: recomputation draws the same numbers."""
    return nullcontext(), repeat_later()
