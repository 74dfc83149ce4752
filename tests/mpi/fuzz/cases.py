"""Random layouts, tasks and ways to train, drawn from a seed for a number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any, NamedTuple

CLASSES = 3
GRIDS = ((4, 1), (1, 4), (2, 2), (2, 1), (1, 2), (3, 1), (1, 3))
SIZES = ((31, 15), (37, 29), (24, 33), (16, 16), (7, 13), (11, 5))
SIGNALS = ((101,), (64,), (37,), (13,), (8,))
VOLUMES = ((7, 9, 6), (5, 4, 11), (8, 8, 8), (13, 2, 5), (4, 3, 4))


def _divides_samples(parallel: dict[str, Any]) -> bool:
    return parallel["data"] > 1 or parallel["local_dp"] > 1 or parallel["gems.variant"] != "none"


LEFT_OUT: dict[str, Callable[[dict[str, Any]], bool]] = {
    # refused by name
    "Views": lambda parallel: parallel["spatial_stages"] > 0,
    "Averages": lambda parallel: parallel["sync_batchnorm"] or parallel["local_dp"] > 1,
    "inplace": lambda parallel: "gather_before" in parallel,
    "Clamped": lambda parallel: parallel["recompute"] != "none" or _divides_samples(parallel),
}


class Case(NamedTuple):
    """What a run does beside its network and data.

    Attributes:
        batch: samples of a batch; a step takes ``trainer.accumulate`` of these.
        parallel, trainer, task, optimizer, comm: keys of the configuration, by group.
    """

    seed: int
    network: str
    size: tuple[int, ...]
    batch: int
    samples: int
    parallel: dict[str, Any]
    trainer: dict[str, Any]
    task: dict[str, Any]
    optimizer: dict[str, Any]
    comm: dict[str, Any]
    steps: int

    @property
    def microbatches(self) -> int:
        return self.parallel["microbatches"] * self.trainer["accumulate"]

    @property
    def step(self) -> int:
        """Samples of a step."""
        return self.batch * self.trainer["accumulate"]

    @property
    def dims(self) -> int:
        return len(self.size)

    @property
    def data(self) -> int:
        return self.parallel["data"]

    @property
    def by_hand(self) -> bool:
        """Whether a loop over a `Pipeline` trains, and not the command's trainer."""
        return self.dims == 1 or (self.seed % 4 == 3 and self.is_plain)

    @property
    def is_plain(self) -> bool:
        """Whether a loop by hand can do the same."""
        is_plain = self.head == "labels" and not self.parallel["shard_state"]
        return is_plain and self.trainer["ema"] is None and self.comm["backend"] is None

    @property
    def leave_out(self) -> list[str]:
        """Blocks and connections that this layout does not take."""
        return [name for name, is_left_out in LEFT_OUT.items() if is_left_out(self.parallel)]

    @property
    def head(self) -> str:
        return "masks" if self.task["name"] == "segmentation" else "labels"

    def overrides(self) -> list[str]:
        groups = {
            "parallel": self.parallel,
            "trainer": self.trainer,
            "task": {k: v for k, v in self.task.items() if k != "name"},
            "optimizer": {k: v for k, v in self.optimizer.items() if k != "name"},
            "comm": self.comm,
        }
        words = [f"task={self.task['name']}", f"optimizer={self.optimizer['name']}"]
        for group, keys in groups.items():
            words += [f"++{group}.{key}={_text(value)}" for key, value in keys.items()]
        return words

    def __str__(self) -> str:
        return " ".join(
            (
                f"seed {self.seed}{', by hand' * self.by_hand}: {self.network}",
                "x".join(map(str, self.size)),
                f"batch {self.batch} of {self.samples}, {self.steps} steps",
                *(word.removeprefix("++") for word in self.overrides()),
            )
        )


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(one) for one in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def drawn(seed: int, ranks: int) -> Case:
    """The case of a seed on so many ranks."""
    rng = random.Random(f"{seed} on {ranks}")
    parallel = layout(rng, ranks)
    kind = rng.choice(("chain", "graph", "graph"))
    trainer: dict[str, Any] = {
        "accumulate": rng.choice((1, 1, 2, 3)),
        "clip_norm": rng.choice((None, None, 0.5)),
        "ema": rng.choice((None, None, 0.8)),
        "channels_last": rng.random() < 0.2,
        "freeze": rng.choice(([], ["stem.*"])) if kind == "graph" else [],
    }
    task = drawn_task(rng, parallel)
    if parallel["spatial_stages"] and rng.random() < 0.2:
        block = rng.randint(0, 3)  # there are as many at least
        is_chain = kind == "chain" and task["name"] != "segmentation"
        parallel["gather_before"] = str(block + 2) if is_chain else f"blocks.{block}"
    local = parallel["local_dp"]
    least = parallel["microbatches"] * parallel["data"] * local
    batch = least + rng.choice((0, 0, 1, 2, 3, least))
    samples = batch * trainer["accumulate"] * 2 + rng.choice((0, 0, 1, 3))
    if parallel["shard_state"]:
        samples = batch * trainer["accumulate"] * 2
    optimizer = rng.choice(
        (
            {"name": "sgd", "lr": 0.05},
            {"name": "sgd", "lr": 0.05, "nesterov": True},
            {"name": "adamw", "lr": 0.01},
            {"name": "lars", "lr": 1.0, "trust": 0.01},
            {"name": "lamb", "lr": 0.01},
        )
    )
    if parallel["shard_state"] and optimizer["name"] in ("lars", "lamb"):
        optimizer = {"name": "adamw", "lr": 0.01}
    comm = {"backend": rng.choice((None, None, None, "gloo", "mpi4py"))}
    case = Case(
        *(seed, kind, rng.choice(SIZES), batch, samples),
        *(parallel, trainer, task, optimizer, comm, rng.choice((2, 3, 3, 5))),
    )
    return reshaped(case, random.Random(f"dims of {seed} on {ranks}"))


def reshaped(case: Case, rng: random.Random) -> Case:
    """The same for signals, images or volumes; no data set on disk has signals."""
    dims = rng.choice((1, 2, 3) if case.is_plain else (2, 2, 3))
    if dims == 2:
        return case
    sizes, parts = (SIGNALS if dims == 1 else VOLUMES), prod(case.parallel["grid"])
    fitting = [
        (size, grid)
        for size in sizes
        for grid in product(range(1, parts + 1), repeat=dims)
        if prod(grid) == parts and all(n >= k for n, k in zip(size, grid, strict=True))
    ]
    size, grid = rng.choice(fitting)
    parallel = {**case.parallel, "grid": list(grid)}
    return case._replace(size=size, parallel=parallel)


def layout(rng: random.Random, ranks: int) -> dict[str, Any]:
    """Keys of ``parallel`` that need exactly so many ranks."""
    while True:
        found = _layout(rng)
        if found is not None and needs(found) == ranks:
            return found


def needs(parallel: dict[str, Any]) -> int:
    """Ranks of a layout."""
    spatial, stages = parallel["spatial_stages"], parallel["stages"]
    widths = [prod(parallel["grid"])] * spatial + [parallel["local_dp"]] * (stages - spatial)
    return parallel["data"] * sum(widths[: stages // parallel["interleave"]])


def _layout(rng: random.Random) -> dict[str, Any] | None:
    interleave = rng.choice((1, 1, 1, 1, 2))
    spatial, later = rng.choice(((0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 1), (2, 0), (3, 0)))
    stages = spatial + later
    if interleave > 1:
        spatial, stages = rng.choice(((0, 4), (4, 4), (0, 6)))
        later = stages - spatial
    variant = rng.choice(("none", "none", "basic", "mast", "master"))
    if stages // interleave < 2 or interleave > 1:
        variant = "none"
    times = rng.choice((1, 2)) if variant == "master" else 1
    schedule = "gpipe"
    if interleave > 1:
        if stages // interleave < 2:
            return None
        schedule = "interleaved"
    elif variant == "none":
        schedule = rng.choice(("gpipe", "1f1b", "zero_bubble"))
    microbatches = rng.choice((1, 2, 3, 4))
    if variant != "none":
        microbatches = 2 * times * rng.choice((1, 1, 2))
    data = rng.choice((1, 1, 2, 2, 3))
    local = rng.choice((1, 1, 2, 3)) if spatial and later and interleave == 1 else 1
    shard = data > 1 and schedule == "gpipe" and variant == "none" and rng.random() < 0.2
    return {
        "grid": list(rng.choice(GRIDS)) if spatial else [1, 1],
        "data": data,
        "stages": stages,
        "spatial_stages": spatial,
        "local_dp": local,
        "interleave": interleave,
        "schedule": schedule,
        "gems.variant": variant,
        "gems.times": times,
        "microbatches": microbatches,
        "recompute": rng.choice(("none", "none", "block", "stage")),
        "sync_batchnorm": data > 1 and rng.random() < 0.25,
        "shard_state": shard,
        "balance": rng.choice(("time", "time", "memory")),
    }


def drawn_task(rng: random.Random, parallel: dict[str, Any]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [
        {"name": "classification"},
        {"name": "classification", "class_weights": [0.3, 1.0, 2.5], "label_smoothing": 0.1},
        {"name": "classification", "class_weights": [0.0, 1.0, 2.5]},
        {"name": "multilabel", "pos_weight": [0.5, 1.0, 2.0]},
        {"name": "regression", "loss": "huber", "huber_delta": 0.3},
        {"name": "regression", "loss": "mse"},
    ]
    if parallel["local_dp"] == 1:
        choices += [
            {"name": "classification", "class_weights": [0.0, 1.0, 2.5], "label_smoothing": 0.1},
            {"name": "classification", "loss._target_": FOCAL, "loss.gamma": 2.0},
            {"name": "segmentation", "class_weights": [0.3, 1.0, 2.5]},
            {"name": "segmentation", "class_weights": [0.3, 1.0, 2.5], "dice": 0.5},
            {"name": "segmentation"},
            {"name": "classification", "loss._target_": f"{LOSSES}.summed"},
            {"name": "segmentation", "loss._target_": f"{LOSSES}.squared"},
            {"name": "segmentation", "class_weights": [0.0, 1.0, 2.5], "label_smoothing": 0.1},
        ]
    return rng.choice(choices)


FOCAL = "tests.mpi.training.small.focal"
LOSSES = "tests.mpi.fuzz.networks"

PLAIN = Case(
    *(1, "graph", (24, 33), 5, 10),
    {
        **{"grid": [2, 1], "data": 2, "stages": 1, "spatial_stages": 1, "local_dp": 1},
        **{"interleave": 1, "schedule": "gpipe", "gems.variant": "none", "gems.times": 1},
        **{"microbatches": 2, "recompute": "none", "sync_batchnorm": False},
        **{"shard_state": False, "balance": "time"},
    },
    {"accumulate": 1, "clip_norm": None, "ema": None, "channels_last": False, "freeze": []},
    *({"name": "classification"}, {"name": "sgd", "lr": 0.05}, {"backend": None}, 2),
)
"""On four ranks nothing but data and spatial parallelism."""
