"""Random layouts, networks, tasks and ways to train for a number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from hypothesis import strategies as st

from tests.mpi.fuzz.networks import BLOCKS, JOINS, TWICE

CLASSES = 3
Keys = dict[str, Any]
GRIDS = ((2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2))
SIZES = {
    2: ((7, 13), (11, 5), (16, 16), (31, 15), (24, 33), (37, 29)),
    3: ((5, 4, 11), (4, 3, 5), (7, 9, 6), (8, 8, 8), (13, 2, 5)),
}
"""Of images, by their dims."""


def _divides_samples(parallel: Keys) -> bool:
    return parallel["data"] > 1 or parallel["local_dp"] > 1 or parallel["gems.variant"] != "none"


LEFT_OUT: dict[str, Callable[[Keys], bool]] = {
    # refused by name
    "Views": lambda parallel: parallel["spatial_stages"] > 0,
    "Averages": lambda parallel: parallel["sync_batchnorm"] or parallel["local_dp"] > 1,
    "inplace": lambda parallel: "gather_before" in parallel,
    "Clamped": lambda parallel: parallel["recompute"] != "none" or _divides_samples(parallel),
}


@dataclass(frozen=True)
class Case:
    """What a run is.

    Attributes:
        size: of the images, without channels.
        batch: samples of a batch; a step takes ``trainer.accumulate`` of these.
        samples: of the data set.
        model, parallel, trainer, task, optimizer, comm: keys of the configuration, by group.
    """

    size: tuple[int, ...] = (24, 33)
    batch: int = 5
    samples: int = 10
    steps: int = 2
    model: Keys = field(default_factory=dict)
    parallel: Keys = field(default_factory=dict)
    trainer: Keys = field(default_factory=dict)
    task: Keys = field(default_factory=dict)
    optimizer: Keys = field(default_factory=dict)
    comm: Keys = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        count: int = self.parallel["microbatches"] * self.trainer["accumulate"]
        return count

    @property
    def step(self) -> int:
        """Samples of a step."""
        size: int = self.batch * self.trainer["accumulate"]
        return size

    @property
    def dims(self) -> int:
        return len(self.size)

    @property
    def data(self) -> int:
        replicas: int = self.parallel["data"]
        return replicas

    def overrides(self) -> list[str]:
        words = [f"task={self.task['name']}", f"optimizer={self.optimizer['name']}"]
        for group in ("model", "parallel", "trainer", "task", "optimizer", "comm"):
            keys = getattr(self, group)
            words += [f"++{group}.{k}={_text(v)}" for k, v in keys.items() if k != "name"]
        return words


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(one) for one in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def layouts(ranks: int) -> Iterator[Keys]:
    """Grids, stages and replicas that need exactly so many ranks."""
    stages = [(0, 1), (1, 0), (0, 2), (1, 1), (1, 2), (2, 1), (2, 0), (3, 0)]  # spatial, later
    for interleave, (spatial, later) in (
        *product((1,), stages),
        *product((2,), ((0, 4), (4, 0), (0, 6))),
    ):
        grids = GRIDS if spatial else [(1, 1)]
        locals_ = (1, 2, 3) if spatial and later else (1,)
        for grid, data, local in product(grids, (1, 2, 3), locals_):
            widths = [prod(grid)] * spatial + [local] * later
            if data * sum(widths[: len(widths) // interleave]) == ranks:
                yield {
                    **{"grid": list(grid), "data": data, "stages": len(widths)},
                    **{"spatial_stages": spatial, "local_dp": local, "interleave": interleave},
                }


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    """Of a number of ranks, the simplest ones first."""
    return draw_case(lambda *values: draw(st.sampled_from(values)), ranks)


def case_of(seed: int, ranks: int) -> Case:
    """Any of them."""
    rng = random.Random(f"{seed} on {ranks}")
    return draw_case(lambda *values: rng.choice(values), ranks)


def draw_case(one: Callable[..., Any], ranks: int) -> Case:
    """Make a case by choices.

    Args:
        one: chooses one of the values that it is given.
    """
    parallel = draw_parallel(one, one(*layouts(ranks)))
    task = one(*TASKS, *(PIXEL_TASKS if parallel["local_dp"] == 1 else ()))
    trainer = {
        "accumulate": one(1, 1, 2, 3),
        "clip_norm": one(None, None, 0.5),
        "ema": one(None, None, 0.8),
    }
    optimizer = one(*(OPTIMIZERS[:2] if parallel["shard_state"] else OPTIMIZERS))
    backend = one(None, None, None, "gloo", "mpi4py")
    comm = {"backend": backend if parallel["shard_state"] else None}
    model, head = {"kind": one("chain", "graph")}, "labels"
    if task["name"] == "segmentation":
        model["kind"], head = "graph", "masks"
    trainer["freeze"] = one([], ["stem.*"]) if model["kind"] == "graph" else []
    if parallel["spatial_stages"] and one(False, False, False, True):
        block = one(0, 1, 2, 3)  # there are as many at least
        parallel["gather_before"] = (
            f"{block + 2}" if model["kind"] == "chain" else f"blocks.{block}"
        )
    left_out = [name for name, is_left_out in LEFT_OUT.items() if is_left_out(parallel)]
    known = [name for name in BLOCKS if name not in left_out]
    names = [one(*known) for _ in range(one(0, 1, 2, 3))]
    twice = one(*TWICE)  # so that there is something to recompute
    dims = one(2, 2, 3)  # no data set on disk has signals
    trainer["channels_last"] = dims == 2 and one(False, False, False, True)
    size = one(*SIZES[dims])
    if dims == 3:
        parallel["grid"] = one(*_grids_of(size, prod(parallel["grid"])))
    model |= {
        **{"seed": one(*range(1000)), "head": head, "dims": dims},
        **{"names": [twice, *names, twice, one(*TWICE)], "stride": one("none", "conv", "pool")},
        **{"joins": [name for name in JOINS if name not in left_out]},
    }
    least = parallel["microbatches"] * parallel["data"] * parallel["local_dp"]
    batch = least + one(0, 0, 1, 2, 3, least)
    more = 0 if parallel["shard_state"] else one(0, 0, 1, 3)
    samples = batch * trainer["accumulate"] * 2 + more
    rest = model, parallel, trainer, task, optimizer, comm
    return Case(size, batch, samples, one(2, 3, 5), *rest)


def _grids_of(size: tuple[int, ...], parts: int) -> list[list[int]]:
    """Those that leave pixels to every rank; one there is, but for the smallest images."""
    every = product(range(1, parts + 1), repeat=len(size))
    grids = [list(grid) for grid in every if prod(grid) == parts]
    return [g for g in grids if all(n >= k for n, k in zip(size, g, strict=True))]


def draw_parallel(one: Callable[..., Any], found: Keys) -> Keys:
    """The other keys of ``parallel``."""
    has_stages = found["stages"] > found["interleave"]
    variants = ("none", "basic", "mast", "master") if has_stages else ("none",)
    variant = one(*variants) if found["interleave"] == 1 else "none"
    schedule = "gpipe"
    if found["interleave"] > 1:
        schedule = "interleaved"
    elif variant == "none":
        schedule = one("gpipe", "1f1b")
    can_shard = found["data"] > 1 and schedule == "gpipe" and variant == "none"
    return {
        **found,
        "schedule": schedule,
        "gems.variant": variant,
        "microbatches": one(1, 2, 3, 4) if variant == "none" else 2 * one(1, 2),
        "recompute": one("none", "none", "block", "stage"),
        "sync_batchnorm": found["data"] > 1 and one(False, False, True),
        "shard_state": can_shard and one(False, False, True),
    }


OPTIMIZERS: list[Keys] = [
    {"name": "sgd", "lr": 0.05},
    {"name": "adamw", "lr": 0.01},
    {"name": "lars", "lr": 1.0, "trust": 0.01},
    {"name": "lamb", "lr": 0.01},
]
TASKS: list[Keys] = [
    {"name": "classification"},
    {"name": "classification", "class_weights": [0.3, 1.0, 2.5], "label_smoothing": 0.1},
    {"name": "classification", "class_weights": [0.0, 1.0, 2.5]},
    {"name": "multilabel", "pos_weight": [0.5, 1.0, 2.0]},
    {"name": "regression", "loss": "huber", "huber_delta": 0.3},
    {"name": "regression", "loss": "mse"},
]
PIXEL_TASKS: list[Keys] = [
    {"name": "segmentation"},
    {"name": "segmentation", "class_weights": [0.3, 1.0, 2.5]},
    {"name": "segmentation", "class_weights": [0.3, 1.0, 2.5], "dice": 0.5},
    {"name": "segmentation", "class_weights": [0.0, 1.0, 2.5], "label_smoothing": 0.1},
    {"name": "segmentation", "loss._target_": "tests.mpi.fuzz.networks.squared"},
    {"name": "classification", "class_weights": [0.0, 1.0, 2.5], "label_smoothing": 0.1},
    {"name": "classification", "loss._target_": "tests.mpi.fuzz.networks.summed"},
    {
        "name": "classification",
        "loss._target_": "tests.mpi.training.small.focal",
        "loss.gamma": 2.0,
    },
]
"""And others that do not take layers later than the pixels that divide samples."""
