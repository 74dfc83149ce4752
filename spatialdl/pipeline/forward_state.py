"""State other than BatchNorm's statistics that a network changes by itself in forward.

Moving averages, counters and the vectors of spectral norm follow DistributedDataParallel: each
replica updates its own buffers, and a step ends with those of the first replica on all of them. The
copies of GEMS and the ranks that divide a micro-batch's samples count as replicas. What does not
follow is refused: changes of parameters, and buffers that a checkpoint updates again in backward.

Changes are seen by version counters, in steps 1, 2, 4, 8 and so on also by values: BatchNorm as a
function and writes by ``.data`` leave the counters as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.agreement import digest
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import sum_over_ranks
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.spatial.channels.tensor import ChannelTensor
from spatialdl.torch_internals import DisableTorchFunction, NormBase

_Mark = tuple[int, int, int]
"""Identity, version and, in some steps, digest of a tensor."""


class _Place(NamedTuple):
    """A buffer or parameter of a module."""

    path: str
    module: nn.Module
    name: str

    @property
    def full(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers.get(self.name, self.module._parameters.get(self.name))


class ForwardState:
    """Makes the buffers of a stage equal on the ranks that hold it, after each step.

    Args:
        stage: the module that has the state.
        comm: the ranks that hold it.
        apart: its modules whose buffers are handled elsewhere.
        microbatches: in a training step.
        units: modules in it whose weights are gathered for their forward by hooks, if any.
    """

    def __init__(
        self,
        stage: nn.Module,
        comm: Communicator,
        apart: Collection[nn.Module],
        microbatches: int,
        units: Sequence[nn.Module] = (),
    ) -> None:
        self._comm, self._microbatches, self._is_sharded = comm, microbatches, bool(units)
        modules = list(stage.named_modules())
        self._buffers = [
            _Place(path, module, name)
            for path, module in modules
            if module not in apart
            for name in module._buffers
        ]
        self._parameters = [_Place(path, m, name) for path, m in modules for name in m._parameters]
        self._names = [place.full for place in (*self._buffers, *self._parameters)]
        # norms may be frozen for a while
        self._moving = {one.full for one in self._buffers if isinstance(one.module, NormBase)}
        self._written: set[str] = set()  # weights, while they are gathered
        self._late: set[str] = set()  # changed since ranks last told each other
        self._begun, self._looks_at_values = {False: 0, True: 0}, True
        self._forward: set[int] = set()
        self._start: tuple[list[Tensor | None], list[_Mark]] = [], []
        for path, unit in modules:
            if unit in units:
                self._watch(unit, path)

    def begin(self, evaluates: bool) -> None:
        """Begin a step, or the evaluation of a batch."""
        self._begun[evaluates] += 1
        self._looks_at_values = self._begun[evaluates] & (self._begun[evaluates] - 1) == 0
        self._forward.clear()
        if self._comm.size > 1:
            tensors = self._tensors()
            self._start = tensors, self._marks(tensors)

    @contextmanager
    def slice(self, number: int, counts: bool) -> Iterator[None]:
        """Context of the forward of a slice of the batch, then of its backward.

        Raises:
            UnsupportedSpatialOp: if backward changes a buffer after later forwards, or fails
                because a forward has changed a parameter.
        """
        reruns = self._buffers if number in self._forward and self._microbatches > 1 else []
        self._forward.add(number)
        before = [place.tensor for place in reruns]
        marks = self._marks(before)
        try:
            yield
        except RuntimeError as error:  # backward no longer finds the weight that forward had
            self._check_parameters(self._changed(), error)
            raise
        now = self._marks([place.tensor for place in reruns])
        for place, old, new in zip(reruns, marks, now, strict=True):
            if old != new:
                raise UnsupportedSpatialOp(
                    f"the forward of {type(place.module).__name__} updates its buffer "
                    f"'{place.full}' again in backward, where torch.utils.checkpoint reruns it; "
                    "later micro-batches have updated it by then, unlike in a single process: "
                    "take parallel.microbatches=1, or parallel.recompute=block instead of the "
                    "checkpoint"
                )

    @torch.no_grad()
    def fold(self) -> None:
        """Set the buffers of the first replica on all ranks; collective.

        Replicas without samples in some micro-batch do not count.

        Raises:
            UnsupportedSpatialOp: if a forward changes a parameter, or the shape of a buffer; on all
                ranks that hold the stage in steps in which they tell each other, which are those
                that look at values, and all where buffers move.
        """
        size = self._comm.size
        if size == 1:
            return
        self._late |= self._changed()
        if not self._looks_at_values and not self._moving:
            self._check_parameters(self._late)
            return
        changed = self._late
        own = torch.zeros(size + len(self._names), dtype=torch.int64)
        # the rank with most slices, of these the one that has the first
        own[self._comm.rank] = (len(self._forward) << 32) - min(self._forward, default=0)
        own[size:] = torch.tensor([name in changed for name in self._names])
        table = sum_over_ranks(self._comm, own, "changes of state in forward")
        flags = table[size:].tolist()
        changed = {name for name, n in zip(self._names, flags, strict=True) if n}
        self._check_parameters(changed)
        self._moving |= changed
        self._late = set()
        self._copy(int(table[:size].argmax()))

    def _changed(self) -> set[str]:
        """Names of this rank's buffers and parameters that have changed in this step."""
        _, marks = self._start
        pairs = zip(self._names, marks, self._marks(self._tensors()), strict=False)
        return self._written | {name for name, old, new in pairs if old != new}

    def _check_parameters(self, changed: set[str], error: Exception | None = None) -> None:
        name = next((one.full for one in self._parameters if one.full in changed), "")
        if name:
            raise UnsupportedSpatialOp(
                f"the forward changes the parameter '{name}', which replicas, copies and ranks "
                "that divide a batch would each do once per slice, unlike a single process: do it "
                "after the optimizer's step, or in a parametrization "
                "(torch.nn.utils.parametrize), or take parallel=sp, lp or pp"
            ) from error

    def _copy(self, root: int) -> None:
        """Copy the buffers that move from one rank to all."""
        moving: list[Tensor] = []
        for place, before in zip(self._buffers, self._start[0], strict=False):
            now = place.tensor
            if place.full not in self._moving or (before is None and now is None):
                continue
            if before is None or now is None or before.shape != now.shape:
                raise UnsupportedSpatialOp(
                    f"the forward of {type(place.module).__name__} changes the shape of its "
                    f"buffer '{place.full}', which replicas, copies and ranks that divide a batch "
                    "cannot exchange: take parallel=sp, lp or pp"
                )
            moving.append(now)
        if not moving:
            return
        device = moving[0].device
        values = [one.detach().reshape(-1).view(torch.uint8).to(device) for one in moving]
        own = torch.cat(values)
        if self._comm.rank != root:
            own.zero_()
        total = sum_over_ranks(self._comm, own, "buffers that forward changes")
        parts = torch.split(total, [len(value) for value in values])
        for buffer, part in zip(moving, parts, strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view_as(buffer))

    # --- looks at state

    def _tensors(self) -> list[Tensor | None]:
        parameters = [] if self._is_sharded else self._parameters
        return [place.tensor for place in (*self._buffers, *parameters)]

    @torch.no_grad()
    def _marks(self, tensors: Sequence[Tensor | None]) -> list[_Mark]:
        with DisableTorchFunction():
            own = [one.part if isinstance(one, ChannelTensor) else one for one in tensors]
            values = [0] * len(own)
            known = [place for place, one in enumerate(own) if one is not None and one.numel()]
            if self._looks_at_values and known:
                digests = [digest(one) for one in own if one is not None and one.numel()]
                numbers = torch.stack([one.to(digests[0].device) for one in digests]).tolist()
                for place, number in zip(known, numbers, strict=True):
                    values[place] = number
            versions = [-1 if one is None else one._version for one in tensors]
            return list(zip(map(id, tensors), versions, values, strict=True))

    def _watch(self, unit: nn.Module, path: str) -> None:
        """Compare a unit's weights, while they are gathered, before and after its forward."""
        start: dict[str, _Mark] = {}

        def marks() -> dict[str, _Mark]:
            named = dict(unit.named_parameters(path))
            return dict(zip(named, self._marks(list(named.values())), strict=True))

        def before(module: nn.Module, args: Any) -> None:
            start.update(marks())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._written |= {name for name, mark in marks().items() if mark != start[name]}

        unit.register_forward_pre_hook(before)  # after that which gathers
        unit.register_forward_hook(after, prepend=True)  # before that which frees
