"""Which dims of a tensor hold the rows and the columns of a split image.

An image is (N, C, H, W) at first. Networks permute it, (N, H, W, C), or merge rows and columns into
one dim of tokens, (N, H*W, C), or merge samples into it, (N*H*W, C). `SpatialDims` says where rows
and columns are, and `to_image` turns any such tile back into a view (..., h, w), in which all
communication is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor


class SpatialDims(NamedTuple):
    """Where rows and columns are, counted from the end, so that leading dims may come and go.

    Attributes:
        rows: the dim of the rows, negative.
        cols: the dim of the columns, negative; equal to `rows`: both are merged into one dim of
            tokens, row by row.
        outer_rows: a factor in front of the rows within their dim: (N*H) has N.
        outer_cols: likewise for the columns; 1 if merged.
    """

    rows: int = -2
    cols: int = -1
    outer_rows: int = 1
    outer_cols: int = 1

    @property
    def merged(self) -> bool:
        return self.rows == self.cols

    def holds(self, dim: int, of: int) -> bool:
        """Whether dim `dim` of a tensor with `of` dims holds rows or columns."""
        return dim % of - of in (self.rows, self.cols)

    def sizes(self, shape: Sequence[int], height: int, width: int) -> tuple[int, ...]:
        """`shape` with the sizes of the dims that hold rows and columns put in."""
        sizes = list(shape)
        if self.merged:
            sizes[self.rows] = self.outer_rows * height * width
        else:
            sizes[self.rows] = self.outer_rows * height
            sizes[self.cols] = self.outer_cols * width
        return tuple(sizes)

    def describe(self) -> str:
        """Short text for messages."""
        if self.merged:
            return f", rows and columns merged in dim {self.rows}"
        return "" if self == IMAGE else f", rows in dim {self.rows}, columns in dim {self.cols}"


IMAGE = SpatialDims()
"""Rows and columns are the last two dims."""

TOKENS = SpatialDims(-1, -1)
"""Rows and columns are merged in the last dim."""


def are_tokens(shape: Sequence[int], dims: SpatialDims) -> bool:
    """Whether a tensor of `shape` is (N, C, H*W).

    A view of an image of one row keeps this row in the dim of the channels.
    """
    one_row = dims.outer_rows > 1 and dims == SpatialDims(-2, -1, shape[-2])
    return len(shape) == 3 and (dims == TOKENS or one_row)


def _unmerged(
    shape: Sequence[int], dims: SpatialDims, height: int, width: int
) -> tuple[list[int], int, int]:
    """`shape` with rows and columns each in a dim of its own, and which dims these are."""
    sizes: list[int] = []
    row = col = 0
    for dim, size in enumerate(shape, start=-len(shape)):
        if dim == dims.rows:
            sizes += [dims.outer_rows] if dims.outer_rows > 1 else []
            row = len(sizes)
            sizes.append(height)
        if dim == dims.cols:
            sizes += [dims.outer_cols] if dims.outer_cols > 1 else []
            col = len(sizes)
            sizes.append(width)
        if dim not in (dims.rows, dims.cols):
            sizes.append(size)
    return sizes, row, col


def to_image(tensor: Tensor, dims: SpatialDims, height: int, width: int) -> Tensor:
    """`tensor`, of `height` rows and `width` columns, as (..., height, width) with 3 dims or more.

    A view wherever `tensor` allows one.
    """
    if dims == IMAGE:
        return tensor if tensor.dim() > 2 else tensor.unsqueeze(0)
    sizes, row, col = _unmerged(tensor.shape, dims, height, width)
    image = tensor.reshape(sizes).movedim((row, col), (-2, -1))
    return image if image.dim() > 2 else image.unsqueeze(0)


def from_image(image: Tensor, dims: SpatialDims, shape: Sequence[int]) -> Tensor:
    """The inverse of `to_image`, for a tensor of `shape` but for its rows and columns."""
    height, width = image.shape[-2:]
    if dims == IMAGE:
        return image if len(shape) > 2 else image.squeeze(0)
    sizes, row, col = _unmerged(shape, dims, height, width)
    if len(sizes) == 2:
        image = image.squeeze(0)
    return image.movedim((-2, -1), (row, col)).reshape(dims.sizes(shape, height, width))


def samples_of(shape: Sequence[int], dims: SpatialDims) -> int:
    """The size of the first dim of what `to_image` gives."""
    if dims == IMAGE:
        return shape[0] if len(shape) > 2 else 1
    sizes, row, col = _unmerged(shape, dims, 1, 1)
    others = [size for dim, size in enumerate(sizes) if dim not in (row, col)]
    return others[0] if others else 1


# --- views: the same pixels under other dims


class View(NamedTuple):
    """How a view regroups the dims of a split tensor.

    Attributes:
        dims: where rows and columns are afterwards.
        shape: the new shape, any number where rows and columns are.
        row_step: the cut of the rows must lie at multiples of this, one new row being so many old.
        row_factor: one old row (of `row_step`) becomes so many new ones.
        col_step, col_factor: likewise for columns.
    """

    dims: SpatialDims
    shape: tuple[int, ...]
    row_step: int
    row_factor: int
    col_step: int
    col_factor: int


class _Factor(NamedTuple):
    size: int
    kind: str  # "rows", "cols" or "" for what is not split


def regroup(
    shape: Sequence[int], new_shape: Sequence[int], dims: SpatialDims, height: int, width: int
) -> View | None:
    """How rows and columns fare when a tensor of the global `shape` is viewed as `new_shape`.

    Returns:
        None if rows and columns do not stay together: cut in two, or mixed with other dims.
    """
    if prod(shape) == 0 or prod(shape) != prod(new_shape):
        return None
    factors = _factors(shape, dims, height, width)
    groups: list[list[_Factor]] = []
    for number, size in enumerate(new_shape):
        follower = new_shape[number + 1] if number + 1 < len(new_shape) else None
        group = _take(factors, size, follower)
        if group is None:
            return None
        groups.append(group)
    return _view_of(groups, new_shape, height, width)


def _factors(shape: Sequence[int], dims: SpatialDims, height: int, width: int) -> list[_Factor]:
    """The global shape as factors, slowest first; the last element is the first."""
    factors: list[_Factor] = []
    for dim, size in enumerate(shape, start=-len(shape)):
        if dim == dims.rows:
            factors += [_Factor(dims.outer_rows, ""), _Factor(height, "rows")]
        if dim == dims.cols:
            factors += [_Factor(dims.outer_cols, ""), _Factor(width, "cols")]
        if dim not in (dims.rows, dims.cols):
            factors.append(_Factor(size, ""))
    return [factor for factor in reversed(factors) if factor.kind or factor.size > 1]


def _take(factors: list[_Factor], size: int, follower: int | None) -> list[_Factor] | None:
    """Take the factors of a new dim of `size` off the list, splitting the last if need be."""
    group: list[_Factor] = []
    rest = size
    while rest > 1:
        if not factors:
            return None
        factor = factors.pop()
        if rest % factor.size == 0:
            group.append(factor)
            rest //= factor.size
        elif factor.size % rest == 0:
            group.append(_Factor(rest, factor.kind))
            factors.append(_Factor(factor.size // rest, ""))
            rest = 1
        else:
            return None
    # rows or columns of size 1 need a dim too: one of size 1 of their own, or that of the columns
    # or rows beside them, or the last
    while factors and factors[-1].size == 1:
        if group and follower is not None and (follower == 1 or not group[-1].kind):
            break
        group.append(factors.pop())
    return group


def _view_of(
    groups: list[list[_Factor]], new_shape: Sequence[int], height: int, width: int
) -> View | None:
    found: dict[str, tuple[int, int, int, int]] = {}  # dim, outer, size, inner
    for dim, group in enumerate(groups, start=-len(groups)):
        kinds = [number for number, factor in enumerate(group) if factor.kind]
        if not kinds:
            continue
        first, last = kinds[0], kinds[-1]
        outer = prod(factor.size for factor in group[:first])
        inner = prod(factor.size for factor in group[last + 1 :])
        names = [group[number].kind for number in kinds]
        if len(names) == 2 and (names != ["rows", "cols"] or last - first > 1):
            return None
        for number, name in zip(kinds, names, strict=True):
            # (rows, columns, inner) in one dim: so many times as many columns
            before, after = (outer if number == first else 1), (inner if number == last else 1)
            found[name] = dim, before, group[number].size, after
    if len(found) < 2:
        return None
    (row, outer_rows, rows, row_factor) = found["rows"]
    (col, outer_cols, cols, col_factor) = found["cols"]
    return View(
        SpatialDims(row, col, outer_rows, outer_cols),
        tuple(new_shape),
        height // rows,
        row_factor,
        width // cols,
        col_factor,
    )
