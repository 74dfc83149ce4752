"""Table printed at the start of a run: layout, stages, batch, devices."""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import DevicePath, device_path
from spatialdl.common.text import aligned, counted, readable_bytes
from spatialdl.layout.layout import by, even_bounds, spatial_names
from spatialdl.layout.placement import Placement, Position
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.training.console.run_log import ranks_text
from spatialdl.training.optimization.optimizers import make_optimizer, state_ratio


class StageMemory(NamedTuple):
    """Number of parameters of a stage on one rank, and their bytes."""

    parameters: int
    weights: int
    gradients: int


class Device(NamedTuple):
    """Host and device of a rank."""

    host: str
    device: str
    more: str


def start_table(
    pipeline: PipelineRuntime, world: Communicator, config: DictConfig, batch: int, images: str
) -> str | None:
    """Format the table on rank 0; collective, all ranks must call it.

    Args:
        pipeline: the network on its ranks.
        world: all ranks.
        config: configuration of the run.
        batch: images per optimizer step.
        images: line that describes the normalisation of pixels.

    Returns:
        The table on rank 0, None on other ranks.
    """
    own = {stage: _stage_memory(pipeline, stage) for stage in pipeline.stages}
    gathered = world.gather((own, device_of_rank(pipeline.device)))
    if gathered is None:
        return None
    placement = pipeline.placement
    stages = {stage: memory for by_stage, _ in gathered for stage, memory in by_stage.items()}
    make = functools.partial(make_optimizer, config.optimizer)
    ratio = state_ratio(make)
    lines = [
        f"layout: {placement.describe()}",
        "",
        *stage_lines(placement, pipeline.image_size[1:], stages, ratio),
        "",
        batch_line(batch, pipeline.schedule.microbatches, placement.data),
        images,
        *device_lines([device for _, device in gathered]),
        *([] if pipeline.device.type == "cpu" else [path_line(device_path())]),
    ]
    return "\n".join(lines)


def stage_lines(
    placement: Placement, size: Sequence[int], stages: dict[int, StageMemory], ratio: float
) -> list[str]:
    """Format one row per stage; of many stages the first ones and the last.

    Args:
        placement: the layout.
        size: (H, W) of the images.
        stages: memory of one rank of each stage.
        ratio: bytes of optimizer state per byte of gradients.
    """
    rows = [["stage", "per rank", "parameters", "weights", "gradients", "optimizer", "total"]]
    for stage, memory in sorted(stages.items()):
        state = round(memory.gradients * ratio)
        sizes = [memory.weights, memory.gradients, state]
        part = _part(placement, stage, size)
        channels = placement.tensor_parts(stage)
        part += f", 1 of {channels} by channels" if channels > 1 else ""
        count = f"{memory.parameters / 1e6:.2f} M"
        rows.append([str(stage), part, count, *map(readable_bytes, (*sizes, sum(sizes)))])
    lines = [f"  {line}" for line in aligned(rows, left=(1,))]
    return lines if len(lines) <= 13 else [*lines[:11], "  ...", lines[-1]]


def _part(placement: Placement, stage: int, size: Sequence[int]) -> str:
    grid = placement.grids[stage]
    if placement.batch_parts(stage) > 1:
        return f"1 of {placement.batch_parts(stage)} of the samples"
    if prod(grid) == 1:
        return "whole images" if stage == 0 else "whole activations"
    if stage > 0:
        return f"1 of {by(grid)} tiles"
    sides = (_sides(n, parts) for n, parts in zip(size, grid, strict=True))
    return f"{' x '.join(sides)} of {' x '.join(map(str, size))} pixels"


def _sides(count: int, parts: int) -> str:
    bounds = even_bounds(count, parts)
    sides = {b - a for a, b in pairwise(bounds)}
    least, most = min(sides), max(sides)
    return str(most) if least == most else f"{least} to {most}"


def batch_line(batch: int, microbatches: int, replicas: int) -> str:
    """Format how micro-batches and replicas make up the global batch."""
    each = batch / (microbatches * replicas)
    size = str(int(each)) if each.is_integer() else f"{int(each)} or {int(each) + 1}"
    parts = ["1 micro-batch" if microbatches == 1 else f"{microbatches} micro-batches"]
    parts.append(counted(replicas, "replica"))
    parts.append(counted(int(each), "image") if each == 1 else f"{size} images")
    return f"global batch: {' x '.join(parts)} = {counted(batch, 'image')} a step"


def device_lines(devices: Sequence[Device]) -> Iterator[str]:
    """Format the devices, one line per host and kind of device."""
    yield "devices:"
    lines = []
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(devices):
        groups.setdefault((device.host, device.more), []).append(rank)
    for (host, more), ranks in groups.items():
        names = list(dict.fromkeys(devices[rank].device for rank in ranks))
        named = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append([f"  {ranks_text(ranks)}", host, f"{named}, {more}"])
    rows = aligned(lines, left=(0, 1, 2))
    yield from rows if len(rows) <= 10 else [*rows[:8], f"  ... {len(rows) - 9} more", rows[-1]]


def path_line(path: DevicePath) -> str:
    """Describe the data path of device tensors."""
    return f"tensors between devices: {_PATHS[path.name]} ({path.reason})"


_PATHS = {"nccl": "NCCL", "mpi": "MPI from device memory", "host": "through pinned host memory"}


def _stage_memory(pipeline: PipelineRuntime, stage: int) -> StageMemory:
    """Memory of a stage on this rank; sharded state is divided by the number of replicas."""
    parameters = list(pipeline.stages[stage].parameters())
    parts = pipeline.placement.data if pipeline.sharded else 1
    weights = sum(p.numel() * p.element_size() for p in parameters)
    gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    count = sum(p.numel() for p in parameters)
    return StageMemory(count, weights // parts, gradients // parts)


def device_of_rank(device: torch.device) -> Device:
    host = socket.gethostname().partition(".")[0]
    if device.type != "cpu":
        card = torch.get_device_module(device).get_device_properties(device)
        return Device(host, str(device), f"{card.name}, {card.total_memory / 2**30:.0f} GiB")
    return Device(host, "cpu", counted(torch.get_num_threads(), "thread") + " each")


# --- ``comm.map``


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
