"""``comm.map``: where each rank is, and what it holds, in the order of the layout."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from spatialdl.comm.communicator import Communicator
from spatialdl.parallel.layout import spatial_names
from spatialdl.parallel.placement import Placement, Position
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.text import aligned
from spatialdl.training.console.start_table import Device, device_of_rank

log = logging.getLogger("spatialdl.ranks")

_LINES = 40
"""After so many the titles come again."""


def tell_ranks(pipeline: PipelineRuntime, world: Communicator) -> None:
    """Rank 0 tells; all ranks must call it."""
    everybody = world.gather(device_of_rank(pipeline.device))
    if everybody is not None:
        lines = rank_lines(pipeline.placement, pipeline.image_size[1:], everybody)
        log.info("ranks:\n%s", "\n".join(lines))


def rank_lines(
    placement: Placement, size: Sequence[int], devices: Sequence[Device] = ()
) -> list[str]:
    """A line a rank, replica by replica, stage by stage, the grid in row-major order.

    A rank has several where it holds different boxes. Those of later stages are what their tiles
    cover of an image.

    Args:
        size: of the images, a number for each spatial dim.
        devices: by rank; without, they are not told.
    """
    names = spatial_names(placement.dims)
    titles = ["rank", "host", "device", "replica", "stage", *names, "samples", "channels"]
    boxes = [placement.layout(stage, 1, size).boxes for stage in range(placement.stages)]
    rows = []
    for rank in placement.ranks_by_place:
        on = [devices[rank].host, devices[rank].device] if devices else ["", ""]
        for stages, (replica, stage, part, _, tensor) in _held(placement, rank):
            parts = placement.batch_parts(stage)
            box = boxes[stage][part if parts == 1 else 0]
            sides = [f"{start}:{stop}" for start, stop in box.spatial]
            samples = _one_of(part, parts)
            channels = _one_of(tensor, placement.tensor_parts(stage))
            rows.append([str(rank), *on, str(replica), stages, *sides, samples, channels])
    left_out = set() if devices else {1, 2}
    if placement.most_batch_parts == 1:
        left_out.add(titles.index("samples"))
    if placement.most_tensor_parts == 1:
        left_out.add(titles.index("channels"))
    shown = [column for column in range(len(titles)) if column not in left_out]
    left = [place for place, column in enumerate(shown) if column in (1, 2, 4)]
    head, *lines = aligned([[row[k] for k in shown] for row in (titles, *rows)], left)
    starts = range(0, len(lines), _LINES)
    return [line for start in starts for line in (head, *lines[start : start + _LINES])]


def _one_of(number: int, parts: int) -> str:
    return "all" if parts == 1 else f"{number + 1} of {parts}"


def _held(placement: Placement, rank: int) -> Iterator[tuple[str, Position]]:
    """What a rank holds that has the same box: the names of its stages, and one of them."""
    alike: dict[tuple[object, ...], list[Position]] = {}
    for position in placement.positions(rank):
        grid, parts = placement.grids[position.stage], placement.batch_parts(position.stage)
        key = position.part, grid, parts, position.tensor, placement.tensor_parts(position.stage)
        alike.setdefault(key, []).append(position)
    for some in alike.values():
        yield ", ".join(f"{p.stage} of the copy" if p.copy else str(p.stage) for p in some), some[0]
