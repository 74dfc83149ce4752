"""Which dims of a tensor hold the spatial dims of a split image.

An image is (N, C, H, W) at first, a signal (N, C, L), a volume (N, C, D, H, W). Networks permute
it, (N, H, W, C), or merge spatial dims into one dim of tokens, (N, H*W, C), or merge samples into
it, (N*H*W, C). `SpatialDims` says where the spatial dims are, and `to_image` turns any such tile
back into a view (..., h, w), in which all communication is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from torch import Tensor

from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.parallel.layout import spatial_names


class SpatialDims(NamedTuple):
    """Where the spatial dims are, counted from the end, so that leading dims may come and go.

    Attributes:
        at: for each spatial dim the dim of the tensor that holds it, negative. Spatial dims that
            follow on each other may share one: they are merged in it, the first the slowest.
        outer: for each spatial dim a factor in front of it within its dim: (N*H) has N. Of merged
            ones the first has it, and the others 1.
        prefix: of spatial dims merged in one dim: so many entries of this dim come before those of
            the pixels, as class tokens do. Part 0 of the grid has them, see `prefix`.
        suffix: so many come after them.
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
        """Whether the spatial dims are the last dims, in their order."""
        return self == image_dims(len(self.at))

    @property
    def apart(self) -> bool:
        """Whether each spatial dim has a dim of its own, without a factor."""
        return len(set(self.at)) == len(self.at) and set(self.outer) == {1}

    @property
    def is_flat(self) -> bool:
        """Whether all spatial dims are in the last dim, as after ``flatten(1)``."""
        return set(self.at) == {-1}

    @property
    def beside(self) -> int:
        """How many entries belong to no pixel."""
        return self.prefix + self.suffix

    @property
    def of_pixels(self) -> SpatialDims:
        """The same without entries that belong to no pixel."""
        return self._replace(prefix=0, suffix=0) if self.beside else self

    def of_part(self, part: int) -> SpatialDims:
        """Those of the tile of a part of the grid."""
        return self if part == 0 else self.of_pixels

    def holds(self, dim: int, of: int) -> bool:
        """Whether dim `dim` of a tensor with `of` dims holds a spatial dim."""
        return dim % of - of in self.at

    def moved(self, to: Callable[[int], int]) -> SpatialDims:
        """The same with every dim where `to` says that it is now."""
        return self._replace(at=tuple(map(to, self.at)))

    def sizes(self, shape: Sequence[int], extents: Sequence[int]) -> tuple[int, ...]:
        """`shape` with the sizes of the dims that hold spatial dims of `extents` put in."""
        sizes = list(shape)
        for dim in self.at:
            sizes[dim] = 1
        for dim, outer, extent in zip(self.at, self.outer, extents, strict=True):
            sizes[dim] *= outer * extent
        sizes[self.at[0]] += self.beside
        return tuple(sizes)

    def describe(self) -> str:
        """Short text for messages."""
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
    """Of an image with so many spatial dims: they are the last ones."""
    return SpatialDims.of(*range(-count, 0))


@lru_cache
def token_dims(count: int) -> SpatialDims:
    """Of (..., tokens): all spatial dims are merged in the last dim."""
    return SpatialDims.of(*(-1,) * count)


def are_tokens(shape: Sequence[int], dims: SpatialDims) -> bool:
    """Whether a tensor of `shape` is (N, C, tokens).

    A view of an image of one row keeps this row in the dim of the channels.
    """
    if len(shape) != 3:
        return False
    before = len(dims.at) - 1
    one_row = SpatialDims.of(*(-2,) * before, -1, outer=(shape[-2], *(1,) * before))
    return dims == token_dims(len(dims.at)) or (before > 0 and dims == one_row)


def unmerged(
    shape: Sequence[int], dims: SpatialDims, extents: Sequence[int]
) -> tuple[list[int], list[int]]:
    """`shape` with spatial dims of `extents` in dims of their own, and which dims these are."""
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
    """`tensor` as (..., *extents), with a dim or more before the spatial dims, of `extents`.

    A view wherever `tensor` allows one.
    """
    count = len(extents)
    _check_pixels(dims)
    if not dims.is_image:
        sizes, where = unmerged(tensor.shape, dims, extents)
        tensor = tensor.reshape(sizes).movedim(where, image_dims(count).at)
    return tensor if tensor.dim() > count else tensor.unsqueeze(0)


def from_image(image: Tensor, dims: SpatialDims, shape: Sequence[int]) -> Tensor:
    """The inverse of `to_image`, for a tensor of `shape` but for its spatial dims."""
    count = len(dims.at)
    _check_pixels(dims)
    extents = image.shape[-count:]
    if dims.is_image:
        return image if len(shape) > count else image.squeeze(0)
    sizes, where = unmerged(shape, dims, extents)
    if len(sizes) == count:
        image = image.squeeze(0)
    return image.movedim(image_dims(count).at, where).reshape(dims.sizes(shape, extents))


def _check_pixels(dims: SpatialDims) -> None:
    if dims.beside:
        raise UnsupportedSpatialOp(
            f"an image cannot be made of tokens split{dims.describe()}: slice off those that "
            "belong to no pixel"
        )


def samples_of(shape: Sequence[int], dims: SpatialDims) -> int:
    """The size of the first dim of what `to_image` gives."""
    count = len(dims.at)
    if dims.is_image:
        return shape[0] if len(shape) > count else 1
    sizes, where = unmerged(shape, dims, (1,) * count)
    others = [size for dim, size in enumerate(sizes) if dim not in where]
    return others[0] if others else 1


# --- views: the same pixels under other dims


class View(NamedTuple):
    """How a view regroups the dims of a split tensor.

    Attributes:
        dims: where the spatial dims are afterwards.
        shape: the new shape, any number where spatial dims are.
        steps: for each spatial dim: it must be cut at multiples of this; so many old rows, say,
            become `factors` new ones.
        factors: so many.
    """

    dims: SpatialDims
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    factors: tuple[int, ...]


class _Factor(NamedTuple):
    size: int
    spatial: int | None = None  # which spatial dim; None for what is not split


class _Place(NamedTuple):
    """Where a spatial dim is after a view: its dim, and the factors before and behind it there."""

    dim: int
    outer: int
    size: int
    inner: int


def regroup(
    shape: Sequence[int], new_shape: Sequence[int], dims: SpatialDims, extents: Sequence[int]
) -> View | None:
    """How spatial dims fare when a tensor of the global `shape` is viewed as `new_shape`.

    Args:
        extents: global sizes of the spatial dims.

    Returns:
        None if a spatial dim does not stay together: cut in two, or mixed with other dims.
    """
    if prod(shape) == 0 or prod(shape) != prod(new_shape):
        return None
    if dims.beside:
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
    """The same where tokens without pixels are in the dim, which stays together as one."""
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
    """The global shape as factors, slowest first; the last element is the first."""
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
            group.append(_Factor(rest, factor.spatial))
            factors.append(_Factor(factor.size // rest))
            rest = 1
        else:
            return None
    # a spatial dim of size 1 needs a dim too: one of size 1 of its own, or that of its neighbour,
    # or the last
    while factors and factors[-1].size == 1:
        if group and follower is not None and (follower == 1 or group[-1].spatial is None):
            break
        group.append(factors.pop())
    return group


def _view_of(
    groups: list[list[_Factor]], new_shape: Sequence[int], extents: Sequence[int]
) -> View | None:
    found: dict[int, _Place] = {}
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
            # (rows, columns, inner) in one dim: so many times as many columns
            before, behind = (outer if place == first else 1), (inner if place == last else 1)
            found[number] = _Place(dim, before, group[place].size, behind)
    if len(found) < len(extents):
        return None
    ordered = [found[number] for number in range(len(extents))]
    return View(
        SpatialDims.of(*(each.dim for each in ordered), outer=[each.outer for each in ordered]),
        tuple(new_shape),
        tuple(extent // each.size for extent, each in zip(extents, ordered, strict=True)),
        tuple(each.inner for each in ordered),
    )
