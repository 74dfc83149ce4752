"""Extra tokens of an image that belong to no pixel: class and distillation tokens, registers.

They are in the dim into which the spatial dims are merged, before the pixels (prefix) or after them
(suffix). Only the tile of part 0 of the grid has them; the other tiles have pixels only. So
operations on all tokens include them, and their gradients are counted once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.parallel.layout import Box
from spatialdl.spatial.dims import SpatialDims, from_image, to_image


def apart(tensor: Tensor, dims: SpatialDims) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the tokens before the pixels, the pixels, and the tokens after them.

    Args:
        tensor: a whole tensor, or the tile of a part.
        dims: of `tensor`; for a tile those of its part.
    """
    dim = dims.at[0]
    pixels = tensor.shape[dim] - dims.beside
    before, own, after = torch.split(tensor, [dims.prefix, pixels, dims.suffix], dim)
    return before, own, after


def bring_tokens(
    tile: Tensor,
    dims: SpatialDims,
    extents: Sequence[int],
    plan: Plan,
    mesh: Mesh,
    name: str,
    whole: bool,
) -> Tensor:
    """Move the pixels of a tile by a plan; differentiable.

    Args:
        tile: this rank's.
        dims: the global dims.
        extents: of this rank's box.
        plan: moves the pixels.
        name: the operation, for messages.
        whole: whether every rank gets the extra tokens; else they stay on part 0.

    Returns:
        The box that this rank needs, with the extra tokens that it has.
    """
    before, pixels, after = apart(tile, dims.of_part(mesh.part))
    image = to_image(pixels, dims.of_pixels, extents)
    image = repartition(image, mesh.grid_comm, plan, name=name)
    pixels = from_image(image, dims.of_pixels, pixels.shape)
    if whole:
        before, after = whole_tokens(tile, dims, mesh, name)
    return torch.cat([before, pixels, after], dims.at[0])


def whole_tokens(tile: Tensor, dims: SpatialDims, mesh: Mesh, name: str) -> tuple[Tensor, Tensor]:
    """The tokens before and after the pixels, on every rank; differentiable.

    Args:
        tile: this rank's.
        dims: the global dims.
        name: the operation, for messages.
    """
    dim, ranks = dims.at[0], mesh.grid_comm.size
    before, _, after = apart(tile, dims.of_part(mesh.part))
    if ranks == 1:
        return before, after
    empty, full = Box(((0, 1), (0, 0))), Box(((0, 1), (0, dims.beside)))
    owned = (full, *(empty,) * (ranks - 1))
    plan = plan_for(owned, (full,) * ranks, mesh.part)
    own = torch.cat([before, after], dim).movedim(dim, -1).unsqueeze(0)
    tokens = repartition(own, mesh.grid_comm, plan, name=name).squeeze(0).movedim(-1, dim)
    before, after = torch.split(tokens, [dims.prefix, dims.suffix], dim)
    return before, after
