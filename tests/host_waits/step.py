"""Ranks' training steps of the training command, on a device of which nothing is computed."""

from __future__ import annotations

from functools import partial

import torch
from omegaconf import DictConfig
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.parallel.layout import Layout
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.spatial.attention_kernels import KERNELS
from spatialdl.spatial.tensor import from_tile
from spatialdl.training.layouts import placement_of, schedule_of
from spatialdl.training.optimization.precision import PRECISIONS
from spatialdl.training.optimization.update import Update
from spatialdl.training.step import TrainingStep
from spatialdl.training.tasks.losses import classification_loss, segmentation_loss
from tests.composing import composed
from tests.host_waits.device import NAME, counting
from tests.host_waits.ledger import Ledger, most
from tests.host_waits.networks import CLASSES, NETWORKS, SEGMENTS, SIZE
from tests.host_waits.transport import CountedMpi

RANKS = 4
SAMPLES = 4
DEVICE = torch.device(NAME, 0)
KERNELS[NAME] = KERNELS["cuda"]  # of which shapes are enough

_SP = "parallel=sp parallel.grid=[2,2]"
LAYOUTS = {
    "sp": _SP,
    "dp": "parallel=dp parallel.data=4",
    "sp, clipping": f"{_SP} trainer.clip_norm=1.0",
    "sp, fp16": f"{_SP} trainer.precision=fp16-mixed",
    "sp, LARS": f"{_SP} optimizer=lars",
    "lp": "parallel=lp parallel.stages=4",
    "pp": "parallel=pp parallel.stages=4 parallel.schedule=1f1b",
    "gems": "parallel=gems parallel.stages=4 parallel.microbatches=4",
}
"""Each of four ranks, as words of the training command."""


def counted_step(network: str, layout: str) -> Ledger:
    """What the second step of a rank does; the first one also sets up what stays.

    Args:
        network: a key of `NETWORKS`.
        layout: a key of `LAYOUTS`; of one stage rank 0 is counted, of several the most of any rank.
    """
    config = composed("train", *f"{LAYOUTS[layout]} seed=0".split())
    ranks = RANKS if config.parallel.stages > 1 else 1
    return most([_of_rank(rank, config, network) for rank in range(ranks)])


def _of_rank(rank: int, config: DictConfig, network: str) -> Ledger:
    torch.manual_seed(0)
    with counting() as ledger:
        comm = CountedMpi(ledger, rank, range(RANKS))
        pipeline = _pipeline(config, network, comm)
        update = Update(config, pipeline, batch=SAMPLES, steps=10, steps_per_epoch=10)
        step = TrainingStep(config, pipeline, update, mixup=0.0, num_classes=CLASSES, world=comm)
        count = pipeline.schedule.microbatches
        batch = [_microbatch(pipeline, network, number, count) for number in range(count)]
        step.run(batch, 0)
        ledger.is_on = True
        step.run(batch, 1)
        ledger.is_on = False
    return ledger


def _pipeline(config: DictConfig, network: str, comm: CountedMpi) -> PipelineRuntime:
    placement = placement_of(config.parallel, len(SIZE))
    loss = segmentation_loss if network in SEGMENTS else classification_loss
    options = PipelineOptions(device=DEVICE, mixed=PRECISIONS[config.trainer.precision].mixed)
    return PipelineRuntime(
        NETWORKS[network](),
        placement,
        schedule_of(config.parallel, placement),
        comm,
        partial(loss, classes=CLASSES),
        (3, *SIZE),
        options,
    )


def _microbatch(pipeline: PipelineRuntime, network: str, number: int, count: int) -> Microbatch:
    """This rank's part of one of `count` micro-batches, already on the device."""
    placement = pipeline.placement
    samples = SAMPLES // placement.data // count
    first, last = pipeline.first(number), pipeline.last(number)
    return Microbatch(
        samples,
        1 / placement.data / count,
        torch.zeros(samples, 3, *_box(first, samples)).to(DEVICE) if first else None,
        _target(last, network, samples) if last else None,
    )


def _box(mesh: Mesh, samples: int) -> tuple[int, ...]:
    return Layout.even(samples, SIZE, mesh.grid).boxes[mesh.part].shape[1:]


def _target(mesh: Mesh, network: str, samples: int) -> Tensor:
    """Labels of samples, or of the pixels of this rank."""
    if network not in SEGMENTS:
        return torch.zeros(samples, dtype=torch.int64).to(DEVICE)
    target = torch.zeros(samples, *_box(mesh, samples), dtype=torch.int64).to(DEVICE)
    return from_tile(target, mesh.layout(samples, SIZE), mesh) if mesh.parts > 1 else target
