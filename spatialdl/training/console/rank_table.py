"""``comm.map``: table of hosts, devices, stages and boxes of the ranks, in layout order."""

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
"""Rows after which the header is repeated."""


def log_ranks(pipeline: PipelineRuntime, world: Communicator) -> None:
    """Log the table on rank 0; collective, all ranks must call it."""
    devices = world.gather(device_of_rank(pipeline.device))
    if devices is not None:
        lines = rank_lines(pipeline.placement, pipeline.image_size[1:], devices)
        log.info("ranks:\n%s", "\n".join(lines))


def rank_lines(
    placement: Placement, size: Sequence[int], devices: Sequence[Device] = ()
) -> list[str]:
    """Format one row per rank: by replica, then stage, then grid position in row-major order.

    A rank with several different boxes has several rows. Boxes of later stages are in pixels of
    the image.

    Args:
        placement: the layout.
        size: image size, one number per spatial dim.
        devices: devices by rank; empty to leave out the columns of host and device.
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
    """Group the stages of a rank by box: their names, and the position of one of them."""
    alike: dict[tuple[object, ...], list[Position]] = {}
    for position in placement.positions(rank):
        grid, parts = placement.grids[position.stage], placement.batch_parts(position.stage)
        key = position.part, grid, parts, position.tensor, placement.tensor_parts(position.stage)
        alike.setdefault(key, []).append(position)
    for group in alike.values():
        names = (f"{p.stage} of the copy" if p.copy else str(p.stage) for p in group)
        yield ", ".join(names), group[0]
