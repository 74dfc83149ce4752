"""A layout drawn in characters: stages side by side, in each the grid with its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from spatialdl.parallel.layout import by
from spatialdl.parallel.placement import Placement
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

    Where two copies lie on the ranks, a tile has the ranks of both; where some divide its channels,
    it has the first and the last of them.
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
    channels = placement.tensor_parts(stage)
    names = [_names(placement, stage, copy) for copy in range(placement.copies)]
    what = f"{by(grid)} tiles" if prod(grid) > 1 else "whole"
    title = f"stage {stage}: " + (f"{parts} by samples" if parts > 1 else what)
    yield title + (f", {channels} by channels" if channels > 1 else "")
    for number in _shown(slices):
        if slices > 1:
            yield "..." if number is None else f"slices, part {number}"
        if number is not None:
            first = number * rows * cols
            yield from _grid(parts if parts > 1 else rows, cols, [one[first:] for one in names])


def _grid(rows: int, cols: int, names: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows and columns in the middle of a large grid are left out."""
    shown_rows, shown_cols = _shown(rows), _shown(cols)
    texts = [
        [
            "..." if r is None or c is None else ", ".join(one[r * cols + c] for one in names)
            for c in shown_cols
        ]
        for r in shown_rows
    ]
    wide = max(len(text) for line in texts for text in line) + 2
    border = "+" + ("-" * wide + "+") * len(shown_cols)
    yield border
    for line in texts:
        yield "|" + "".join(f"{text:^{wide}}|" for text in line)
        yield border


def _names(placement: Placement, stage: int, copy: int) -> list[str]:
    """Of each part of a stage its rank, or those that divide its channels."""
    last = placement.tensor_parts(stage) - 1
    firsts, lasts = (placement.ranks(stage, 0, copy, tensor) for tensor in (0, last))
    return [
        str(a) if last == 0 else f"{a}-{b}" if b == a + last else f"{a} .. {b}"
        for a, b in zip(firsts, lasts, strict=True)
    ]


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
