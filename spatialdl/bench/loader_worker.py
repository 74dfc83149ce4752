"""Subprocess that loads a data set for an emulated accelerator.

Compute is emulated by sleeping, as in DLIO. Prints the end times of the steps as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path

from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.batches import Batching
from spatialdl.data.loader import Loader
from spatialdl.data.shard_usage import training_usage
from spatialdl.data.staging.cache import NodeCache
from spatialdl.data.views import Views
from spatialdl.training.staging import StageTo, Staging

SEED = 1
_LOOK_AGAIN_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path)
    add("--batch", type=int, required=True)
    add("--compute", type=float, required=True)
    add("--workers", type=int, required=True)
    add("--augment", help="preset of data/augment")
    add("--io", default="auto")
    add("--stage", default="off", help="folder to stage to")
    add("--staged", action="store_true", help="start after staging is complete")
    options = parser.parse_args()

    dataset = ShardDataset(options.folder, io=options.io)
    size = dataset.image_size(0)
    views = Views(dataset, size, augmentation=_preset(options.augment), seed=SEED)
    batching = Batching(options.batch, 1, 0, [(0, size[0], 0, size[1])], [None])
    batches = -(-len(views) // options.batch)
    began = time.perf_counter()
    with ExitStack() as stack:
        if not options.staged:  # worker processes start during staging, as in training
            loader = Loader(views, batching, SEED, workers=options.workers)
        stack.enter_context(
            Staging(
                SingleProcess(),
                StageTo(options.stage),
                [dataset],
                lambda: training_usage(views, batching, SEED, batches),
            )
        )
        if options.staged:
            _wait_for(Path(options.stage), len(dataset.manifest.shards))
            began = time.perf_counter()
            loader = Loader(views, batching, SEED, workers=options.workers)
        ends = []
        for _ in loader.batches():
            time.sleep(options.compute)
            ends.append(time.perf_counter() - began)
    loader.close()
    print(json.dumps({"ends": ends}))


def _preset(name: str | None) -> Augmentation | None:
    if name is None:
        return None
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", ["data=shards", f"data/augment={name}", "data.path=none"])
    return Augmentation.from_config(config.data.augment)


def _wait_for(disk: Path, shards: int) -> None:
    jobs = NodeCache(disk).path / "jobs"
    while len(list(jobs.glob("*/*.h5"))) < shards:
        time.sleep(_LOOK_AGAIN_S)


if __name__ == "__main__":
    main()
