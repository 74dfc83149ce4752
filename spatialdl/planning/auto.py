"""``parallel=auto``: the planner's best layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from spatialdl.configuring.own_keys import fit_model_keys
from spatialdl.planning.calibrate import measured
from spatialdl.planning.search import Row, limit, search, table
from spatialdl.planning.setup import MEASURED, check_first, cluster_named, job_of

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
