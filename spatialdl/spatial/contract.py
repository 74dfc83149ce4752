"""Sums of products over dims: what matmul, einsum, linear layers and attention have in common.

Every dim of every operand has a letter, as in einsum. The *first* split operand says which letters
are split. Other operands come to it: a whole tensor takes its own box along these letters; a split
one with the same letters is brought onto the same layout; one whose rows or columns carry other
letters (the keys and values of attention) is gathered along them. A split letter that the result
lacks was summed over: then each rank has a part of the sum, and the ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from torch import Tensor

from spatialdl.comm.plan import plan_for
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.comm.repartition import repartition
from spatialdl.layout import Box, Layout
from spatialdl.mesh import Mesh
from spatialdl.spatial.dims import SpatialDims, from_image
from spatialdl.spatial.operands import cut
from spatialdl.spatial.table import refusal
from spatialdl.spatial.tensor import SpatialTensor, from_tile, image_of, to_tile


class Split(NamedTuple):
    """Which letters of a contraction are split, and how."""

    rows: str
    cols: str
    outer: tuple[int, int]
    layout: Layout
    mesh: Mesh

    @classmethod
    def of(cls, x: SpatialTensor, letters: str) -> Split:
        dims = x.spatial_dims
        outer = dims.outer_rows, dims.outer_cols
        return cls(letters[dims.rows], letters[dims.cols], outer, x.spatial_layout, x.mesh)

    def dims_in(self, letters: str) -> SpatialDims:
        """Where rows and columns are in a tensor with these letters, which has both."""
        count = len(letters)
        return SpatialDims(
            letters.index(self.rows) - count, letters.index(self.cols) - count, *self.outer
        )


def contract(
    func: Any,
    operands: Sequence[Tensor],
    letters: Sequence[str],
    result: str,
    local: Callable[..., Tensor],
    linear: bool = True,
) -> Tensor:
    """A contraction of operands of which some are split.

    Args:
        func: what was called, for refusals.
        letters: a letter for every dim of every operand; equal letters have equal sizes, or 1.
        result: the letters of the result.
        local: the same on the operands as this rank has them.
        linear: whether parts of the sum may be added up over ranks.

    Returns:
        A split tensor if the result has the split letters, else a plain one, the same everywhere.
    """
    leader = next(n for n, x in enumerate(operands) if isinstance(x, SpatialTensor))
    first = cast(SpatialTensor, operands[leader])
    split = Split.of(first, letters[leader])
    gone = {split.rows, split.cols} - set(result)
    if gone and (not linear or (split.rows != split.cols and len(gone) == 1)):
        raise refusal(func, [first], "it sums over rows or columns in a way that is not supported")
    brought = [
        to_tile(first) if number == leader else _bring(func, x, names, split)
        for number, (x, names) in enumerate(zip(operands, letters, strict=True))
    ]
    y = local(*brought)
    if gone:
        return differentiable_sum(split.mesh.grid_comm, y, getattr(func, "__name__", "contract"))
    return from_tile(y, split.layout, split.mesh, split.dims_in(result))


def _bring(func: Any, x: Tensor, letters: str, split: Split) -> Tensor:
    """An operand as this rank needs it."""
    own = split.mesh.own_box(split.layout)
    if isinstance(x, SpatialTensor):
        return _bring_split(func, x, letters, split, own)
    height, width = split.layout.size[1:]
    if split.rows == split.cols and split.rows in letters:
        dims = split.dims_in(letters)
        return cut(x, dims, (height, width), (own.row0, own.row1), (own.col0, own.col1))
    for letter, outer, size, start, stop in (
        (split.rows, split.outer[0], height, own.row0, own.row1),
        (split.cols, split.outer[1], width, own.col0, own.col1),
    ):
        if letter in letters and split.rows != split.cols:
            x = _cut_dim(x, letters.index(letter), outer, size, start, stop)
    return x


def _cut_dim(x: Tensor, dim: int, outer: int, size: int, start: int, stop: int) -> Tensor:
    if x.shape[dim] == 1:
        return x
    parts = x.reshape(*x.shape[:dim], outer, size, *x.shape[dim + 1 :])
    return parts.narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)


def _bring_split(func: Any, x: SpatialTensor, letters: str, split: Split, own: Box) -> Tensor:
    theirs = Split.of(x, letters)
    clashes = (theirs.rows != split.rows, theirs.cols != split.cols)
    foreign = {split.rows, split.cols} & (set(letters) - {theirs.rows, theirs.cols})
    mixed = {theirs.rows, theirs.cols} & {split.rows, split.cols} if all(clashes) else set()
    if foreign or mixed or x.mesh is not split.mesh:
        raise refusal(func, [x], "two split operands have rows and columns at other dims")
    for clash, ours, other in zip(
        clashes,
        zip(split.outer, split.layout.size[1:], strict=True),
        zip(theirs.outer, theirs.layout.size[1:], strict=True),
        strict=True,
    ):
        if not clash and ours != other:
            raise refusal(func, [x], "two split operands of different sizes meet")
    needs = _needs(x.spatial_layout, split.layout, clashes)
    plan = plan_for(x.spatial_layout.boxes, needs, x.mesh.part)
    if needs == x.spatial_layout.boxes:
        return to_tile(x)
    image = repartition(image_of(x), x.mesh.grid_comm, plan, name="operand of a product")
    return from_image(image, x.spatial_dims, x._tile.shape)


@lru_cache(maxsize=4096)
def _needs(theirs: Layout, split: Layout, clashes: tuple[bool, bool]) -> tuple[Box, ...]:
    """Per rank: everything along rows or columns that clash, its own box of `split` otherwise."""
    samples, height, width = theirs.size
    return tuple(
        Box(
            0,
            samples,
            *((0, height) if clashes[0] else (box.row0, box.row1)),
            *((0, width) if clashes[1] else (box.col0, box.col1)),
        )
        for box in split.boxes
    )
