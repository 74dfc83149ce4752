"""What the configuration registers: layouts by name, and the resolver ``${new_folder:...}``.

A layout that ``parallel=`` names sets a few values of ``conf/parallel/none.yaml``.
"""

from __future__ import annotations

from itertools import count, product
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

PARTS: dict[str, dict[str, Any]] = {
    "dp": {"data": 2},
    "sp": {"grid": [2, 1], "spatial_stages": 1},
    "lp": {"stages": 2},
    "pp": {"stages": 2, "microbatches": 4},
    "gems": {"stages": 2, "microbatches": 2, "gems": {"variant": "mast"}},
}
"""Keys of ``parallel`` that each part of a name sets: ``dp+sp`` sets those of dp and of sp."""

EXPERIMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "four_tiles": ("sp", {"grid": [2, 2]}),
    "gems_resnet110": ("gems", {"stages": 4, "microbatches": 4, "gems": {"variant": "master"}}),
    "hyfi_amoebanet": ("sp+pp", {"grid": [2, 2], "stages": 3, "schedule": "1f1b"}),
}
"""Layouts of experiments: a name of `NAMES`, and the keys that differ from it.

Keys of ``parallel`` in an experiment itself would also change the layout that a user chooses.
"""

ABOUT = {
    "dp": "data parallelism: each replica trains on its own part of the batch",
    "sp": "spatial parallelism: every image is split into parallel.grid tiles",
    "lp": "layer parallelism: the network is cut into stages that work one after the other",
    "pp": "pipeline parallelism: network and batch are cut, stages work concurrently",
    "gems": "pipeline with a second replica of the network on the same ranks in inverse order "
    "(GEMS)",
    "sp+lp": "spatial parallelism in the first stages, then layer parallelism; other sums combine "
    "likewise",
}
"""What the help says of them."""

NAMES = tuple(
    "+".join(filter(None, parts))
    for parts in product(("", "dp"), ("", "sp"), ("", "lp", "pp", "gems"))
    if any(parts)
)


def register() -> None:
    """Make the layouts known to Hydra, beside the files of the group."""
    layouts: dict[str, tuple[str, dict[str, Any]]]
    layouts = {f"parallel/{name}": (name, {}) for name in NAMES}
    layouts |= {f"parallel/experiment/{name}": one for name, one in EXPERIMENTS.items()}
    for path, (name, keys) in layouts.items():
        node: dict[str, Any] = {"defaults": ["/parallel/none@_here_", "_self_"], "name": name}
        for part in name.split("+"):
            node.update(PARTS[part])
        group, _, file = path.rpartition("/")
        ConfigStore.instance().store(
            file, node | keys, group=group, package="parallel", provider="spatialdl"
        )


def new_folder(name: str) -> str:
    """Create a folder of this name; if it exists, name-2, name-3 ...

    Creation is atomic: runs that start in the same second, such as those of a job array, get a
    folder each, also from several machines.
    """
    for number in count(1):
        path = Path(name if number == 1 else f"{name}-{number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        break
    return str(path)
