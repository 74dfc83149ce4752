"""The dims of a tensor that hold the spatial dims of a split image.

An image is initially (N, C, H, W), a signal (N, C, L), a volume (N, C, D, H, W). Networks permute
it, (N, H, W, C), merge spatial dims into one dim of tokens, (N, H*W, C), or merge samples into
it, (N*H*W, C). `SpatialDims` records where the spatial dims are. `to_image` turns any such tile
back into a view (..., h, w), on which all communication operates.

Extra tokens of an image belong to no pixel: class and distillation tokens, registers. They are in
the dim into which the spatial dims are merged, before the pixels (prefix) or after them (suffix).
Only the tile of part 0 of the grid has them; the other tiles have pixels only. So operations on all
tokens include them, and their gradients are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.layout import Box, spatial_names


class SpatialDims(NamedTuple):
    """Positions of the spatial dims, counted from the end so that leading dims may change.

    Attributes:
        at: the dim of the tensor, negative, that holds each spatial dim. Consecutive spatial dims
            may share one: they are merged in it, the first one slowest.
        outer: for each spatial dim the factor in front of it within its dim: (N*H) has N. Of
            merged spatial dims the first has the factor, the rest 1.
        prefix: number of entries before the pixels, such as class tokens, where all spatial dims
            are merged in one dim. Part 0 of the grid has them, see `prefix`.
        suffix: number of entries after the pixels.
    """

    at: tuple[int, ...]
    outer: tuple[int, ...]
    prefix: int = 0
    suffix: int = 0

    @classmethod
    def of(cls, *at: int, outer: Sequence[int] = ()) -> SpatialDims:
        return cls(at, tuple(outer) or (1,) * len(at))

    @property
    def is_image(self) -> bool:
        """Whether the spatial dims are the last dims, in order."""
        return self == image_dims(len(self.at))

    @property
    def are_separate(self) -> bool:
        """Whether each spatial dim is a separate dim without a factor."""
        return len(set(self.at)) == len(self.at) and set(self.outer) == {1}

    @property
    def is_flat(self) -> bool:
        """Whether all spatial dims are in the last dim, as after ``flatten(1)``."""
        return set(self.at) == {-1}

    @property
    def extra_tokens(self) -> int:
        """The number of entries that belong to no pixel."""
        return self.prefix + self.suffix

    @property
    def of_pixels(self) -> SpatialDims:
        """These dims without entries that belong to no pixel."""
        return self._replace(prefix=0, suffix=0) if self.extra_tokens else self

    def of_part(self, part: int) -> SpatialDims:
        """The dims of the tile of a part of the grid."""
        return self if part == 0 else self.of_pixels

    def holds(self, dim: int, of: int) -> bool:
        """Whether dim `dim` of a tensor with `of` dims holds a spatial dim."""
        return dim % of - of in self.at

    def map_dims(self, to: Callable[[int], int]) -> SpatialDims:
        """These dims with each position mapped by `to`."""
        return self._replace(at=tuple(map(to, self.at)))

    def sizes(self, shape: Sequence[int], extents: Sequence[int]) -> tuple[int, ...]:
        """`shape` with the sizes that its dims have if the spatial dims have `extents`."""
        sizes = list(shape)
        for dim in self.at:
            sizes[dim] = 1
        for dim, outer, extent in zip(self.at, self.outer, extents, strict=True):
            sizes[dim] *= outer * extent
        sizes[self.at[0]] += self.extra_tokens
        return tuple(sizes)

    def describe(self) -> str:
        """A short description for messages."""
        if self.is_image:
            return ""
        names = spatial_names(len(self.at))
        if len(set(self.at)) == 1 and len(names) > 1:
            beside = [
                f"{count} tokens {where} them"
                for count, where in ((self.prefix, "before"), (self.suffix, "after"))
                if count
            ]
            text = f", {' and '.join(names)} merged in dim {self.at[0]}"
            return text + (f" with {' and '.join(beside)}" if beside else "")
        return "".join(f", {name} in dim {dim}" for name, dim in zip(names, self.at, strict=True))


@lru_cache
def image_dims(count: int) -> SpatialDims:
    """The dims of an image with `count` spatial dims: the last ones."""
    return SpatialDims.of(*range(-count, 0))


@lru_cache
def token_dims(count: int) -> SpatialDims:
    """The dims of (..., tokens): all `count` spatial dims are merged in the last dim."""
    return SpatialDims.of(*(-1,) * count)


def are_tokens(shape: Sequence[int], dims: SpatialDims) -> bool:
    """Whether a tensor of `shape` is (N, C, tokens).

    A view of an image of one row keeps the row in the channel dim.
    """
    if len(shape) != 3:
        return False
    before = len(dims.at) - 1
    one_row = SpatialDims.of(*(-2,) * before, -1, outer=(shape[-2], *(1,) * before))
    return dims == token_dims(len(dims.at)) or (before > 0 and dims == one_row)


def separate_dims(
    shape: Sequence[int], dims: SpatialDims, extents: Sequence[int]
) -> tuple[list[int], list[int]]:
    """`shape` with each spatial dim, of `extents`, as a separate dim, and these dims."""
    sizes: list[int] = []
    where = [0] * len(extents)
    for dim, size in enumerate(shape, start=-len(shape)):
        if dim not in dims.at:
            sizes.append(size)
            continue
        for number, (at, outer) in enumerate(zip(dims.at, dims.outer, strict=True)):
            if at == dim:
                sizes += [outer] if outer > 1 else []
                where[number] = len(sizes)
                sizes.append(extents[number])
    return sizes, where


def to_image(tensor: Tensor, dims: SpatialDims, extents: Sequence[int]) -> Tensor:
    """`tensor` as (..., *extents), with at least one dim before the spatial dims.

    A view if the strides of `tensor` allow one.
    """
    count = len(extents)
    _check_pixels(dims)
    if not dims.is_image:
        sizes, where = separate_dims(tensor.shape, dims, extents)
        tensor = tensor.reshape(sizes).movedim(where, image_dims(count).at)
    return tensor if tensor.dim() > count else tensor.unsqueeze(0)


def from_image(image: Tensor, dims: SpatialDims, shape: Sequence[int]) -> Tensor:
    """The inverse of `to_image`, for a tensor of `shape` except for its spatial dims."""
    count = len(dims.at)
    _check_pixels(dims)
    extents = image.shape[-count:]
    if dims.is_image:
        return image if len(shape) > count else image.squeeze(0)
    sizes, where = separate_dims(shape, dims, extents)
    if len(sizes) == count:
        image = image.squeeze(0)
    return image.movedim(image_dims(count).at, where).reshape(dims.sizes(shape, extents))


def _check_pixels(dims: SpatialDims) -> None:
    if dims.extra_tokens:
        raise UnsupportedSpatialOp(
            f"tokens split{dims.describe()} cannot be viewed as an image: slice off the tokens "
            "that belong to no pixel"
        )


def samples_of(shape: Sequence[int], dims: SpatialDims) -> int:
    """The size of the first dim of the result of `to_image`."""
    count = len(dims.at)
    if dims.is_image:
        return shape[0] if len(shape) > count else 1
    sizes, where = separate_dims(shape, dims, (1,) * count)
    others = [size for dim, size in enumerate(sizes) if dim not in where]
    return others[0] if others else 1


# --- views


class View(NamedTuple):
    """A regrouping of the dims of a split tensor.

    Attributes:
        dims: the spatial dims afterwards.
        shape: the new shape; sizes of dims with spatial dims are not used.
        steps: for each spatial dim, the multiples at which it must be cut: `steps` old rows
            become `factors` new ones.
        factors: see `steps`.
    """

    dims: SpatialDims
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    factors: tuple[int, ...]


class _Factor(NamedTuple):
    size: int
    spatial: int | None = None  # number of the spatial dim; None if not split


class _Place(NamedTuple):
    """The dim of a spatial dim after a view, and the factors before and after it there."""

    dim: int
    outer: int
    size: int
    inner: int


def regroup(
    shape: Sequence[int], new_shape: Sequence[int], dims: SpatialDims, extents: Sequence[int]
) -> View | None:
    """The regrouping of a tensor of the global `shape` that is viewed as `new_shape`.

    Args:
        extents: global sizes of the spatial dims.

    Returns:
        None if a spatial dim is cut in two or mixed with other dims.
    """
    if prod(shape) == 0 or prod(shape) != prod(new_shape):
        return None
    if dims.extra_tokens:
        return _regroup_tokens(shape, new_shape, dims, extents)
    factors = _factors(shape, dims, extents)
    groups: list[list[_Factor]] = []
    for number, size in enumerate(new_shape):
        follower = new_shape[number + 1] if number + 1 < len(new_shape) else None
        group = _take(factors, size, follower)
        if group is None:
            return None
        groups.append(group)
    return _view_of(groups, new_shape, extents)


def _regroup_tokens(
    shape: Sequence[int], new_shape: Sequence[int], dims: SpatialDims, extents: Sequence[int]
) -> View | None:
    """`regroup` for a dim with tokens that belong to no pixel; it stays one dim."""
    dim, others = dims.at[0], (1,) * (len(dims.at) - 1)
    view = regroup(shape, new_shape, SpatialDims.of(dim), (shape[dim],))
    if view is None or view.dims.outer != (1,):
        return None
    (step,), (factor,) = view.steps, view.factors
    if any(size % step for size in (dims.prefix, extents[-1], dims.suffix)):
        return None
    prefix, suffix = (size // step * factor for size in (dims.prefix, dims.suffix))
    regrouped = SpatialDims(view.dims.at * len(dims.at), dims.outer, prefix, suffix)
    return View(regrouped, tuple(new_shape), (*others, step), (*others, factor))


def _factors(shape: Sequence[int], dims: SpatialDims, extents: Sequence[int]) -> list[_Factor]:
    """The factors of the global shape in reverse order: the slowest is last."""
    factors: list[_Factor] = []
    for dim, size in enumerate(shape, start=-len(shape)):
        if dim not in dims.at:
            factors.append(_Factor(size))
            continue
        for number, (at, outer) in enumerate(zip(dims.at, dims.outer, strict=True)):
            if at == dim:
                factors += [_Factor(outer), _Factor(extents[number], number)]
    return [f for f in reversed(factors) if f.spatial is not None or f.size > 1]


def _take(factors: list[_Factor], size: int, follower: int | None) -> list[_Factor] | None:
    """Pop the factors of a new dim of `size` off the list, splitting the last if necessary."""
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
            group.append(_Factor(rest, factor.spatial))
            factors.append(_Factor(factor.size // rest))
            rest = 1
        else:
            return None
    # A spatial dim of size 1 needs a dim too: a separate one of size 1, its neighbour's, or the
    # last.
    while factors and factors[-1].size == 1:
        if group and follower is not None and (follower == 1 or group[-1].spatial is None):
            break
        group.append(factors.pop())
    return group


def _view_of(
    groups: list[list[_Factor]], new_shape: Sequence[int], extents: Sequence[int]
) -> View | None:
    placed: dict[int, _Place] = {}
    for dim, group in enumerate(groups, start=-len(groups)):
        places = [number for number, factor in enumerate(group) if factor.spatial is not None]
        if not places:
            continue
        first, last = places[0], places[-1]
        spatial = [number for number in (factor.spatial for factor in group) if number is not None]
        in_turn = all(later == sooner + 1 for sooner, later in pairwise(spatial))
        if not in_turn or last - first >= len(places):
            return None
        outer = prod(factor.size for factor in group[:first])
        inner = prod(factor.size for factor in group[last + 1 :])
        for place, number in zip(places, spatial, strict=True):
            # (rows, columns, inner) in one dim: `inner` multiplies the columns.
            before, behind = (outer if place == first else 1), (inner if place == last else 1)
            placed[number] = _Place(dim, before, group[place].size, behind)
    if len(placed) < len(extents):
        return None
    ordered = [placed[number] for number in range(len(extents))]
    return View(
        SpatialDims.of(*(each.dim for each in ordered), outer=[each.outer for each in ordered]),
        tuple(new_shape),
        tuple(extent // each.size for extent, each in zip(extents, ordered, strict=True)),
        tuple(each.inner for each in ordered),
    )


# --- extra tokens


def split_tokens(tensor: Tensor, dims: SpatialDims) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the tokens before the pixels, the pixels, and the tokens after them.

    Args:
        tensor: a whole tensor, or the tile of a part.
        dims: of `tensor`; for a tile those of its part.
    """
    dim = dims.at[0]
    pixels = tensor.shape[dim] - dims.extra_tokens
    before, own, after = torch.split(tensor, [dims.prefix, pixels, dims.suffix], dim)
    return before, own, after


def move_tokens(
    tile: Tensor,
    dims: SpatialDims,
    extents: Sequence[int],
    plan: Plan,
    mesh: Mesh,
    name: str,
    gathers_tokens: bool,
) -> Tensor:
    """Move the pixels of a tile by a plan; differentiable.

    Args:
        tile: this rank's.
        dims: the global dims.
        extents: of this rank's box.
        plan: moves the pixels.
        name: the operation, for messages.
        gathers_tokens: whether every rank gets the extra tokens; else they stay on part 0.

    Returns:
        The box that this rank needs, with the extra tokens that it has.
    """
    before, pixels, after = split_tokens(tile, dims.of_part(mesh.part))
    image = to_image(pixels, dims.of_pixels, extents)
    image = repartition(image, mesh.grid_comm, plan, name=name)
    pixels = from_image(image, dims.of_pixels, pixels.shape)
    if gathers_tokens:
        before, after = gather_tokens(tile, dims, mesh, name)
    return torch.cat([before, pixels, after], dims.at[0])


def gather_tokens(tile: Tensor, dims: SpatialDims, mesh: Mesh, name: str) -> tuple[Tensor, Tensor]:
    """The tokens before and after the pixels, on every rank; differentiable.

    Args:
        tile: this rank's.
        dims: the global dims.
        name: the operation, for messages.
    """
    dim, ranks = dims.at[0], mesh.grid_comm.size
    before, _, after = split_tokens(tile, dims.of_part(mesh.part))
    if ranks == 1:
        return before, after
    empty, full = Box(((0, 1), (0, 0))), Box(((0, 1), (0, dims.extra_tokens)))
    owned = (full, *(empty,) * (ranks - 1))
    plan = plan_for(owned, (full,) * ranks, mesh.part)
    own = torch.cat([before, after], dim).movedim(dim, -1).unsqueeze(0)
    tokens = repartition(own, mesh.grid_comm, plan, name=name).squeeze(0).movedim(-1, dim)
    before, after = torch.split(tokens, [dims.prefix, dims.suffix], dim)
    return before, after
