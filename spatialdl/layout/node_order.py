"""Assignment of ranks to places of a placement, so that ranks that communicate most share a node.

Launchers distribute ranks in blocks, round-robin, or unevenly. A labelling assigns a node to each
place. Several are generated and the cheapest is used, the launcher's own unless another is better:

- the launcher's nodes one after another;
- packings: replicas, or groups of communicating ranks, go to the first node with room for them, as
  many of the smallest as fit, and the rest is spread over the remaining places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from spatialdl.layout.placement import Placement


class Cost(NamedTuple):
    """Communication across nodes, in order of importance.

    Attributes:
        groups: sets of ranks of a stage that span several nodes.
        halos: adjacent parts of a grid on different nodes.
        handovers: stages that do not share one node with the previous stage.
        distance: sum over stages of the distance in nodes to the previous stage.
    """

    groups: int
    halos: int
    handovers: int
    distance: int


def placed_by_nodes(placement: Placement, nodes: Sequence[Hashable]) -> Placement:
    """Reorder a placement so that its groups of ranks lie within nodes, see `order_by_nodes`."""
    return replace(placement, order=order_by_nodes(placement, nodes))


def order_by_nodes(placement: Placement, nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """The rank at each place; () if the launcher's order is best.

    Args:
        nodes: identifies the node of each rank.

    Raises:
        ValueError: if their number is not that of the placement's ranks.
    """
    if len(nodes) != placement.world_size:
        raise ValueError(f"got nodes of {len(nodes)} ranks for {placement.describe()}")
    own = numbered(nodes)
    best, least = own, cost(placement, own)
    for labels in _labellings(placement, own):
        if not any(least):
            break
        if (label_cost := cost(placement, labels)) < least:
            best, least = labels, label_cost
    if best == own:
        return ()
    free = [iter(ranks) for ranks in _ranks_by_node(own)]
    return tuple(next(free[node]) for node in best)


def numbered(nodes: Sequence[Hashable]) -> list[int]:
    """Number nodes in the order of their first occurrence."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(node, len(numbers)) for node in nodes]


def _ranks_by_node(labels: Sequence[int]) -> list[list[int]]:
    ranks: list[list[int]] = [[] for _ in range(max(labels) + 1)]
    for rank, node in enumerate(labels):
        ranks[node].append(rank)
    return ranks


def cost(placement: Placement, labels: Sequence[int]) -> Cost:
    """Communication across nodes.

    Args:
        labels: node of each place, or of each rank if the placement has an order.
    """
    across: set[tuple[int, ...]] = set()
    halos = handovers = distance = 0
    for replica in range(placement.data):
        for copy in range(placement.copies):
            stages = [placement.stage_ranks(s, replica, copy) for s in range(placement.stages)]
            nodes_of = [[labels[rank] for rank in ranks] for ranks in stages]
            across |= {
                tuple(sorted(r)) for r, n in zip(stages, nodes_of, strict=True) if len(set(n)) > 1
            }
            for stage, nodes in enumerate(nodes_of):
                parts = placement.tensor_parts(stage)
                if placement.batch_parts(stage) == 1:
                    grid = placement.grids[stage]
                    halos += sum(_halos(grid, nodes[n::parts]) for n in range(parts))
                halos += sum(a != b for n, (a, b) in enumerate(pairwise(nodes), 1) if n % parts)
            for before, after in pairwise(nodes_of):
                both = {*before, *after}
                handovers += len(both) > 1
                distance += max(both) - min(both)
    return Cost(len(across), halos, handovers, distance)


def _halos(grid: tuple[int, ...], labels: Sequence[int]) -> int:
    """Number of adjacent parts of the grid, along any dim, on different nodes."""
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
            packed = _packed([len(piece) for piece in pieces], [sizes[node] for node in nodes])
            labels = [nodes[number] for number in packed]
            yield labels
            yield [node for piece in groups for node in _in_blocks(placement, piece, labels)]


def _groups(placement: Placement, replica: int) -> Iterator[tuple[int, int]]:
    """First place and number of the ranks of each set of stages."""
    start = replica * placement.replica_size
    for width in placement.widths[: placement.groups]:
        yield start, width
        start += width


def _joined(placement: Placement, groups: Sequence[range]) -> list[range]:
    """Groups merged with the overlapping groups of the other copy."""
    if placement.copies == 1:
        return list(groups)
    size, cuts = placement.replica_size, {piece.start for piece in groups}
    # the second copy is in reverse order
    both = {
        start
        for start in cuts
        if (start // size + 1) * size - start % size in cuts or start % size == 0
    }
    bounds = [*sorted(both), placement.world_size]
    return [range(a, b) for a, b in pairwise(bounds)]


def _in_blocks(placement: Placement, piece: range, labels: Sequence[int]) -> list[int]:
    """Nodes of a group; if it has equal shares on several, arranged in blocks of its grid."""
    own = [labels[place] for place in piece]
    stage = _stage_of(placement, piece)
    grid = placement.grids[stage]
    shares = Counter(own)
    share = len(own) // len(shares)
    if placement.batch_parts(stage) > 1 or len(shares) == 1 or set(shares.values()) != {share}:
        return own
    nodes, best = list(shares), own
    divisors = ([n for n in range(1, parts + 1) if parts % n == 0] for parts in grid)
    for block in product(*divisors):
        if prod(block) == share:
            blocks = [nodes[number] for number in _blocks(grid, block)]
            best = min(best, blocks, key=lambda labels: _halos(grid, labels))
    return best


def _blocks(grid: tuple[int, ...], block: tuple[int, ...]) -> Iterator[int]:
    """Index of the block of each part of a grid, in row-major order."""
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
    """A node for each place of the pieces: many of them, the smallest, lie within one node each.

    Args:
        widths: number of places of each piece.
        sizes: number of ranks of each node; the same in total.
    """
    by_width = sorted(range(len(widths)), key=widths.__getitem__)
    within, left = dict[int, int](), list(sizes)
    least, beyond = 0, 1 + sum(width <= max(sizes) for width in widths)
    most = beyond - 1
    while beyond - least > 1:
        fitted = _fitted(sorted(by_width[:most]), widths, sizes)
        if fitted is None:
            beyond = most
        else:
            least, (within, left) = most, fitted
        most = (least + beyond) // 2
    labels: list[int] = []
    for piece, width in enumerate(widths):
        whole = [within[piece]] * width if piece in within else sorted(_spread(width, left))
        labels += whole
    return labels


def _fitted(
    pieces: Sequence[int], widths: Sequence[int], sizes: Sequence[int]
) -> tuple[dict[int, int], list[int]] | None:
    """The first node with room for each piece, and the room left on each; None if one has none.

    Pieces are tried in their order, which keeps adjacent ones together, then the widest first.
    """
    for order in (pieces, sorted(pieces, key=lambda piece: -widths[piece])):
        within, left = dict[int, int](), list(sizes)
        for piece in order:
            node = next((n for n, room in enumerate(left) if room >= widths[piece]), None)
            if node is None:
                break
            within[piece] = node
            left[node] -= widths[piece]
        else:
            return within, left
    return None


def _spread(width: int, left: list[int]) -> Iterator[int]:
    """Few nodes for a piece that fits in none; subtracts from the places left on each."""
    while width:
        enough = (node for node, room in enumerate(left) if room >= width)
        node = next(enough, max(range(len(left)), key=left.__getitem__))
        taken = min(width, left[node])
        left[node] -= taken
        width -= taken
        yield from [node] * taken
