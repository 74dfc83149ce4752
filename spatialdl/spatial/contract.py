"""Tensor contractions: the common core of matmul, einsum, linear layers and attention.

Every dim of every operand has a letter, as in einsum. One split operand, the leader, determines
the split letters: the first one whose split letters are in the result (for an exception see
`_leader`). The other operands are brought to its layout:

- A whole tensor is cut to the own box along these letters.
- A tensor split along the same letters is repartitioned to the same layout.
- A tensor split along other letters (the keys and values of attention) is gathered along them. If
  it has the leader's split letters whole, the split is exchanged instead: its letters become
  whole, and the leader's are split.

If the result lacks the split letters, they are summed over: each rank has a partial sum, and the
partial sums are added over the ranks. If instead a matrix maps the pixels to new pixels, the new
ones are split as the old ones were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.comm.repartition import repartition
from spatialdl.layout.layout import Bounds, Box, Layout
from spatialdl.spatial.by_parts import by_parts
from spatialdl.spatial.dims import SpatialDims, from_image, to_image
from spatialdl.spatial.operands import cut
from spatialdl.spatial.table import refusal
from spatialdl.spatial.tensor import SpatialTensor, from_tile, move_pixels, to_tile


class SplitLetters(NamedTuple):
    """The split letters of a contraction, and their layout.

    Attributes:
        letters: one per spatial dim; merged dims share one.
        dims: their positions in the operand.
    """

    letters: tuple[str, ...]
    dims: SpatialDims
    layout: Layout
    mesh: Mesh

    @classmethod
    def of(cls, x: SpatialTensor, letters: str) -> SplitLetters:
        dims = x.spatial_dims
        return cls(tuple(letters[dim] for dim in dims.at), dims, x.spatial_layout, x.mesh)

    def dims_in(self, letters: str) -> SpatialDims:
        """The spatial dims in a tensor with `letters`, which include all split letters."""
        at = (letters.index(letter) - len(letters) for letter in self.letters)
        return self.dims._replace(at=tuple(at))


def contract(
    func: Any,
    operands: Sequence[Tensor],
    letters: Sequence[str],
    result: str,
    local: Callable[..., Tensor],
    linear: bool = True,
) -> Tensor:
    """Contract operands of which some are split.

    Args:
        func: the called function, for errors.
        letters: a letter for every dim of every operand; equal letters have equal sizes, or 1.
        result: the letters of the result.
        local: the contraction of the operands on this rank.
        linear: whether partial sums may be added over ranks.

    Returns:
        A split tensor if the result has the split letters, else a plain one, equal on all ranks.
    """
    leader = _leader(operands, letters, result)
    first = cast(SpatialTensor, operands[leader])
    split = SplitLetters.of(first, letters[leader])
    _check_sizes(func, operands, letters, leader, split)
    gone = set(split.letters) - set(result)
    mixed = (
        _split_of_new_pixels(operands, letters, result, leader, split) if linear and gone else None
    )
    if mixed is not None:
        return _map_pixels(func, operands, letters, result, leader, (split, mixed), local)
    if gone and (not linear or gone != set(split.letters)):
        raise refusal(func, [first], "it sums over some split dims and keeps the rest")
    passing = _circulating(operands, letters, leader, split) if linear and not gone else None
    local_operands = [
        to_tile(cast(SpatialTensor, x))
        if number in (leader, passing)
        else local_operand(func, x, names, split)
        for number, (x, names) in enumerate(zip(operands, letters, strict=True))
    ]
    if passing is None:
        y = local(*local_operands)
    else:
        y = by_parts(
            local, local_operands, letters, result, passing, cast(SpatialTensor, operands[passing])
        )
    if gone:
        return differentiable_sum(split.mesh.grid_comm, y, getattr(func, "__name__", "contract"))
    return from_tile(y, split.layout, split.mesh, split.dims_in(result))


def _check_sizes(
    func: Any, operands: Sequence[Tensor], letters: Sequence[str], leader: int, split: SplitLetters
) -> None:
    """Refuse to broadcast a split dim of size 1, which is empty on most ranks."""
    for letter in set(split.letters):
        size = operands[leader].shape[letters[leader].index(letter)]
        for x, names in zip(operands, letters, strict=True):
            if letter in names and x.shape[names.index(letter)] not in (1, size):
                raise refusal(
                    func,
                    [cast(SpatialTensor, operands[leader])],
                    "a split dim of size 1 cannot be broadcast",
                )


def _leader(operands: Sequence[Tensor], letters: Sequence[str], result: str) -> int:
    """The operand that determines the split: the first one that keeps its split letters.

    If no operand keeps them, the first split one.

    Exception: queries split within windows and keys split by windows. Each query would need the
    keys of all windows. The queries have the windows whole, so the keys lead: each rank gets all
    queries of its own windows, which are no more than it had.
    """
    tensors = {n: x for n, x in enumerate(operands) if isinstance(x, SpatialTensor)}
    splits = {n: SplitLetters.of(x, letters[n]) for n, x in tensors.items()}
    kept = [n for n in splits if set(splits[n].letters) <= set(result)]
    first = (kept or list(splits))[0]
    for number in kept[1:]:
        is_apart = not set(splits[first].letters) & set(letters[number])
        if is_apart and _has_whole(tensors[first], letters[first], splits[number]):
            return number
    return first


def _has_whole(x: SpatialTensor, letters: str, split: SplitLetters) -> bool:
    """Whether `x` is split along other letters and has those of `split` whole."""
    own = set(SplitLetters.of(x, letters).letters)
    if own & set(split.letters) or not set(split.letters) <= set(letters):
        return False
    if x.mesh is not split.mesh or x.spatial_dims.extra_tokens or split.dims.extra_tokens:
        return False
    shape = tuple(x.shape)
    return split.dims_in(letters).sizes(shape, split.layout.size) == shape


def _split_of_new_pixels(
    operands: Sequence[Tensor],
    letters: Sequence[str],
    result: str,
    leader: int,
    split: SplitLetters,
) -> SplitLetters | None:
    """The split of the result if a whole matrix maps the pixels of one dim to new pixels.

    An equal number of new pixels keeps the layout. Another number along rows or columns alone is
    cut evenly. Another number for all spatial dims is not an image and the result is a whole
    tensor: None.
    """
    gone = set(split.letters) - set(result)
    others = [n for n in range(len(operands)) if n != leader]
    if len(others) != 1 or len(gone) > 1:
        return None
    other, names = operands[others[0]], letters[others[0]]
    new = [name for name in names if name in result and name not in letters[leader]]
    if isinstance(other, SpatialTensor) or not gone <= set(names) or len(new) != 1:
        return None
    dims = [number for number, letter in enumerate(split.letters) if letter in gone]
    if any(split.dims.outer[number] > 1 for number in dims):
        return None
    count = other.shape[names.index(new[0])]
    layout = split.layout
    if count != operands[leader].shape[split.dims.at[dims[0]]]:
        if len(dims) > 1 or len(split.letters) == 1:
            return None
        layout = layout.resized(dims[0], count)
    places = tuple(new[0] if letter in gone else letter for letter in split.letters)
    return split._replace(letters=places, layout=layout)


def _map_pixels(
    func: Any,
    operands: Sequence[Tensor],
    letters: Sequence[str],
    result: str,
    leader: int,
    splits: tuple[SplitLetters, SplitLetters],
    local: Callable[..., Tensor],
) -> Tensor:
    """The contraction if a matrix maps all pixels of a dim of the leader to new pixels.

    The parts of all tokens circulate; rows or columns alone are gathered.

    Args:
        splits: of the leader and of the result.
    """
    x, (split, mixed) = cast(SpatialTensor, operands[leader]), splits
    summed = tuple(a != b for a, b in zip(split.letters, mixed.letters, strict=True))
    if all(summed):
        own = to_tile(x)
    else:
        needs = _needs(split.layout, split.layout, summed)
        own = move_pixels(
            x, plan_for(split.layout.boxes, needs, x.mesh.part), "operand of a product"
        )
    local_operands = [
        own if number == leader else local_operand(func, one, names, mixed)
        for number, (one, names) in enumerate(zip(operands, letters, strict=True))
    ]
    by_ring = all(summed) and x.mesh.grid_comm.size > 1
    y = (
        by_parts(local, local_operands, letters, result, leader, x)
        if by_ring
        else local(*local_operands)
    )
    return from_tile(y, mixed.layout, mixed.mesh, mixed.dims_in(result))


def _circulating(
    operands: Sequence[Tensor], letters: Sequence[str], leader: int, split: SplitLetters
) -> int | None:
    """The one operand whose tokens, split along a separate letter, all ranks need; or None."""
    if split.mesh.grid_comm.size == 1:
        return None
    candidates = []
    for number, (x, names) in enumerate(zip(operands, letters, strict=True)):
        if number == leader or not isinstance(x, SpatialTensor) or x.mesh is not split.mesh:
            continue
        theirs = set(SplitLetters.of(x, names).letters)
        if theirs & set(split.letters) or set(names) & set(split.letters):
            return None
        if len(theirs) > 1 or set(x.spatial_dims.outer) != {1}:
            return None
        candidates.append(number)
    return candidates[0] if len(candidates) == 1 else None


def local_operand(func: Any, x: Tensor, letters: str, split: SplitLetters) -> Tensor:
    """The part of an operand that this rank needs."""
    own = split.mesh.own_box(split.layout)
    if isinstance(x, SpatialTensor):
        return _local_split_operand(func, x, letters, split, own)
    cuts = [
        (letters.index(letter) - len(letters), *rest)
        for letter, *rest in zip(
            split.letters, split.dims.outer, split.layout.size, own.spatial, strict=True
        )
        if letter in letters
    ]
    if not cuts:
        return x
    at, outer, size, intervals = zip(*cuts, strict=True)
    dims = split.dims._replace(at=at, outer=outer)
    return cut(x, dims, size, intervals, split.mesh.part)


def _local_split_operand(
    func: Any, x: SpatialTensor, letters: str, split: SplitLetters, own: Box
) -> Tensor:
    if _has_whole(x, letters, split):
        return _exchange_split(x, letters, split)
    theirs = SplitLetters.of(x, letters)
    clashes = tuple(a != b for a, b in zip(theirs.letters, split.letters, strict=True))
    foreign = set(split.letters) & (set(letters) - set(theirs.letters))
    clashing = {letter for letter, clash in zip(theirs.letters, clashes, strict=True) if clash}
    if foreign or clashing & set(split.letters) or x.mesh is not split.mesh:
        raise refusal(func, [x], "its split operands have their spatial dims in different dims")
    ours = zip(split.dims.outer, split.layout.size, strict=True)
    for clash, one, other in zip(
        clashes, ours, zip(theirs.dims.outer, theirs.layout.size, strict=True), strict=True
    ):
        if not clash and one != other:
            raise refusal(func, [x], "its split operands have different sizes")
    if not any(clashes) and theirs.dims[2:] != split.dims[2:]:
        raise refusal(func, [x], "its split operands have different numbers of extra tokens")
    needs = _needs(x.spatial_layout, split.layout, clashes)
    plan = plan_for(x.spatial_layout.boxes, needs, x.mesh.part)
    if needs == x.spatial_layout.boxes:
        return to_tile(x)
    return move_pixels(x, plan, "operand of a product", gathers_tokens=any(clashes))


@lru_cache(maxsize=4096)
def _needs(theirs: Layout, split: Layout, clashes: tuple[bool, ...]) -> tuple[Box, ...]:
    """Per rank: all of the spatial dims that clash, its own box of `split` in the rest."""
    return tuple(
        Box(
            whole if clash else own
            for clash, whole, own in zip((True, *clashes), theirs.whole, box, strict=True)
        )
        for box in split.boxes
    )


# --- operands split along other letters that have those of the leader whole


def _exchange_split(x: SpatialTensor, letters: str, split: SplitLetters) -> Tensor:
    """`x` with its split letters whole, and this rank's box along those of the leader."""
    ours, theirs = split.dims_in(letters), x.spatial_dims
    dims = SpatialDims((*ours.at, *theirs.at), (*ours.outer, *theirs.outer))
    own = x.mesh.own_box(x.spatial_layout)
    image = to_image(to_tile(x), dims, (*split.layout.size, *own.shape[1:]))
    plan = _exchange(x.spatial_layout.cuts, split.layout.cuts, len(image), x.mesh.part)
    image = repartition(image, x.mesh.grid_comm, plan, name="operand of a product")
    return from_image(image, dims, x._tile.shape)


@lru_cache(maxsize=4096)
def _exchange(
    theirs: tuple[Bounds, ...], ours: tuple[Bounds, ...], samples: int, part: int
) -> Plan:
    """The plan from boxes cut along `theirs` to boxes cut along `ours`, both dims of an image."""
    before, after = (Layout((0, samples), cuts) for cuts in (theirs, ours))
    owned = tuple(Box((*after.whole, *box.spatial)) for box in before.boxes)
    needed = tuple(Box((*box, *before.whole.spatial)) for box in after.boxes)
    return plan_for(owned, needed, part)
