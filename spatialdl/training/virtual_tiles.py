"""Virtual tiles of a run: what goes with them, and where waits what is not in memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from tqdm import tqdm

from spatialdl.comm.across import Across, GivenUp
from spatialdl.parallel.layout import by
from spatialdl.parallel.placement import Placement
from spatialdl.streaming.memory import Memory
from spatialdl.streaming.sizes import ImageSizes, sizes_of, stored, tiles_within
from spatialdl.training.console.progress import has_terminal
from spatialdl.training.layouts import AUTO, placement_of

LEAST = 32
"""Pixels along each spatial dim of the smallest virtual tiles that are chosen."""

DELAY_S = 2.0
"""Seconds of a step before it has a bar."""

log = logging.getLogger("spatialdl.trainer")


def check_virtual_tiles(config: DictConfig, placement: Placement) -> None:
    """Refuse what sees whole tiles only, and settings that only virtual tiles have.

    Raises:
        ValueError: names the key.
    """
    parallel, task, trainer = config.parallel, config.task, config.trainer
    if parallel.stream is None:
        _check_unused(config)
        return
    refused = {
        "trainer.compile=true": trainer.compile,
        f"task.mixup={task.get('mixup')}": task.get("mixup"),
        "task.loss=cox": task.name == "survival" and task.loss == "cox",
        "debug=detect_nan": config.debug.name == "detect_nan",
    }
    for what, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{what} does not go with virtual tiles, parallel.stream={parallel.stream}: leave "
                "one of them out"
            )


def _check_unused(config: DictConfig) -> None:
    given = {
        "parallel.stream_to": config.parallel.stream_to,
        "trainer.memory_limit_gb": config.trainer.memory_limit_gb,
    }
    for key, value in given.items():
        if value is not None:
            raise ValueError(
                f"{key}={value} is of no use without virtual tiles: set parallel.stream, such as "
                "parallel.stream=[2,2], or leave it out"
            )


def choose_virtual_tiles(
    parallel: DictConfig,
    model: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    limit: object,
    key: str = "trainer.memory_limit_gb",
    *,
    trains: bool = True,
) -> None:
    """Set ``parallel.stream=auto`` to the fewest virtual tiles that fit into the limit.

    Args:
        shape: of the images of a micro-batch on a replica, (N, C, *spatial).
        dtype: of the images and the weights.
        limit: 10^9 bytes, the value of `key`.

    Raises:
        ValueError: there is no limit, or the network cannot be run without data.
    """
    if parallel.stream != AUTO:
        return
    limit_gb = _limit(limit, key)
    sizes = sizes_of(model, shape, dtype, trains=trains)
    parallel.stream = virtual_tiles_for(parallel, sizes, shape, limit_gb, key, type(model).__name__)
    log.info("parallel.stream=auto: %s virtual tiles on each rank", by(parallel.stream))


def _limit(limit: object, key: str) -> float:
    if limit is None:
        raise ValueError(
            f"parallel.stream=auto takes as few virtual tiles as fit into {key}: set it, such as "
            f"{key}=8, or name the tiles, such as parallel.stream=[4,4]"
        )
    return float(str(limit))


def virtual_tiles_for(
    parallel: DictConfig,
    sizes: ImageSizes | None,
    shape: tuple[int, ...],
    limit: object,
    key: str = "trainer.memory_limit_gb",
    network: str = "the network",
) -> list[int]:
    """The fewest virtual tiles of a rank that fit into the limit, along each spatial dim.

    Args:
        parallel: the layout.
        sizes: of the network on images of `shape`; None if it cannot be run without data.
        shape: see `choose_virtual_tiles`, as are
        limit: and
        key: are.
        network: what it is called.

    Raises:
        ValueError: there is no limit, or it is too small, or there are no sizes.
    """
    limit_gb = _limit(limit, key)
    if sizes is None:
        raise ValueError(
            f"parallel.stream=auto: what {network} takes cannot be found out without data: name "
            "the tiles, such as parallel.stream=[4,4]"
        )
    dims = len(shape) - 2
    grids = placement_of(parallel, dims).grids
    found = [tiles_within(sizes, int(limit_gb * 1e9), shape[2:], grid) for grid in set(grids)]
    if any(extent < LEAST * parts for extent, parts in zip(shape[2:], found[0], strict=True)):
        raise ValueError(
            f"parallel.stream=auto: {key}={limit} is too small for images of {by(shape[2:])}, of "
            f"which one operation takes {sizes.largest / 1e9:.1f} GB: give it more"
        )
    return [max(each) for each in zip(*found, strict=True)]


def microbatch_shape(config: DictConfig, image: Sequence[int]) -> tuple[int, ...]:
    """Of the images of a micro-batch on a replica, (N, C, *spatial).

    Args:
        image: (C, *spatial).
    """
    replicas = config.parallel.data * config.parallel.microbatches
    return (ceil(config.data.batch_size / replicas), *image)


def check_room(
    memory: Memory,
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    parts: int,
    ranks: int,
    recompute: bool,
) -> None:
    """Refuse a run of which more would wait on a disk than has room there; in training.

    Args:
        shape: of all images of a replica that are under way together, (N, C, *spatial).
        parts: ranks of a replica, which share that.
        ranks: that store on one disk.
        recompute: whether blocks run again in backward.

    Raises:
        ValueError: with what it would take.
    """
    if memory.store is None or memory.limit is None:
        return
    dtype = next((one.dtype for one in model.parameters()), torch.get_default_dtype())
    sizes = sizes_of(model, shape, dtype, recompute=recompute)
    if sizes is None:
        return
    needed, free = ranks * stored(sizes, memory.limit, parts), memory.store.room
    if needed > free:
        raise ValueError(
            f"about {needed / 1e9:.0f} GB of activations would wait in {memory.store.place}, "
            f"where {free / 1e9:.0f} GB are free: name a folder on a disk with room by "
            "parallel.stream_to, or keep less, by parallel.recompute=block or smaller images"
        )


def share_one_image(placement: Placement) -> bool:
    """Whether all ranks come to all exchanges of a step together."""
    return placement.world_size == prod(placement.grids[0]) and placement.stages == 1


class StepWatch:
    """Watches steps that take some seconds, operation by operation of the virtual tiles.

    On a terminal it tells how far a step is; how many operations there are is known when a step is
    over. A run whose ranks all share one image need not end a step that takes minutes when one of
    them is told to stop.

    Args:
        memory: of the run; None without virtual tiles.
        stages: of the run, whose buffers a forward changes.
        is_told: whether on this rank.
        stops: whether this rank is told to stop; None where that must wait for the end of a step,
            as other ranks wait for this one in its midst.
        across: where this rank and the others agree to stop.
    """

    def __init__(
        self,
        memory: Memory | None,
        stages: Iterable[nn.Module],
        *,
        is_told: bool,
        stops: Callable[[], bool] | None = None,
        across: Sequence[Across] = (),
    ) -> None:
        self._shows = is_told and has_terminal()
        self._memory = memory if self._shows or stops is not None else None
        self._stages, self._stops, self._across = tuple(stages), stops, across
        self._operations: int | None = None

    @contextmanager
    def over(self, step: int) -> Iterator[None]:
        """Around a step, the first is 1.

        Raises:
            GivenUp: the run is told to stop.
        """
        memory = self._memory
        if memory is None:
            yield
            return
        before = self._buffers() if self._stops is not None else []
        with tqdm(
            total=self._operations,
            desc=f"step {step}",
            unit=" operations",
            delay=DELAY_S,
            leave=False,
            file=sys.stderr,
            dynamic_ncols=True,
            disable=not self._shows,
        ) as bar:
            for one in self._across:
                one.stops = self._stops
            if self._shows or not self._across:
                memory.on_operation = partial(self._told, bar)
            try:
                yield
            except GivenUp:
                for module, name, buffer in before:
                    module._buffers[name] = buffer
                raise
            finally:
                memory.on_operation = None
                for one in self._across:
                    one.stops = None
            self._operations = bar.n

    def _told(self, bar: tqdm[Any]) -> None:
        bar.update()
        if self._stops is not None and not self._across and self._stops():
            raise GivenUp

    def _buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Copies of all there are."""
        return [
            (module, name, buffer.detach().clone())
            for stage in self._stages
            for module in stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
