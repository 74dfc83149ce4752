"""Which rank takes which place of a placement, so that ranks that talk most share a node.

Launchers deal ranks out in blocks, in turn, or unevenly. A labelling says for each place on which
node it is to lie. Several are made and the cheapest is taken, the launcher's own where none is
better, so that nothing gets worse:

- the launcher's nodes one after another;
- packings: as many replicas, or groups of ranks that talk to each other, as fit lie within a node
  each, the rest is spread over what is left. As one group fits wherever a wider one does, the
  narrowest are packed; which of them fit together is searched for, exactly but for `_TRIES`.

With that, the fewest possible groups lie across nodes; where two copies of a network put groups of
different widths on the same ranks this is certain only if none needs to. Where consecutive stages
lie is chosen greedily: in the order of their places, on nodes in the order of the launcher.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from math import prod
from typing import NamedTuple

from spatialdl.parallel.placement import Placement

_TRIES = 3000
"""Ways to fill a node that a search looks at."""

Fill = Counter[int]
"""How many groups of each width lie within a node."""


class Cost(NamedTuple):
    """What lies across nodes; what comes first counts most.

    Attributes:
        groups: sets of ranks of a stage that are on several nodes.
        halos: parts of a grid that touch each other and are on different nodes.
        handovers: stages that are not on one node with the stage before.
        distance: nodes from those to the stage before, added up.
    """

    groups: int
    halos: int
    handovers: int
    distance: int


def placed_by_nodes(placement: Placement, nodes: Sequence[Hashable]) -> Placement:
    """The placement with its groups of ranks within nodes, see `order_by_nodes`."""
    return replace(placement, order=order_by_nodes(placement, nodes))


def order_by_nodes(placement: Placement, nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """The rank at each place; () where the launcher's order will do.

    Args:
        nodes: by rank, what tells its node from others.

    Raises:
        ValueError: if these are not the ranks of the placement.
    """
    if len(nodes) != placement.world_size:
        raise ValueError(f"{len(nodes)} ranks are on nodes, but it is {placement.describe()}")
    own = numbered(nodes)
    best, least = own, cost(placement, own)
    for labels in _labellings(placement, own):
        if not any(least):
            break
        if (found := cost(placement, labels)) < least:
            best, least = labels, found
    if best == own:
        return ()
    free = [iter(ranks) for ranks in _ranks_by_node(own)]
    return tuple(next(free[node]) for node in best)


def numbered(nodes: Sequence[Hashable]) -> list[int]:
    """Nodes as numbers, in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(node, len(numbers)) for node in nodes]


def _ranks_by_node(labels: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(max(labels) + 1)]
    for rank, node in enumerate(labels):
        found[node].append(rank)
    return found


def cost(placement: Placement, labels: Sequence[int]) -> Cost:
    """What lies across nodes.

    Args:
        labels: the node of each place, or of each rank if the placement has an order.
    """
    across: set[tuple[int, ...]] = set()
    halos = handovers = distance = 0
    for replica in range(placement.data):
        for copy in range(placement.copies):
            stages = [placement.stage_ranks(s, replica, copy) for s in range(placement.stages)]
            on = [[labels[rank] for rank in ranks] for ranks in stages]
            across |= {tuple(sorted(r)) for r, n in zip(stages, on, strict=True) if len(set(n)) > 1}
            for stage, found in enumerate(on):
                parts = placement.tensor_parts(stage)
                if placement.batch_parts(stage) == 1:
                    grid = placement.grids[stage]
                    halos += sum(_halos(grid, found[n::parts]) for n in range(parts))
                halos += sum(a != b for n, (a, b) in enumerate(pairwise(found), 1) if n % parts)
            for before, after in pairwise(on):
                both = {*before, *after}
                handovers += len(both) > 1
                distance += max(both) - min(both)
    return Cost(len(across), halos, handovers, distance)


def _halos(grid: tuple[int, ...], labels: Sequence[int]) -> int:
    """Neighbours in the grid, along any dim, that are on different nodes."""
    across, step = 0, 1
    for parts in reversed(grid):
        pairs = enumerate(zip(labels, labels[step:], strict=False))
        across += sum(a != b for place, (a, b) in pairs if place // step % parts < parts - 1)
        step *= parts
    return across


# --- labellings


def _labellings(placement: Placement, own: Sequence[int]) -> Iterator[list[int]]:
    yield sorted(own)
    sizes = [len(ranks) for ranks in _ranks_by_node(own)]
    groups = [
        range(start, start + width)
        for replica in range(placement.data)
        for start, width in _groups(placement, replica)
    ]
    replica = placement.replica_size
    replicas = [range(n * replica, (n + 1) * replica) for n in range(placement.data)]
    widest = sorted(range(len(sizes)), key=lambda node: -sizes[node])
    for pieces in (replicas, groups, _joined(placement, groups)):
        for nodes in (range(len(sizes)), widest):
            found = _packed([len(piece) for piece in pieces], [sizes[node] for node in nodes])
            labels = [nodes[number] for number in found]
            yield labels
            yield [node for piece in groups for node in _in_blocks(placement, piece, labels)]


def _groups(placement: Placement, replica: int) -> Iterator[tuple[int, int]]:
    """First place and number of the ranks that hold the same stages."""
    start = replica * placement.replica_size
    for width in placement.widths[: placement.groups]:
        yield start, width
        start += width


def _joined(placement: Placement, groups: Sequence[range]) -> list[range]:
    """Groups made one with those of the other copy that have ranks of several of them."""
    if placement.copies == 1:
        return list(groups)
    size, cuts = placement.replica_size, {piece.start for piece in groups}
    # the second copy lies the other way round
    both = {
        start
        for start in cuts
        if (start // size + 1) * size - start % size in cuts or start % size == 0
    }
    bounds = [*sorted(both), placement.world_size]
    return [range(a, b) for a, b in pairwise(bounds)]


def _in_blocks(placement: Placement, piece: range, labels: Sequence[int]) -> list[int]:
    """The nodes of a group; one that lies on equal parts of several, in blocks of its grid."""
    own = [labels[place] for place in piece]
    stage = _stage_of(placement, piece)
    grid = placement.grids[stage]
    shares = Counter(own)
    share = len(own) // len(shares)
    if placement.batch_parts(stage) > 1 or len(shares) == 1 or set(shares.values()) != {share}:
        return own
    nodes, found = list(shares), own
    divisors = ([n for n in range(1, parts + 1) if parts % n == 0] for parts in grid)
    for block in product(*divisors):
        if prod(block) == share:
            blocks = [nodes[number] for number in _blocks(grid, block)]
            found = min(found, blocks, key=lambda labels: _halos(grid, labels))
    return found


def _blocks(grid: tuple[int, ...], block: tuple[int, ...]) -> Iterator[int]:
    """For each part of a grid, in row-major order, in which block of parts it lies."""
    for place in product(*map(range, grid)):
        number = 0
        for at, parts, size in zip(place, grid, block, strict=True):
            number = number * (parts // size) + at // size
        yield number


def _stage_of(placement: Placement, piece: range) -> int:
    starts = [start for start, _ in _groups(placement, 0)]
    return starts.index(piece.start % placement.replica_size)


# --- packing


def _packed(widths: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """A node for each place of the pieces, the most of them within one, in order.

    Args:
        widths: places of each piece.
        sizes: ranks of each node; as many together.
    """
    by_width = sorted(range(len(widths)), key=widths.__getitem__)
    fills = [Fill() for _ in sizes]
    least, beyond = 0, 1 + sum(width <= max(sizes) for width in widths)
    most = beyond - 1
    while beyond - least > 1:
        found = _fitted([widths[piece] for piece in sorted(by_width[:most])], sizes)
        if found is None:
            beyond = most
        else:
            least, fills = most, found
        most = (least + beyond) // 2
    alike: dict[int, deque[int]] = {}
    for piece in sorted(by_width[:least]):
        alike.setdefault(widths[piece], deque()).append(piece)
    on = {
        alike[width].popleft(): [node] * width
        for node, fill in enumerate(fills)
        for width in fill.elements()
    }
    left = [size - _places(fill) for size, fill in zip(sizes, fills, strict=True)]
    for piece, width in enumerate(widths):
        if piece not in on:
            on[piece] = sorted(_spread(width, left))
    return [node for piece in range(len(widths)) for node in on[piece]]


def _spread(width: int, left: list[int]) -> Iterator[int]:
    """Nodes for a piece that fits in none, few of them; takes from what is left on each."""
    while width:
        enough = (node for node, room in enumerate(left) if room >= width)
        node = next(enough, max(range(len(left)), key=left.__getitem__))
        taken = min(width, left[node])
        left[node] -= taken
        width -= taken
        yield from [node] * taken


def _fitted(widths: Sequence[int], sizes: Sequence[int]) -> list[Fill] | None:
    """What each node is filled with if all pieces are to lie within one, or None."""
    return _searched(widths, sizes, _as_they_come) or _searched(widths, sizes, _widest)


def _searched(
    widths: Sequence[int],
    sizes: Sequence[int],
    first: Callable[[Sequence[int], Fill, int], Fill],
) -> list[Fill] | None:
    """A search in depth, node by node; what was found to lead nowhere is not tried again.

    Only fills are tried to which nothing can be added: a piece that fits here may as well leave
    its node for this one.

    Args:
        first: what is tried first, from the pieces that are left and the room of a node.
    """
    todo, dead = Counter(widths), set[tuple[int, frozenset[tuple[int, int]]]]()
    rooms = [*accumulate(sizes[::-1], initial=0)][::-1]  # from each node on
    fills: list[Fill] = []
    tries: list[Iterator[Fill]] = [_fills(first, widths, todo, sizes[0])]
    for _ in range(_TRIES + len(sizes)):
        if not todo:
            return fills + [Fill()] * (len(sizes) - len(fills))
        if not tries:
            return None
        fill = next(tries[-1], None)
        if fill is None:
            dead.add((len(fills), frozenset(todo.items())))
            tries.pop()
            if fills:
                todo = todo + fills.pop()
            continue
        rest, node = todo - fill, len(fills) + 1
        if _places(rest) <= rooms[node] and (node, frozenset(rest.items())) not in dead:
            fills.append(fill)
            todo = rest
            room = sizes[node] if node < len(sizes) else 0
            tries.append(_fills(first, widths, todo, room))
    return None


def _fills(
    first: Callable[[Sequence[int], Fill, int], Fill],
    widths: Sequence[int],
    todo: Fill,
    room: int,
) -> Iterator[Fill]:
    """All ways to fill a node to which nothing can be added, a preferred one first."""
    best = first(widths, todo, room)
    yield best
    yield from (fill for fill in _full(sorted(todo, reverse=True), todo, room) if fill != best)


def _full(widths: Sequence[int], todo: Fill, room: int) -> Iterator[Fill]:
    """Of some widths, the widest first."""
    if not widths:
        yield Fill()
        return
    width, *others = widths
    for count in range(min(todo[width], room // width), -1, -1):
        left = room - count * width
        for more in _full(others, todo, left):
            rest = left - _places(more)
            if rest < width or count == todo[width]:
                yield more + Fill({width: count})


def _as_they_come(widths: Sequence[int], todo: Fill, room: int) -> Fill:
    """Pieces in their order, as long as there is room: what belongs together stays together."""
    gone, least = Counter(widths) - todo, min(todo, default=0)
    fill = Fill()
    for width in widths:
        if gone[width] > 0:
            gone[width] -= 1
        elif width <= room:
            fill[width] += 1
            room -= width
            if room < least:
                break
    return fill


def _places(fill: Fill) -> int:
    return sum(width * count for width, count in fill.items())


def _widest(widths: Sequence[int], todo: Fill, room: int) -> Fill:
    return next(_full(sorted(todo, reverse=True), todo, room))
