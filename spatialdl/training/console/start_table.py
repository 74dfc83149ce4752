"""What a run is, told before its first step: layout, stages, batch, devices."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import DevicePath, device_path
from spatialdl.parallel.layout import by, even_bounds
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.text import aligned, counted, readable_bytes
from spatialdl.training.console.layout_text import drawn, ranks_text
from spatialdl.training.optimization.optimizers import make_optimizer, state_ratio


class StageMemory(NamedTuple):
    """What a rank has of a stage; bytes."""

    parameters: int
    weights: int
    gradients: int


class Device(NamedTuple):
    """Where a rank is."""

    host: str
    device: str
    more: str


def start_table(
    pipeline: PipelineRuntime, world: Communicator, config: DictConfig, batch: int, images: str
) -> str | None:
    """The table, on rank 0; all ranks must call it.

    Args:
        batch: images of an optimizer step.
        images: a line that says how pixels are normalised.
    """
    own = {stage: _held(pipeline, stage) for stage in pipeline.stages}
    everybody = world.gather((own, device_of_rank(pipeline.device)))
    if everybody is None:
        return None
    placement = pipeline.placement
    stages = {stage: held for one, _ in everybody for stage, held in one.items()}
    make = functools.partial(make_optimizer, config.optimizer, batch_size=batch)
    ratio = state_ratio(make)
    lines = [
        f"layout: {placement.describe()}",
        *drawn(placement),
        "",
        *stage_lines(placement, pipeline.image_size[1:], stages, ratio),
        "",
        batch_line(batch, pipeline.schedule.microbatches, placement.data),
        images,
        *device_lines([device for _, device in everybody]),
        *([] if pipeline.device.type == "cpu" else [path_line(device_path())]),
    ]
    return "\n".join(lines)


def stage_lines(
    placement: Placement, size: Sequence[int], stages: dict[int, StageMemory], ratio: float
) -> list[str]:
    """A line a stage, of many stages the first ones and the last.

    Args:
        size: (H, W) of the images.
        stages: what a rank of each holds.
        ratio: bytes of the optimizer's state for each byte of a gradient.
    """
    rows = [["stage", "a rank has", "parameters", "weights", "gradients", "optimizer", "together"]]
    for stage, held in sorted(stages.items()):
        state = round(held.gradients * ratio)
        sizes = [held.weights, held.gradients, state, held.weights + held.gradients + state]
        what = _part(placement, stage, size)
        channels = placement.tensor_parts(stage)
        what += f", 1 of {channels} by channels" if channels > 1 else ""
        told = [f"{held.parameters / 1e6:.2f} M", *map(readable_bytes, sizes)]
        rows.append([str(stage), what, *told])
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
    """The arithmetic of the global batch."""
    each = batch / (microbatches * replicas)
    size = str(int(each)) if each.is_integer() else f"{int(each)} or {int(each) + 1}"
    parts = ["1 micro-batch" if microbatches == 1 else f"{microbatches} micro-batches"]
    parts.append(counted(replicas, "replica"))
    parts.append(counted(int(each), "image") if each == 1 else f"{size} images")
    return f"global batch: {' x '.join(parts)} = {counted(batch, 'image')} a step"


def device_lines(devices: Sequence[Device]) -> Iterator[str]:
    """Ranks of a machine are told together."""
    yield "devices:"
    lines = []
    together: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(devices):
        together.setdefault((one.host, one.more), []).append(rank)
    for (host, more), ranks in together.items():
        names = list(dict.fromkeys(devices[rank].device for rank in ranks))
        named = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append([f"  {ranks_text(ranks)}", host, f"{named}, {more}"])
    rows = aligned(lines, left=(0, 1, 2))
    yield from rows if len(rows) <= 10 else [*rows[:8], f"  ... {len(rows) - 9} more", rows[-1]]


def path_line(path: DevicePath) -> str:
    """How tensors of devices travel."""
    return f"tensors between devices: {_PATHS[path.name]} ({path.reason})"


_PATHS = {"nccl": "NCCL", "mpi": "MPI from device memory", "host": "through pinned host memory"}


def _held(pipeline: PipelineRuntime, stage: int) -> StageMemory:
    """Bytes of this rank; replicas that share state out have a part each."""
    parameters = list(pipeline.stages[stage].parameters())
    parts = pipeline.placement.data if pipeline.sharded else 1
    weights = sum(p.numel() * p.element_size() for p in parameters)
    learning = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    count = sum(p.numel() for p in parameters)
    return StageMemory(count, weights // parts, learning // parts)


def device_of_rank(device: torch.device) -> Device:
    host = socket.gethostname().partition(".")[0]
    if device.type != "cpu":
        found = torch.get_device_module(device).get_device_properties(device)
        return Device(host, str(device), f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
    return Device(host, "cpu", counted(torch.get_num_threads(), "thread") + " each")
