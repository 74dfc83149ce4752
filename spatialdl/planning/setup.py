"""The job and the cluster that a configuration names."""

from __future__ import annotations

import functools
import logging
import tracemalloc
from math import prod
from typing import Literal

import torch
from omegaconf import DictConfig, OmegaConf

from spatialdl.channels.uses import check_plan
from spatialdl.data.image_source import whole_box
from spatialdl.planning.calibrate import cache_file, calibrate, measured
from spatialdl.planning.cluster import Cluster, cluster_of
from spatialdl.planning.job import PlannedJob
from spatialdl.spatial.gather import gather_before
from spatialdl.training.checks import check_config
from spatialdl.training.layouts import AUTO
from spatialdl.training.network.building import build_model
from spatialdl.training.optimization.optimizers import make_optimizer
from spatialdl.training.optimization.precision import named
from spatialdl.training.settings import Sources, open_sources
from spatialdl.training.virtual_tiles import choose_virtual_tiles, microbatch_shape

log = logging.getLogger("spatialdl.plan")

MEASURED = "this_machine"
READ_SIDE = 256
"""Reading is tried on a box of at most so many rows and columns, of volumes on as many voxels."""


def cluster_named(settings: DictConfig, again: bool = False) -> Cluster:
    """The cluster of a configuration; this machine is measured if it has not been.

    Args:
        again: measure it anew.

    Raises:
        ValueError: if the configuration is not whole.
    """
    given = OmegaConf.to_container(settings, resolve=True)
    assert isinstance(given, dict)
    if given.get("name") != MEASURED:
        if again:
            raise ValueError(
                f"calibrate=true measures this machine, but cluster={given.get('name')}: leave "
                "one of them out"
            )
        return cluster_of({str(key): value for key, value in given.items()})
    found = None if again else measured()
    if found is None:
        found = calibrate()
        log.info("what was measured is kept in %s", cache_file())
    given.pop("name")
    return cluster_of({**found, **{str(key): value for key, value in given.items()}})


def check_first(config: DictConfig, measures: bool) -> None:
    """Refuse what no cluster can train, before minutes go into measuring this machine.

    Args:
        config: with a layout.
        measures: whether it will be measured.

    Raises:
        ValueError: if something is wrong with the configuration, the data or the network.
    """
    uncut = config.copy()
    uncut.parallel.cut = None  # is for the layouts with stages that are looked for
    check_config(uncut)
    planned_type(config)
    if measures:
        build_model(config, open_sources(config.data, int(config.seed), config.task.name))


def planned_type(config: DictConfig) -> torch.dtype:
    """In which a configuration trains.

    Raises:
        ValueError: if the costs of that are not known.
    """
    precision = named(config.trainer.precision)
    if precision.mixed is not None:
        raise ValueError(
            f"the costs of trainer.precision={config.trainer.precision} are not known to the "
            "planner: plan with float32, which takes more memory, and train with the layout found"
        )
    return precision.dtype


def job_of(config: DictConfig, cluster: Cluster) -> PlannedJob:
    """What a configuration of ``spatialdl.train`` trains.

    Raises:
        ValueError: if it does not fit together.
    """
    dtype = planned_type(config)
    sources = open_sources(config.data, int(config.seed), config.task.name)
    if sources.train_views.varies:
        raise ValueError(
            f"data={config.data.name} has bags of several lengths, and costs are counted of images "
            "of one size: name the layout, parallel=none, dp, sp or dp+sp"
        )
    model = build_model(config, sources).to(dtype)
    gather_before(model, config.parallel.gather_before)
    plan = {str(name): str(form) for name, form in (config.parallel.tensor_plan or {}).items()}
    check_plan(model, plan)
    batch = int(config.data.batch_size)
    return PlannedJob(
        model=model,
        image=(sources.channels, *sources.image_size),
        batch=batch,
        optimizer=functools.partial(make_optimizer, config.optimizer, batch_size=batch),
        segments=config.task.name == "segmentation",
        names=config.parallel.cut,
        balance="memory" if config.parallel.balance == "memory" else "time",
        read_bytes=_read_bytes(sources) if cluster.cores is not None else 0.0,
        on_cpu=cluster.cores is not None,
        tensor_plan=tuple(plan.items()),
        limit=limit_bytes(config),
        store=store_of(config, on_cpu=cluster.cores is not None),
    )


def limit_bytes(config: DictConfig) -> int | None:
    """What virtual tiles may have in memory; None for no limit.

    Raises:
        ValueError: it is no positive number, or tensors have a folder without it.
    """
    limit, folder = config.trainer.memory_limit_gb, config.parallel.stream_to
    if limit is None:
        if folder is not None:
            raise ValueError(
                f"parallel.stream_to={folder} is of no use without trainer.memory_limit_gb: set "
                "it, or leave parallel.stream_to out"
            )
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"trainer.memory_limit_gb={limit} must be a number above 0")
    return int(limit * 1e9)


def store_of(config: DictConfig, on_cpu: bool) -> Literal["disk", "host"]:
    """Where tensors of virtual tiles go: those of devices to their host, unless a folder is named.

    Args:
        on_cpu: whether ranks compute on cores, whose memory is that of the host.
    """
    folder = config.parallel.stream_to
    return "host" if folder == "host" or (folder is None and not on_cpu) else "disk"


def with_virtual_tiles(config: DictConfig, sources: Sources) -> DictConfig:
    """The configuration with virtual tiles in place of ``parallel.stream=auto``.

    Raises:
        ValueError: there is no limit, or the network cannot be run without data.
    """
    if config.parallel.stream != AUTO:
        return config
    config, limit = config.copy(), config.trainer.memory_limit_gb
    shape = microbatch_shape(config, (sources.channels, *sources.image_size))
    dtype = named(config.trainer.precision).dtype
    choose_virtual_tiles(config.parallel, build_model(config, sources), shape, dtype, limit)
    return config


def _read_bytes(sources: Sources) -> float:
    """Memory for each pixel, while a box of an image is read."""
    longest: int = round(READ_SIDE ** (2 / len(sources.image_size)))
    sides = [min(int(side), longest) for side in sources.image_size]
    box = whole_box(sides)
    views = sources.train_views
    views.read(0, 0, box)  # files are opened, tables are made
    tracemalloc.start()
    try:
        views.read(0, 0, box)
        return tracemalloc.get_traced_memory()[1] / prod(sides)
    finally:
        tracemalloc.stop()
