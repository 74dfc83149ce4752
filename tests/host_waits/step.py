"""One rank's training step of the training command, on a device of which nothing is computed."""

from __future__ import annotations

from functools import partial

import torch
from omegaconf import DictConfig
from torch import Tensor

from spatialdl.parallel.layout import Layout
from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline, PipelineOptions
from spatialdl.spatial.attention_kernels import KERNELS
from spatialdl.spatial.tensor import from_tile
from spatialdl.training.layouts import placement_of, schedule_of
from spatialdl.training.optimization.precision import PRECISIONS
from spatialdl.training.optimization.update import Update
from spatialdl.training.step import Step
from spatialdl.training.tasks.losses import classification_loss, segmentation_loss
from tests.composing import composed
from tests.host_waits.device import NAME, counting
from tests.host_waits.ledger import Ledger
from tests.host_waits.networks import CLASSES, NETWORKS, SEGMENTS, SIZE
from tests.host_waits.transport import CountedMpi

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
}
"""Each of four ranks, as words of the training command."""


def counted_step(network: str, layout: str) -> Ledger:
    """What the second step of rank 0 does; the first one also sets up what stays.

    Args:
        network: a key of `NETWORKS`.
        layout: a key of `LAYOUTS`.
    """
    config = composed("train", f"{LAYOUTS[layout]} seed=0")
    torch.manual_seed(0)
    with counting() as ledger:
        comm = CountedMpi(ledger, 0, range(4))
        pipeline = _pipeline(config, network, comm)
        update = Update(config, pipeline, batch=SAMPLES, steps=10, steps_per_epoch=10)
        step = Step(config, pipeline, update, mixup=0.0, num_classes=CLASSES, world=comm)
        batch = [_microbatch(pipeline, network)]
        step.run(batch, 0)
        ledger.is_on = True
        step.run(batch, 1)
        ledger.is_on = False
    return ledger


def _pipeline(config: DictConfig, network: str, comm: CountedMpi) -> Pipeline:
    placement = placement_of(config.parallel, len(SIZE))
    loss = segmentation_loss if network in SEGMENTS else classification_loss
    options = PipelineOptions(device=DEVICE, mixed=PRECISIONS[config.trainer.precision].mixed)
    return Pipeline(
        NETWORKS[network](),
        placement,
        schedule_of(config.parallel, placement),
        comm,
        partial(loss, classes=CLASSES),
        (3, *SIZE),
        options,
    )


def _microbatch(pipeline: Pipeline, network: str) -> Microbatch:
    """This rank's part of a batch, already on the device."""
    mesh = pipeline.first(0)
    assert mesh is not None
    samples = SAMPLES // mesh.data
    box = Layout.even(samples, SIZE, mesh.grid).boxes[mesh.part].shape[1:]
    tile = torch.zeros(samples, 3, *box).to(DEVICE)
    target: Tensor = torch.zeros(samples, dtype=torch.int64).to(DEVICE)
    if network in SEGMENTS:
        target = torch.zeros(samples, *box, dtype=torch.int64).to(DEVICE)
        if mesh.parts > 1:
            target = from_tile(target, mesh.layout(samples, SIZE), mesh)
    return Microbatch(samples, 1 / mesh.data, tile, target)
