"""What passes between stages, found out without data and without talking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.layout import Layout
from spatialdl.mesh import Placement, dry_mesh
from spatialdl.pipeline.partition import meta_copy
from spatialdl.spatial.tensor import SpatialTensor


class Passing(NamedTuple):
    """What passes a border for a micro-batch.

    Attributes:
        parts: the tensors, in order.
        is_tuple: whether a stage gives, and the next one takes, a tuple of them.
    """

    parts: tuple[HandoverShape, ...]
    is_tuple: bool


class HandoverShapes:
    """What passes each border of a network that is cut into stages.

    Every rank runs copies of the stages without memory, so that both sides of a border know.

    Args:
        stages: all of them.
        image_size: global (channels, H, W).
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        placement: Placement,
        image_size: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self._stages = [meta_copy(stage) for stage in stages[:-1]]  # nothing follows the last
        self._placement, self._image_size, self._dtype = placement, image_size, dtype
        self._found: dict[int, list[Passing]] = {}

    def of(self, samples: int) -> list[Passing]:
        """What passes after each stage but the last for a micro-batch of `samples`.

        Raises:
            ValueError: if a stage gives anything but tensors.
        """
        if samples not in self._found:
            self._found[samples] = self._dry_run(samples)
        return self._found[samples]

    @torch.no_grad()
    def _dry_run(self, samples: int) -> list[Passing]:
        found: list[Passing] = []
        size = (samples, *self._image_size)
        layout = Layout.even((samples, *self._image_size[1:]), self._placement.grids[0])
        image = torch.empty(size, dtype=self._dtype, device="meta")
        x: object = _meta_input(image, layout, self._placement.grids[0])
        for stage, dry in enumerate(self._stages):
            with torch.device("meta"):  # where layers make tensors of their own, too
                outputs = tensors_of(dry(x), stage)
            parts = tuple(_handover_shape(one, stage, self._placement) for one in outputs)
            found.append(Passing(parts, isinstance(outputs, tuple)))
            grid = self._placement.grids[stage + 1]
            inputs = tuple(_arrived(part, grid) for part in parts)
            x = inputs if found[-1].is_tuple else inputs[0]
        return found


def tensors_of(output: object, stage: int) -> tuple[Tensor, ...] | list[Tensor]:
    """The tensors that a stage gives: a tuple of them, or a list of the only one.

    Raises:
        ValueError: if it gives something else.
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple) and output and all(isinstance(one, Tensor) for one in output):
        return output
    kinds = [type(one).__name__ for one in output] if isinstance(output, tuple) else []
    raise ValueError(
        f"stage {stage} ends with a {type(output).__name__}{' of ' * bool(kinds)}"
        f"{', '.join(kinds)}: a network can be cut only where a tensor or a tuple of tensors passes"
    )


def _arrived(part: HandoverShape, grid: tuple[int, int]) -> Tensor:
    whole = torch.empty(part.shape, dtype=part.dtype, device="meta")
    return _meta_input(whole, part.receiver, grid)


def _meta_input(x: Tensor, layout: Layout | None, grid: tuple[int, int]) -> Tensor:
    if layout is None or grid == (1, 1):
        return x
    samples, height, width = layout.boxes[0].shape
    tile = x.new_empty((samples, *x.shape[1:-2], height, width))
    return SpatialTensor(tile, layout, dry_mesh(grid))


def _handover_shape(output: Tensor, stage: int, placement: Placement) -> HandoverShape:
    grid, next_grid = placement.grids[stage], placement.grids[stage + 1]
    sender = output.spatial_layout if isinstance(output, SpatialTensor) else None
    receiver = None
    is_map = output.dim() == 4 and output.shape[-2] * output.shape[-1] > 1
    if sender is not None or (is_map and grid == (1, 1) and next_grid != (1, 1)):
        size = (output.shape[0], output.shape[-2], output.shape[-1])
        sender = sender or Layout.even(size, (1, 1))
        receiver = sender if grid == next_grid else Layout.even(size, next_grid)
    return HandoverShape(tuple(output.shape), output.dtype, sender, receiver)
