"""Makes the job and the cluster of a configuration."""

from __future__ import annotations

import functools
import logging
import re
import tracemalloc
from collections.abc import Sequence
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Literal

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from spatialdl.common.configuring.own_keys import fit_model_keys
from spatialdl.data.image_source import whole_box
from spatialdl.planning.calibrate import cache_file, calibrate, measured
from spatialdl.planning.cluster import Cluster, cluster_of
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.search import Row, limit, search, table
from spatialdl.spatial.channels.weights import check_plan
from spatialdl.spatial.split import gather_before
from spatialdl.spatial.streaming.memory import limit_bytes
from spatialdl.training.checks import check_config
from spatialdl.training.layouts import AUTO
from spatialdl.training.network.building import build_model
from spatialdl.training.optimization.optimizers import make_optimizer
from spatialdl.training.optimization.precision import PRECISIONS
from spatialdl.training.settings import Sources, open_sources
from spatialdl.training.virtual_tiles import choose_virtual_tiles, microbatch_shape

log = logging.getLogger("spatialdl.plan")

MEASURED = "this_machine"
READ_SIDE = 256
"""Maximum rows and columns of the box for measuring reads; volumes have as many voxels."""


def cluster_named(settings: DictConfig, again: bool = False) -> Cluster:
    """Return the cluster of a configuration; measures this machine if necessary.

    Args:
        again: whether to repeat the measurement.

    Raises:
        ValueError: if the configuration is incomplete.
    """
    values = OmegaConf.to_container(settings, resolve=True)
    assert isinstance(values, dict)
    if values.get("name") != MEASURED:
        if again:
            raise ValueError(
                f"calibrate=true measures this machine, but cluster={values.get('name')}: leave "
                "one of them out"
            )
        return cluster_of({str(key): value for key, value in values.items()})
    measurements = None if again else measured()
    if measurements is None:
        measurements = calibrate()
        log.info("measurements are cached in %s", cache_file())
    values.pop("name")
    return cluster_of({**measurements, **{str(key): value for key, value in values.items()}})


def check_first(config: DictConfig, measures: bool) -> None:
    """Refuse what no cluster can train, before spending minutes on measuring this machine.

    Args:
        config: with a layout.
        measures: whether this machine will be measured.

    Raises:
        ValueError: if configuration, data or network are invalid.
    """
    uncut = config.copy()
    uncut.parallel.cut = None  # applies to candidate layouts with stages only
    check_config(uncut)
    planned_type(config)
    if measures:
        build_model(config, open_sources(config.data, int(config.seed), config.task.name))


def planned_type(config: DictConfig) -> torch.dtype:
    """Return the dtype of training.

    Raises:
        ValueError: if the planner does not support the precision.
    """
    precision = PRECISIONS[config.trainer.precision]
    if precision.mixed is not None:
        raise ValueError(
            f"the planner does not support trainer.precision={config.trainer.precision}: plan with "
            "float32, which takes more memory, and train with the resulting layout"
        )
    return precision.dtype


def job_of(config: DictConfig, cluster: Cluster) -> PlannedJob:
    """Make the job of a configuration of ``spatialdl.train``.

    Raises:
        ValueError: if the configuration is invalid.
    """
    dtype = planned_type(config)
    sources = open_sources(config.data, int(config.seed), config.task.name)
    if sources.train_views.varies:
        raise ValueError(
            f"data={config.data.name} has bags of different lengths, but the planner needs images "
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
        optimizer=functools.partial(make_optimizer, config.optimizer),
        segments=config.task.name == "segmentation",
        names=config.parallel.cut,
        read_bytes=_read_bytes(sources) if cluster.cores is not None else 0.0,
        on_cpu=cluster.cores is not None,
        tensor_plan=tuple(plan.items()),
        limit=limit_bytes(
            config.trainer.memory_limit_gb,
            config.parallel.stream_to,
            key="trainer.memory_limit_gb",
            where_key="parallel.stream_to",
        ),
        store=store_of(config, on_cpu=cluster.cores is not None),
    )


def store_of(config: DictConfig, on_cpu: bool) -> Literal["disk", "host"]:
    """Destination of tensors of virtual tiles; the host for devices, unless a folder is set.

    Args:
        on_cpu: whether ranks compute on CPU cores, in host memory.
    """
    folder = config.parallel.stream_to
    return "host" if folder == "host" or (folder is None and not on_cpu) else "disk"


def with_virtual_tiles(config: DictConfig, sources: Sources) -> DictConfig:
    """Resolve ``parallel.stream=auto`` to numbers of virtual tiles.

    Raises:
        ValueError: if there is no limit, or the network cannot be run without data.
    """
    if config.parallel.stream != AUTO:
        return config
    config, limit = config.copy(), config.trainer.memory_limit_gb
    shape = microbatch_shape(config, (sources.channels, *sources.image_size))
    dtype = PRECISIONS[config.trainer.precision].dtype
    choose_virtual_tiles(config.parallel, build_model(config, sources), shape, dtype, limit)
    return config


def _read_bytes(sources: Sources) -> float:
    """Memory per pixel for reading a box of an image."""
    longest: int = round(READ_SIDE ** (2 / len(sources.image_size)))
    sides = [min(int(side), longest) for side in sources.image_size]
    box = whole_box(sides)
    views = sources.train_views
    views.read(0, 0, box)  # warm-up: opens files, makes tables
    tracemalloc.start()
    try:
        views.read(0, 0, box)
        return tracemalloc.get_traced_memory()[1] / prod(sides)
    finally:
        tracemalloc.stop()


KEYS = ("world", "device_memory_gb", "cluster")
"""Keys of ``parallel=auto`` only."""

SHOWN = 5

_OWN = {"tensor": 1, "tensor_plan": None}
"""Defaults of keys that it sets itself."""


def choose(config: DictConfig, world: int, may_measure: bool = True) -> tuple[DictConfig, Row]:
    """Replace ``parallel=auto`` by the best layout; prints the best ones.

    Args:
        world: number of ranks.
        may_measure: whether to measure this machine if necessary; False while ranks run.

    Raises:
        ValueError: if nothing fits, or the cluster is unknown.
    """
    settings = config.parallel
    for key, default in _OWN.items():
        if settings[key] != default:
            raise ValueError(
                f"parallel=auto chooses how channels are divided: leave parallel.{key}="
                f"{settings[key]} out, or name a layout"
            )
    base = settings.copy()
    with open_dict(base):
        for key in KEYS:
            del base[key]
        base.name = "none"
    if settings.cluster == MEASURED and not may_measure and measured() is None:
        raise ValueError(
            "parallel=auto has no measurements of this machine: run "
            "`python -m spatialdl.plan --calibrate world=1` once, or name parallel.cluster"
        )
    plain = config.copy()
    plain.parallel = base
    chosen = cluster_file(settings.cluster)
    check_first(plain, settings.cluster == MEASURED and measured() is None)
    cluster = cluster_named(chosen)
    job = job_of(plain, cluster)
    rows = search(job, cluster, base, world, limit(settings.device_memory_gb, cluster, world))
    plain.parallel = rows[0].layout.config(base)
    print(table(rows[:SHOWN], job, cluster, len(rows)))
    print(f"\nchosen: {' '.join(rows[0].layout.overrides())}\n", flush=True)
    return plain, rows[0]


def choose_alone(config: DictConfig, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Like `choose`, before any rank runs; also returns the overrides of the layout.

    Raises:
        ValueError: if the configuration has no number of ranks, or no network.
    """
    world = config.parallel.world
    if world is None:
        raise ValueError(
            "parallel=auto needs the number of ranks: add parallel.world=..., or start it "
            "with mpiexec or srun"
        )
    fit_model_keys(config, overrides)
    chosen, row = choose(config, world)
    own = r"\+*parallel(=|\.(world|dev|clus|stream=))"
    kept = [word for word in overrides if not re.match(own, word)]
    return chosen, [*row.layout.overrides(), *kept]


def cluster_file(name: str) -> DictConfig:
    """Load the settings of an included cluster.

    Raises:
        ValueError: if the name is unknown.
    """
    folder = Path(str(files("spatialdl.conf"))) / "cluster"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"parallel.cluster={name} is unknown: take one of {', '.join(known)}")
    settings = OmegaConf.load(folder / f"{name}.yaml")
    assert isinstance(settings, DictConfig)
    return settings
