"""Random functions of PyTorch made to draw from a stream, and to draw the same once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from spatialdl.comm.mesh import Mesh
from spatialdl.random.composite import inside
from spatialdl.random.generator import key_of
from spatialdl.random.plain import PLAIN
from spatialdl.random.streams import Stream, of_meshes, thread


class _Keyed(TorchFunctionMode):
    """Random functions of PyTorch on plain tensors draw from the stream; all else as it is."""

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
    return _Keyed(Stream(key_of(seed, step, microbatch), own=own))


class _Again:
    """The state of all streams as it was; may be entered any number of times."""

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


def same_again() -> AbstractContextManager[None]:
    """A context that draws what is drawn from now on, once more; to be entered later."""
    return _Again()


class OnThreads:
    """What this thread draws next, drawn by other threads alike: each has a stream of its own.

    Args:
        meshes: of the other threads; outside of `keyed` their split images draw by a seed from
            PyTorch's default generator.
    """

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self._around = thread.stream
        self._drawn = 0
        if self._around is None:
            key = key_of(int(torch.empty((), dtype=torch.int64).random_()))
            of_meshes.update({mesh: Stream(key) for mesh in meshes})

    @contextmanager
    def of(self) -> Iterator[None]:
        """A context for another thread."""
        if self._around is None:
            yield
            return
        stream = Stream(self._around.key, self._around.calls, self._around.own)
        with _Keyed(stream):
            yield
        self._drawn = stream.calls

    def finish(self) -> None:
        """Go on in this thread behind what the others have drawn."""
        if self._around is not None:
            self._around.calls = max(self._drawn, self._around.calls)


class PartsOfSamples:
    """Samples that go through a network part after part and draw as if all went at once.

    To be made within `keyed`. Each part begins at the call that is next now, any number of times.

    Attributes:
        drawn: calls of the last part.

    Raises:
        RuntimeError: outside of `keyed`.
    """

    def __init__(self) -> None:
        if thread.stream is None:
            raise RuntimeError("parts of samples draw random numbers within keyed() only")
        self._around, self._first = thread.stream, thread.stream.calls
        self.drawn = 0

    @contextmanager
    def of(self, own: range) -> Iterator[None]:
        """Draw for these samples."""
        stream = Stream(self._around.key, self._first, own)
        with _Keyed(stream):
            yield
        self.drawn = stream.calls - self._first

    def finish(self, drawn: int) -> None:
        """What is drawn from now on comes after `drawn` calls of all samples."""
        self._around.calls = self._first + drawn


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The ``context_fn`` of ``torch.utils.checkpoint``: the second run draws as the first."""
    return nullcontext(), same_again()
