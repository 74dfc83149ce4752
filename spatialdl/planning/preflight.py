"""Preflight of a layout: find unsupported operations in one process, without data.

The stages run forward and backward on the ``meta`` device, in the shapes of the first rank's tile.
Whether an operation is supported follows from global sizes, which are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.comm.dry import Dry
from spatialdl.comm.mesh import Mesh, dry_mesh
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.shapes import HandoverShapes, divide_stage
from spatialdl.pipeline.stage import OUTPUT, run_stage
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.spatial.channels.weights import Plan, full_outputs
from spatialdl.spatial.checking.record import Recorder, Refusal
from spatialdl.spatial.meta import dtype_of, meta_copy, on_meta, run_backward
from spatialdl.spatial.random import keyed
from spatialdl.spatial.source_lines import users_line_of
from spatialdl.spatial.split import gather_before as gather
from spatialdl.spatial.tensor import SpatialTensor

Criterion = Callable[[Any, Tensor], Tensor]


@dataclass
class Preflight:
    """Preflight findings.

    Attributes:
        refusals: unsupported operations, by place.
        errors: other errors that would end the run; operations after them were not checked.
        guesses: ``file:line`` where control flow of the network depends on a value; only the branch
            for 1 or False was checked.
        stages: stages of the network on the meta device; with divided channels, the shards of one
            rank, for the stages that were run.
        entering: spatial size of the largest image that enters each stage, or None.
    """

    refusals: list[Refusal] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    stages: list[nn.Module] = field(default_factory=list)
    entering: list[tuple[int, ...] | None] = field(default_factory=list)

    @property
    def is_clear(self) -> bool:
        return not self.refusals and not self.errors


def preflight(
    model: nn.Module,
    placement: Placement,
    shape: tuple[int, ...],
    *,
    names: Sequence[str] | None = None,
    gather_before: str | Sequence[str] = (),
    recompute: bool = False,
    criterion: Criterion | None = None,
    segments: bool = False,
    columns: int | None = None,
    tensor_plan: Plan = MappingProxyType({}),
) -> Preflight:
    """Dry-run forward and backward of a network in a layout.

    Args:
        model: the network; not modified.
        placement: the layout.
        shape: (N, C, *spatial) of the whole images of a micro-batch of one replica.
        names: first modules of stages, see `pipeline.partition.cut`.
        gather_before: modules that get whole images, see `spatial.split`.
        recompute: whether blocks are recomputed in backward.
        criterion: loss that raises ValueError for outputs that do not fit the task.
        segments: whether targets are a class per pixel.
        columns: number of targets per image; None for one label.
        tensor_plan: overrides of the division of weights by channels.
    """
    found = Preflight()
    shadow = meta_copy(model)
    try:
        gather(shadow, gather_before)
        found.stages = cut(shadow, placement.widths, names, shape[1:], recompute)
    except ValueError as error:
        found.errors.append(str(error))
        # operations are still checked, on the grid of the first stage
        shadow, placement = meta_copy(model), Placement(1, placement.tile_grids[:1])
        found.stages = [shadow]
    run = PreflightRun(found, placement, shape, dtype_of(shadow), tensor_plan)
    run.forward()
    if run.output is not None:
        run.loss(criterion, segments, columns)
    return found


class _Ended(Exception):
    """An error, which is recorded, ends the run."""


class PreflightRun:
    """Forward of all stages, each followed by its backward, as graphs are separate."""

    def __init__(
        self,
        found: Preflight,
        placement: Placement,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        tensor_plan: Plan,
    ) -> None:
        self._found, self._placement, self._shape = found, placement, shape
        self._plan = tensor_plan
        self._shapes = HandoverShapes(found.stages, placement, shape[1:], dtype)
        self._modules = [*self._shapes.stages, meta_copy(found.stages[-1])]
        for module in self._modules:
            module.train()
        self.output: Any = None

    def forward(self) -> None:
        try:
            _, arrived = self._shapes.walk(self._shape[0], self._stage)
            self.output = self._stage(len(arrived) - 1, arrived[-1])[OUTPUT]
        except _Ended:
            return
        except ValueError as error:  # an output cannot pass a border
            self._found.errors.append(str(error))

    def _stage(self, number: int, arrived: dict[Value, Tensor]) -> dict[Value, Any]:
        module, samples = self._modules[number], self._shape[0]
        self._found.entering.append(_largest(arrived.values(), self._placement.dims))
        inputs = {value: _leaf(value, x) for value, x in arrived.items()}
        ranks = self._placement.tensor_parts(number)
        if ranks > 1:
            try:
                divide_stage(module, Dry(ranks - 1, ranks, "tensor"), inputs, samples, self._plan)
            except (RuntimeError, ValueError) as error:  # UnsupportedSpatialOp is the first
                self._found.errors.append(str(error))
                raise _Ended from error
            self._found.stages[number] = module
        run = partial(run_stage, module, inputs, samples)
        outputs: dict[Value, Any] = self._tried(number, lambda: full_outputs(run()))
        self._backward(number, [x for value, x in outputs.items() if value != OUTPUT])
        return outputs

    def _tried(self, number: int, call: Callable[[], Any]) -> Any:
        """Result of a call; an error is recorded, and ends the run."""
        recorder = Recorder(self._modules[number], dry=True)
        try:
            with recorder, on_meta(), keyed(0, 0, 0):
                return call()
        except UnsupportedSpatialOp as error:
            if not any(str(error) == one.reason for one in recorder.refusals):
                self._found.errors.append(str(error))
            raise _Ended from error
        except Exception as error:
            self._found.errors.append(self._described(number, error))
            raise _Ended from error
        finally:
            self._found.refusals += recorder.refusals
            self._found.guesses += recorder.guesses

    def _described(self, number: int, error: Exception) -> str:
        text = " ".join(str(error).split())
        after = " (possibly caused by a refused operation above)" if self._found.refusals else ""
        stage = f"stage {number}: " if len(self._modules) > 1 else ""
        return f"{stage}{type(error).__name__} at {users_line_of(error)}: {text}{after}"

    def _backward(self, number: int, outputs: object) -> None:
        try:
            with on_meta():
                run_backward(outputs)
        except UnsupportedSpatialOp as error:
            self._found.refusals.append(Refusal("backward", "", f"stage {number}", str(error)))
        except Exception as error:
            self._found.errors.append(self._described(number, error))

    def loss(self, criterion: Criterion | None, segments: bool, columns: int | None) -> None:
        """Compute a loss of the last stage's output, and its backward."""
        last = len(self._modules) - 1
        if criterion is not None:
            self._check_task(criterion, segments, columns)
        mesh = dry_mesh(self._placement.tile_grids[last])
        with suppress(_Ended):
            loss = self._tried(last, lambda: dry_loss(self.output, segments, self._shape, mesh))
            self._backward(last, loss)

    def _check_task(self, criterion: Criterion, segments: bool, columns: int | None) -> None:
        """Record an error if the output's shape does not fit the task."""
        samples, _, *size = self._shape
        size = size if segments else []
        target = torch.empty(samples, *size, dtype=torch.int64, device="meta")
        if columns is not None:
            target = torch.empty(samples, columns, dtype=torch.float64, device="meta")
        try:
            criterion(self.output, target)
        except ValueError as error:
            self._found.errors.append(str(error))
        except Exception:
            return  # meta tensors have no values


def _largest(tensors: Iterable[Tensor], dims: int) -> tuple[int, ...] | None:
    sizes = [tuple(map(int, x.shape[2:])) for x in tensors if x.dim() == dims + 2]
    return max(sizes, key=prod, default=None)


def _leaf(value: Value, x: Tensor) -> Tensor:
    """Make a tensor require a gradient, unless it is the image."""
    if value == IMAGE or not x.is_floating_point():
        return x
    return x.requires_grad_()


def dry_loss(output: Any, segments: bool, shape: Sequence[int], mesh: Mesh) -> Tensor | None:
    """Cross entropy as in `training.tasks.losses`, with empty labels."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return None
    samples, _, *size = shape
    if segments and output.dim() == len(shape) and list(output.shape[2:]) == size:
        if mesh.parts == 1:
            target = torch.empty(samples, *size, dtype=torch.int64)
        else:
            layout = mesh.layout(samples, size)
            if isinstance(output, SpatialTensor):
                layout = output.spatial_layout
            own = mesh.own_box(layout).shape[1:]
            target = SpatialTensor(torch.empty(samples, *own, dtype=torch.int64), layout, mesh)
        return F.cross_entropy(output, target, ignore_index=255, reduction="sum")
    if output.dim() == 2 and len(output) == samples:
        return F.cross_entropy(output, torch.empty(samples, dtype=torch.int64))
    return output.sum()
