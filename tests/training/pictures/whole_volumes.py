"""Pictures of volumes of which one process has all voxels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spatialdl.training.pictures.orthogonal_slices import Planes, draw_planes
from spatialdl.training.pictures.thumbnails import SIDE


def planes_of(volume: Any) -> Planes:
    """The slices through the middle of a volume (depth, height, width)."""
    depth, height, width = (n // 2 for n in volume.shape)
    return Planes(volume[depth], volume[:, height], volume[:, :, width])


def orthogonal_slices(
    volume: Any, spacing: Sequence[float] | None = None, classes: Any = None, side: int = SIDE
) -> Any:
    """The picture of them."""
    overlay = None if classes is None else planes_of(classes)
    return draw_planes(planes_of(volume), spacing, overlay, side=side)
