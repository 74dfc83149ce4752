"""A layout drawn in characters: stages side by side, in each the grid with its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from spatialdl.parallel.layout import by
from spatialdl.parallel.placement import Placement, Position
from spatialdl.text import width

WIDEST = 98
"""Columns of a console that a drawing takes at most."""

DRAWN = 6
"""Rows and columns of a grid that are drawn, and stages."""

LISTED = 8
"""Ranks that do not follow each other and are told one by one."""

_ARROW = "->"


def drawn(placement: Placement) -> list[str]:
    """The lines of the drawing: the first replica, and words about the others.

    Where two copies lie on the ranks, a tile has the ranks of both.
    """
    blocks: list[list[str]] = []
    for stage in _shown(placement.stages):
        blocks.append(["", "", " ..."] if stage is None else list(_block(placement, stage)))
    lines: list[str] = []
    for line_of_blocks in _fitting(blocks):
        lines += ([""] if lines else []) + _beside(line_of_blocks, bool(lines))
    return [*lines, *_words(placement)]


def _words(placement: Placement) -> Iterator[str]:
    size = placement.replica_size
    if placement.most_tensor_parts > 1:
        yield "  ranks with a + between them have the same tile, and divide its channels"
    if placement.stream:
        yield f"  each rank works on {by(placement.stream)} virtual tiles of its part, one by one"
    if placement.mirrored:
        yield "  of two ranks in a tile, the second holds it in the copy in inverse order"
    if placement.data == 2:
        yield f"  replica 1: the same on {ranks_text(placement.replica_ranks(1))}"
    elif placement.data > 2:
        ranks = ranks_text(sorted(placement.ranks_by_place[size:]))
        each = "" if size == 1 else f", {size} each"
        yield f"  replicas 1 to {placement.data - 1}: the same on {ranks}{each}"


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0 to 5", "ranks 0, 2, 4", "ranks 0, 2, 4 ... 62"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) <= LISTED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[: LISTED // 2]))} ... {ranks[-1]}"


def _block(placement: Placement, stage: int) -> Iterator[str]:
    """A title, and below it the tiles, or the ranks that divide samples."""
    grid, parts = placement.grids[stage], placement.batch_parts(stage)
    slices, rows, cols = (*(1,) * (3 - len(grid)), *grid)
    ranks = [
        [names_of(placement, stage, part, copy) for part in range(parts * prod(grid))]
        for copy in range(placement.copies)
    ]
    channels = placement.tensor_parts(stage)
    what = f"{by(grid)} tiles" if prod(grid) > 1 else "whole"
    what = f"{parts} by samples" if parts > 1 else what
    yield f"stage {stage}: {what}" + (f", {channels} by channels" if channels > 1 else "")
    for number in _shown(slices):
        if slices > 1:
            yield "..." if number is None else f"slices, part {number}"
        if number is not None:
            first = number * rows * cols
            yield from _grid(parts if parts > 1 else rows, cols, [one[first:] for one in ranks])


def names_of(placement: Placement, stage: int, part: int, copy: int = 0) -> str:
    """The ranks of a part of a stage of the first replica; those that divide channels as a sum."""
    ranks = placement.tensor_ranks(Position(0, stage, part, copy))
    shown = ("..." if place is None else str(ranks[place]) for place in _shown(len(ranks)))
    return "+".join(shown)


def _grid(rows: int, cols: int, ranks: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows and columns in the middle of a large grid are left out."""
    shown_rows, shown_cols = _shown(rows), _shown(cols)
    texts = [
        ["..." if r is None or c is None else _names(ranks, r * cols + c) for c in shown_cols]
        for r in shown_rows
    ]
    wide = max(len(text) for line in texts for text in line) + 2
    border = "+" + ("-" * wide + "+") * len(shown_cols)
    yield border
    for line in texts:
        yield "|" + "".join(f"{text:^{wide}}|" for text in line)
        yield border


def _names(ranks: Sequence[Sequence[str]], part: int) -> str:
    return ", ".join(one[part] for one in ranks)


def _shown(count: int) -> list[int | None]:
    if count <= DRAWN:
        return list(range(count))
    return [*range(DRAWN - 2), None, count - 1]


def _fitting(blocks: list[list[str]]) -> Iterator[list[list[str]]]:
    """As many side by side as fit."""
    row: list[list[str]] = []
    used = 0
    for block in blocks:
        needs = max(map(width, block)) + 6
        if row and used + needs > WIDEST:
            yield row
            row, used = [], 0
        row.append(block)
        used += needs
    yield row


def _beside(blocks: Sequence[Sequence[str]], goes_on: bool) -> list[str]:
    """Blocks as lines, an arrow before each but the very first."""
    lines = []
    for number in range(max(map(len, blocks))):
        line = ""
        for place, block in enumerate(blocks):
            points = number == 2 and (place > 0 or goes_on)
            text = block[number] if number < len(block) else ""
            gap = f" {_ARROW} " if points else " " * 4
            line += (gap if place > 0 or goes_on else "  ") + text.ljust(max(map(width, block)))
        lines.append(line.rstrip())
    return lines
