"""Virtual tiles of a run: checks, automatic choice, progress within a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from spatialdl.comm.across import Across, GivenUp
from spatialdl.common.text import progress_bar
from spatialdl.layout.layout import by
from spatialdl.layout.placement import Placement
from spatialdl.spatial.streaming.memory import Memory
from spatialdl.spatial.streaming.sizes import ImageSizes, sizes_of, stored, tiles_within
from spatialdl.training.console.progress import has_terminal
from spatialdl.training.layouts import AUTO, placement_of, refuse

LEAST = 32
"""Minimum pixels along each spatial dim of automatically chosen virtual tiles."""

DELAY_S = 2.0
"""Seconds before a step gets a progress bar."""

log = logging.getLogger("spatialdl.trainer")


def check_virtual_tiles(config: DictConfig, placement: Placement) -> None:
    """Check for settings that virtual tiles do not support, or that need them.

    Raises:
        ValueError: names the key.
    """
    parallel, task, trainer = config.parallel, config.task, config.trainer
    if parallel.stream is None:
        keys = {
            f"parallel.stream_to={parallel.stream_to}": parallel.stream_to is not None,
            f"trainer.memory_limit_gb={trainer.memory_limit_gb}": trainer.memory_limit_gb
            is not None,
        }
        refuse(
            keys,
            "has no effect without virtual tiles: set parallel.stream, such as "
            "parallel.stream=[2,2], or leave it out",
        )
        return
    refused = {
        f"task.mixup={task.get('mixup')}": task.get("mixup"),
        "task.loss=cox": task.name == "survival" and task.loss == "cox",
    }
    refuse(
        refused,
        f"does not support virtual tiles, parallel.stream={parallel.stream}: set only one of them",
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
    """Replace ``parallel.stream=auto`` by the fewest virtual tiles that fit into the limit.

    Args:
        parallel: group ``parallel`` of the configuration, changed in place.
        model: the network.
        shape: images of a micro-batch on a replica, (N, C, *spatial).
        dtype: dtype of images and weights.
        limit: memory limit in 10^9 bytes, the value of `key`.
        key: key of the limit, for messages.
        trains: whether the network is trained.

    Raises:
        ValueError: if there is no limit, or the network cannot run without data.
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
            f"parallel.stream=auto needs a memory limit: set {key}, such as {key}=8, or set the "
            "tiles, such as parallel.stream=[4,4]"
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
    """Compute the fewest virtual tiles per rank that fit into the limit, per spatial dim.

    Args:
        parallel: the layout.
        sizes: sizes of the network on images of `shape`; None if it cannot run without data.
        shape: see `choose_virtual_tiles`.
        limit: see `choose_virtual_tiles`.
        key: see `choose_virtual_tiles`.
        network: name of the network, for messages.

    Raises:
        ValueError: if the limit is missing or too small, or there are no sizes.
    """
    limit_gb = _limit(limit, key)
    if sizes is None:
        raise ValueError(
            f"parallel.stream=auto: the memory of {network} cannot be computed without data: set "
            "the tiles, such as parallel.stream=[4,4]"
        )
    dims = len(shape) - 2
    grids = placement_of(parallel, dims).grids
    tiles = [tiles_within(sizes, int(limit_gb * 1e9), shape[2:], grid) for grid in set(grids)]
    if any(extent < LEAST * parts for extent, parts in zip(shape[2:], tiles[0], strict=True)):
        raise ValueError(
            f"parallel.stream=auto: {key}={limit} is too small for images of {by(shape[2:])}: one "
            f"operation needs {sizes.largest / 1e9:.1f} GB; increase the limit"
        )
    return [max(each) for each in zip(*tiles, strict=True)]


def microbatch_shape(config: DictConfig, image: Sequence[int]) -> tuple[int, ...]:
    """Shape of the images of a micro-batch on a replica, (N, C, *spatial).

    Args:
        config: configuration of the run.
        image: shape of an image, (C, *spatial).
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
    """Check that activations offloaded to disk in training fit there.

    Args:
        memory: memory of the run, with its store.
        model: the network.
        shape: all images of a replica in flight at a time, (N, C, *spatial).
        parts: ranks of a replica, which share these images.
        ranks: ranks that offload to the same disk.
        recompute: whether blocks are recomputed in backward.

    Raises:
        ValueError: names the bytes needed and free.
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
            f"about {needed / 1e9:.0f} GB of activations would be offloaded to "
            f"{memory.store.place}, but only {free / 1e9:.0f} GB are free: set parallel.stream_to "
            "to a folder on a larger disk, or use parallel.recompute=block or smaller images"
        )


def offloaded_mb(memory: Memory | None) -> dict[str, float] | None:
    """Megabytes (10^6 bytes) that a rank has written to and read from its store, and its size.

    None without virtual tiles, or without a limit on their memory.
    """
    store = None if memory is None else memory.store
    if store is None:
        return None
    return {"written": store.written / 1e6, "read": store.read / 1e6, "stored": store.peak / 1e6}


def share_one_image(placement: Placement) -> bool:
    """Whether all ranks take part in every exchange of a step."""
    return placement.world_size == prod(placement.grids[0]) and placement.stages == 1


class StepWatch:
    """Progress bar and early stop of long steps, per operation on virtual tiles.

    The number of operations is known after the first step. If all ranks share one image, a stop
    request aborts the step, which may take minutes, instead of waiting for its end.

    Args:
        memory: memory of the run; None without virtual tiles.
        stages: stages of this rank, whose buffers a forward changes.
        shows: whether this rank shows the bar in a terminal.
        stops: returns whether this rank was requested to stop; None if a step must be completed
            because other ranks wait for this one.
        across: exchanges in which the ranks agree to stop.
    """

    def __init__(
        self,
        memory: Memory | None,
        stages: Iterable[nn.Module],
        *,
        shows: bool,
        stops: Callable[[], bool] | None = None,
        across: Sequence[Across] = (),
    ) -> None:
        self._shows = shows and has_terminal()
        self._memory = memory if self._shows or stops is not None else None
        self._stages, self._stops, self._across = tuple(stages), stops, across
        self._operations: int | None = None

    @contextmanager
    def over(self, step: int) -> Iterator[None]:
        """Watch a step.

        Args:
            step: number of the step, from 1.

        Raises:
            GivenUp: if a stop was requested.
        """
        memory = self._memory
        if memory is None:
            yield
            return
        before = self._buffers() if self._stops is not None else []
        with progress_bar(
            None,
            f"step {step}",
            " operations",
            total=self._operations,
            delay=DELAY_S,
            disable=not self._shows,
        ) as bar:
            for one in self._across:
                one.stops = self._stops
            if self._shows or not self._across:
                memory.on_operation = partial(self._after_operation, bar)
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

    def _after_operation(self, bar: Any) -> None:
        bar.update()
        if self._stops is not None and not self._across and self._stops():
            raise GivenUp

    def _buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Copies of all buffers, to restore after an aborted step."""
        return [
            (module, name, buffer.detach().clone())
            for stage in self._stages
            for module in stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
