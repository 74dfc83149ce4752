"""``parallel=auto``: the layout that the planner puts first."""

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
"""Of ``parallel=auto`` alone."""

SHOWN = 5

_OWN = {"tensor": 1, "tensor_plan": None, "late": None}
"""How it divides channels it says itself; as they come."""


def choose(config: DictConfig, world: int, may_measure: bool = True) -> tuple[DictConfig, Row]:
    """The configuration with the best layout in place of ``parallel=auto``; tells what it found.

    Args:
        world: ranks that it shall have.
        may_measure: whether this machine is measured if it was not; not while ranks are running.

    Raises:
        ValueError: if nothing fits, or there is no such cluster.
    """
    settings = config.parallel
    for key, default in _OWN.items():
        if settings[key] != default:
            raise ValueError(
                f"parallel=auto says itself how channels are divided: leave parallel.{key}="
                f"{settings[key]} out, or name a layout"
            )
    base = settings.copy()
    with open_dict(base):
        for key in KEYS:
            del base[key]
        base.name = "none"
    if settings.cluster == MEASURED and not may_measure and measured() is None:
        raise ValueError(
            "parallel=auto knows nothing of this machine yet: measure it once by "
            "`python -m spatialdl.plan --calibrate world=1`, or name parallel.cluster"
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
    """As `choose`, before any rank runs; and the words that say the same.

    Raises:
        ValueError: if the configuration does not say for how many ranks, or names no network.
    """
    world = config.parallel.world
    if world is None:
        raise ValueError(
            "parallel=auto does not know for how many ranks: add parallel.world=..., or start it "
            "with mpiexec or srun"
        )
    fit_model_keys(config, overrides)
    chosen, row = choose(config, world)
    own = r"\+*parallel(=|\.(world|dev|clus|stream=))"
    others = [one for one in overrides if not re.match(own, one)]
    return chosen, [*row.layout.overrides(), *others]


def cluster_file(name: str) -> DictConfig:
    """The settings of a cluster that comes along.

    Raises:
        ValueError: if there is none of this name.
    """
    folder = Path(str(files("spatialdl.conf"))) / "cluster"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"parallel.cluster={name} is unknown: take one of {', '.join(known)}")
    found = OmegaConf.load(folder / f"{name}.yaml")
    assert isinstance(found, DictConfig)
    return found
