"""What the configuration registers: layouts by name, and the resolver ``${new_folder:...}``.

A layout that ``parallel=`` names sets a few numbers of ``conf/parallel/none.yaml``.
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
    for name in NAMES:
        node: dict[str, Any] = {"defaults": ["none", "_self_"], "name": name}
        for part in name.split("+"):
            node.update(PARTS[part])
        ConfigStore.instance().store(name, node, group="parallel", provider="spatialdl")


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
