"""The loss of a network that runs without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.spatial.tensor import SpatialTensor


def dry_loss(output: Any, segments: bool, shape: Sequence[int], mesh: Mesh) -> Tensor | None:
    """Cross entropy as `training.tasks.losses` takes it, without a look at the labels."""
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
