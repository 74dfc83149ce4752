"""Updates buffers that forwards change as a single process would, over all replicas.

These are moving averages, counters and running statistics of custom layers: all but PyTorch's
BatchNorm, see `pipeline.statistics`. Every slice of a batch starts from the buffers at the start
of the step and leaves them as ``factor * old + rest``, see `pipeline.affine`. At the end of the
step the updates are applied in the order of the slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.channels.tensor import ChannelTensor
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import sum_over_ranks
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.pipeline.affine import Followed
from spatialdl.torch_internals import NormBase

REMEDY = (
    "keep it in a plain moving average, or take a layout that does not divide samples over ranks "
    "(parallel=sp, lp or pp)"
)
UNTRACKED = "writes into it by code that is not tracked, or by an alias"


class _Place(NamedTuple):
    """Location of a buffer."""

    module: nn.Module
    name: str
    path: str

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers[self.name]


class _Update(NamedTuple):
    """Update of a buffer by one slice: ``factor * old + rest``."""

    slice: int
    factor: float
    rest: Tensor


class ForwardBuffers:
    """Collects the updates of a stage's buffers by slices until `fold`.

    Args:
        stage: the module that has the buffers.
        comm: the ranks that have this stage.
        apart: modules whose buffers are handled elsewhere.
    """

    def __init__(self, stage: nn.Module, comm: Communicator, apart: Collection[nn.Module]) -> None:
        self._comm = comm
        self._places = _places(stage, apart)
        self._moving: list[_Place] | None = None  # until the first fold
        self._updates: dict[str, list[_Update]] = {place.path: [] for place in self._places}

    @contextmanager
    def slice(self, number: int, counts: bool) -> Iterator[None]:
        """Context of the calls for one slice of the batch.

        Args:
            number: of the slice, from 0 in the order of a single process.
            counts: True on exactly one of the ranks that share the slice.

        Raises:
            UnsupportedSpatialOp: if a buffer is updated in a way that cannot be combined over
                slices.
        """
        moving = self._places if self._moving is None else self._moving
        old = [place.tensor for place in moving]
        before = [_state(place.tensor) for place in self._places]
        if not moving:
            yield
        else:
            clones = {
                id(buffer): buffer.clone() for buffer in old if buffer is not None
            }  # some are shared
            fresh = [clones.get(id(buffer)) for buffer in old]
            followed = Followed([buffer for buffer in fresh if buffer is not None])
            try:
                # swapped, not overwritten: autograd saved the old ones for earlier slices
                for place, buffer in zip(moving, fresh, strict=True):
                    place.module._buffers[place.name] = buffer
                with followed:
                    yield
                self._keep(moving, old, fresh, followed, number, counts)
            finally:
                for place, buffer in zip(moving, old, strict=True):
                    place.module._buffers[place.name] = buffer
        for place, state in zip(self._places, before, strict=True):
            if _state(place.tensor) != state:
                known = place in moving
                raise _refusal(place, UNTRACKED if known else "not in the first step")

    def _keep(
        self,
        moving: list[_Place],
        old: list[Tensor | None],
        fresh: list[Tensor | None],
        followed: Followed,
        number: int,
        counts: bool,
    ) -> None:
        known = [place for place, buffer in zip(moving, fresh, strict=True) if buffer is not None]
        for place, before, buffer in zip(moving, old, fresh, strict=True):
            now = _now(place)
            if buffer is None and now is None:
                continue
            if buffer is None or now is None or before is None or now.shape != buffer.shape:
                raise _refusal(place, "changes its shape")
            part = followed.part(now)
            seen = now is not buffer or (part is not None and part.written)
            unseen = part is not None and part.version != now._version
            first = self._moving is None
            if not seen and not unseen and not (first and not _equal(now, before)):
                continue
            use = followed.uses.get(known.index(place))
            if use is not None:
                raise _refusal(place, f"uses its old value in '{use}'")
            if unseen or not seen:
                raise _refusal(place, UNTRACKED)
            if part is not None and known[part.buffer] is not place:
                raise _refusal(place, f"fills it from '{known[part.buffer].path}'")
            if counts:
                factor = 0.0 if part is None else part.factor
                rest = now.detach().double() - factor * before.double()
                self._updates[place.path].append(_Update(number, factor, rest))

    @torch.no_grad()
    def fold(self, slices: int) -> None:
        """Apply the updates of all slices of the batch; collective."""
        places = self._places if self._moving is None else self._moving
        if not places:
            return
        own = torch.zeros(2, len(places), slices, dtype=torch.float64)
        own[1] = 1.0
        for row, place in enumerate(places):
            for update in self._updates[place.path]:
                own[0, row, update.slice] += 1
                own[1, row, update.slice] *= update.factor
        own[1] -= 1.0  # so that ranks without the slice add 0 to the sum
        table = sum_over_ranks(self._comm, own, "updates of buffers")
        updated, factors = (table[0].sum(1) > 0).tolist(), table[1] + 1.0
        if self._moving is None:
            self._moving = [
                place
                for place, moves in zip(places, updated, strict=True)
                if moves or isinstance(place.module, NormBase)  # may be frozen temporarily
            ]
        rows = [row for row, moves in enumerate(updated) if moves]
        if not rows:
            return
        tensors = [places[row].tensor for row in rows]
        device = next(
            (tensor.device for tensor in tensors if tensor is not None), torch.device("cpu")
        )
        parts = [self._own_part(places[row], factors[row]).to(device) for row in rows]
        total = sum_over_ranks(self._comm, torch.cat(parts), "buffers that forward updates")
        sums = torch.split(total, [len(part) for part in parts])
        for row, rest in zip(rows, sums, strict=True):
            _set(places[row], float(factors[row].prod()), rest)

    def _own_part(self, place: _Place, factors: Tensor) -> Tensor:
        """Contribution of this rank's slices to a buffer."""
        updates, self._updates[place.path] = self._updates[place.path], []
        buffer = place.tensor
        total = torch.zeros(0, dtype=torch.float64)
        if buffer is not None:
            total = buffer.new_zeros(buffer.numel(), dtype=torch.float64)
        own: dict[int, Tensor] = {}
        for number, factor, rest in updates:  # a slice has one in forward, maybe one in backward
            own[number] = rest if number not in own else factor * own[number] + rest
        for number, rest in own.items():
            total += float(factors[number + 1 :].prod()) * rest.reshape(-1)
        return total


class BuffersInOrder:
    """Checks the buffers of a stage whose micro-batches all run on this rank, in order.

    Forwards update them in order; recomputation in backward, after later forwards, would not.

    Args:
        stage: the module that has the buffers.
        apart: modules whose buffers are handled elsewhere.
    """

    def __init__(self, stage: nn.Module, apart: Collection[nn.Module]) -> None:
        self._places = _places(stage, apart)
        self._forward: set[int] = set()

    @contextmanager
    def slice(self, number: int, counts: bool) -> Iterator[None]:
        """Context of the forward of a micro-batch, then of its backward.

        Raises:
            UnsupportedSpatialOp: if backward changes a buffer.
        """
        if number not in self._forward or not self._places:
            self._forward.add(number)
            yield
            return
        buffers = [place.tensor for place in self._places]
        states = [_state(buffer) for buffer in buffers]
        with Followed([buffer for buffer in buffers if buffer is not None]) as followed:
            yield
        for place, state in zip(self._places, states, strict=True):
            tensor = place.tensor
            part = None if tensor is None else followed.part(tensor)
            if _state(tensor) != state or (part is not None and part.written):
                raise UnsupportedSpatialOp(
                    f"the forward of {type(place.module).__name__} updates its buffer "
                    f"'{place.path}' again in backward, where torch.utils.checkpoint reruns it; "
                    "later micro-batches have updated it by then, unlike in a single process: "
                    "take parallel.microbatches=1, or parallel.recompute=block instead "
                    "of the checkpoint"
                )

    def fold(self, slices: int) -> None:
        """End the step."""
        self._forward.clear()


def _places(stage: nn.Module, apart: Collection[nn.Module]) -> list[_Place]:
    places = []
    for path, module in stage.named_modules():
        if module not in apart:
            places += [
                _Place(module, name, f"{path}.{name}" if path else name) for name in module._buffers
            ]
    return places


def _now(place: _Place) -> Tensor | None:
    """The buffer after a forward; this rank's part if channels are divided."""
    now, seen = place.tensor, vars(place.module).get(place.name)
    if not (isinstance(now, ChannelTensor) and isinstance(seen, ChannelTensor)):
        return now
    if (now.at, now.partition) != (seen.at, seen.partition):
        raise _refusal(place, "divides its channels differently")
    return now.part


def _state(tensor: Tensor | None) -> tuple[int, int]:
    return id(tensor), 0 if tensor is None else tensor._version


def _equal(first: Tensor, second: Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _set(place: _Place, factor: float, rest: Tensor) -> None:
    buffer = place.tensor
    if buffer is not None:
        value = factor * buffer.double() + rest.to(buffer.device).view_as(buffer)
        buffer.copy_(value if buffer.is_floating_point() else value.round())


def _refusal(place: _Place, what: str) -> UnsupportedSpatialOp:
    kind = type(place.module).__name__
    return UnsupportedSpatialOp(
        f"the forward of {kind} updates its buffer '{place.path}', but {what}: the combined update "
        "of several replicas, copies or ranks that divide a batch then differs from that of a "
        f"single process; {REMEDY}"
    )
