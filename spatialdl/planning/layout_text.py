"""Text drawing of a layout: stages side by side, each a grid of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from spatialdl.common.text import width
from spatialdl.layout.layout import by
from spatialdl.layout.placement import Placement, Position
from spatialdl.training.console.run_log import ranks_text

WIDEST = 98
"""Maximum width of a drawing in characters."""

DRAWN = 6
"""Maximum number of drawn rows, columns and stages."""

_ARROW = "->"


def draw_layout(placement: Placement) -> list[str]:
    """Draw the first replica, followed by notes on the other replicas.

    With two copies of the stages on the ranks, a tile shows the ranks of both.
    """
    blocks: list[list[str]] = []
    for stage in _shown(placement.stages):
        blocks.append(["", "", " ..."] if stage is None else list(_block(placement, stage)))
    lines: list[str] = []
    for line_of_blocks in _fitting(blocks):
        lines += ([""] if lines else []) + _beside(line_of_blocks, bool(lines))
    return [*lines, *_notes(placement)]


def _notes(placement: Placement) -> Iterator[str]:
    size = placement.replica_size
    if placement.most_tensor_parts > 1:
        yield "  ranks joined by + share a tile and split its channels"
    if placement.stream:
        yield f"  each rank processes its part as {by(placement.stream)} virtual tiles in turn"
    if placement.mirrored:
        yield "  of two ranks in a tile, the second holds it in the copy with inverse stage order"
    if placement.data == 2:
        yield f"  replica 1: same layout on {ranks_text(placement.replica_ranks(1))}"
    elif placement.data > 2:
        ranks = ranks_text(sorted(placement.ranks_by_place[size:]))
        each = "" if size == 1 else f", {size} each"
        yield f"  replicas 1 to {placement.data - 1}: same layout on {ranks}{each}"


def _block(placement: Placement, stage: int) -> Iterator[str]:
    """Draw a stage: a title above its tiles, or above the ranks that split samples."""
    grid, parts = placement.grids[stage], placement.batch_parts(stage)
    slices, rows, cols = (*(1,) * (3 - len(grid)), *grid)
    ranks = [
        [names_of(placement, stage, part, copy) for part in range(parts * prod(grid))]
        for copy in range(placement.copies)
    ]
    channels = placement.tensor_parts(stage)
    split = f"{by(grid)} tiles" if prod(grid) > 1 else "whole"
    split = f"{parts} by samples" if parts > 1 else split
    yield f"stage {stage}: {split}" + (f", {channels} by channels" if channels > 1 else "")
    for number in _shown(slices):
        if slices > 1:
            yield "..." if number is None else f"slices, part {number}"
        if number is not None:
            first = number * rows * cols
            yield from _grid(parts if parts > 1 else rows, cols, [one[first:] for one in ranks])


def names_of(placement: Placement, stage: int, part: int, copy: int = 0) -> str:
    """Ranks of one part of a stage in the first replica; ranks that split channels joined by +."""
    ranks = placement.tensor_ranks(Position(0, stage, part, copy))
    shown = ("..." if place is None else str(ranks[place]) for place in _shown(len(ranks)))
    return "+".join(shown)


def _grid(rows: int, cols: int, ranks: Sequence[Sequence[str]]) -> Iterator[str]:
    """Draw a grid of ranks; the middle of a large one is left out."""
    shown_rows, shown_cols = _shown(rows), _shown(cols)
    texts = [
        ["..." if r is None or c is None else _names(ranks, r * cols + c) for c in shown_cols]
        for r in shown_rows
    ]
    columns = max(len(text) for line in texts for text in line) + 2
    border = "+" + ("-" * columns + "+") * len(shown_cols)
    yield border
    for line in texts:
        yield "|" + "".join(f"{text:^{columns}}|" for text in line)
        yield border


def _names(ranks: Sequence[Sequence[str]], part: int) -> str:
    return ", ".join(one[part] for one in ranks)


def _shown(count: int) -> list[int | None]:
    if count <= DRAWN:
        return list(range(count))
    return [*range(DRAWN - 2), None, count - 1]


def _fitting(blocks: list[list[str]]) -> Iterator[list[list[str]]]:
    """Group blocks into rows no wider than `WIDEST`."""
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


def _beside(blocks: Sequence[Sequence[str]], continues: bool) -> list[str]:
    """Put blocks side by side, with an arrow before each but the very first."""
    lines = []
    for number in range(max(map(len, blocks))):
        line = ""
        for place, block in enumerate(blocks):
            has_arrow = number == 2 and (place > 0 or continues)
            text = block[number] if number < len(block) else ""
            gap = f" {_ARROW} " if has_arrow else " " * 4
            line += (gap if place > 0 or continues else "  ") + text.ljust(max(map(width, block)))
        lines.append(line.rstrip())
    return lines
