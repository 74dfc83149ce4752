"""Collective updates: overflows in one stage, clipping and averages."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.optimization.update import Update
from tests.composing import composed
from tests.mpi.device import DEVICE
from tests.mpi.training.small import trained
from tests.training.checkpoints.runs import table

WORLD = MPI.COMM_WORLD
CHAIN = {
    2: [Placement(1, ((1, 1),) * 2), Placement(1, ((1, 1),) * 2, 1, True)],
    3: [Placement(1, ((1, 1),) * 3)],
    4: [Placement(2, ((1, 1),) * 2), Placement(1, ((1, 1),) * 2, 1, False, (1, 3))],
}


class Steep(torch.autograd.Function):
    """The gradient that comes back from here on overflows where an image says so."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.detach().abs().amax() > 50, torch.full_like(grad, torch.inf), grad)


class Cliff(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Steep.apply(x)


def network() -> nn.Sequential:
    """Overflows happen in front of `Cliff` only: in the first stage."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), Cliff(), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(4, 3, 12, 10, generator=draw)
    if step in (1, 2):
        images[3] *= 200  # of one micro-batch
    return images, torch.randint(3, (4,), generator=draw)


LONG = [pytest.mark.slow] if WORLD.size > 3 else []


def cases(table: dict[int, list]) -> list:
    return [
        pytest.param(*(one if type(one) is tuple else (one,)), marks=LONG)
        for one in table.get(WORLD.size, [])
    ]


@pytest.mark.parametrize("placement", cases(CHAIN), ids=Placement.describe)
def test_an_overflow_on_one_stage_leaves_the_step_out_on_all_ranks(placement: Placement) -> None:
    world = MpiCommunicator(WORLD)
    schedule = make_schedule("basic" if placement.mirrored else "gpipe", placement, 2)
    cut = ["3", "4"][: placement.stages - 1]
    pipeline = PipelineRuntime(
        *(network(), placement, schedule, world, F.cross_entropy, (3, 12, 10)),
        PipelineOptions(cut=cut, mixed=torch.float16, device=DEVICE),
    )
    words = ("scheduler=polynomial", "optimizer.momentum=0.9", "trainer.clip_norm=0.01")
    config = composed("train", *words, "trainer.ema=0.5")
    update = Update(config, pipeline, steps=6)

    plain = network().to(DEVICE)
    groups = [
        {"params": [one for one in plain.parameters() if one.dim() > 1]},
        {"params": [one for one in plain.parameters() if one.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, 6, 0.9)
    scaler = torch.amp.GradScaler(DEVICE.type)
    average = copy.deepcopy(plain)

    for step in range(6):
        images, labels = (one.to(DEVICE) for one in batch(step))
        parts, pieces = [], []
        for m in range(2):
            for replica in range(placement.data):
                count = 2 // placement.data
                first = 2 * m + replica * count
                piece = images[first : first + count], labels[first : first + count]
                pieces.append(piece)
                if replica == pipeline.replica:
                    parts.append(Microbatch(count, count / 4, *piece))
        assert update.scaler is not None
        assert update.scaler.scale == scaler.get_scale()
        pipeline.train_step(parts, step, update.scale)
        update.step()

        optimizer.zero_grad()
        for x, target in pieces:
            with torch.autocast(DEVICE.type, torch.float16):
                loss = F.cross_entropy(plain(x), target) * len(x) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert update.skipped == (step in (1, 2))
        assert update.learning_rate == pytest.approx(scheduler.get_last_lr()[0])
        scaler.step(optimizer)
        scaler.update()
        if step not in (1, 2):
            scheduler.step()
            with torch.no_grad():
                for mean, value in zip(average.parameters(), plain.parameters(), strict=True):
                    mean.lerp_(value, 0.5)
    assert update.scaler.state_dict() == {"scale": 2.0**14, "steps": 3}
    for name, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-6)
    assert update.average is not None
    for name, value in update.average.state_dict().items():
        torch.testing.assert_close(value, average.state_dict()[name], rtol=0, atol=1e-6)


ALL_AT_ONCE = (
    "trainer.accumulate=2 trainer.ema=0.6 trainer.channels_last=true trainer.clip_norm=0.5 "
    "optimizer.decay_norms_and_biases=true trainer.validate_every=1"
)
LAYOUTS = {
    2: [
        ("parallel=none parallel.tensor=2", "optimizer=lars scheduler=one_cycle optimizer.lr=50"),
        ("parallel=none parallel.tensor=2", "optimizer=lamb scheduler=step"),
        ("parallel=sp", "optimizer=lars scheduler=one_cycle optimizer.lr=50"),
        ("parallel=pp parallel.microbatches=1", "optimizer=lamb scheduler=step"),
        ("parallel=dp parallel.shard_state=true comm.backend=mpi4py", "+optimizer.nesterov=true"),
    ],
    4: [
        ("parallel=sp+lp parallel.tensor=[1,2]", "optimizer=lars optimizer.lr=50"),
        ("parallel=sp parallel.tensor=2", "optimizer=adamw"),
        ("parallel=sp+pp parallel.stages=2 parallel.spatial_stages=2", "optimizer=adamw"),
        ("parallel=sp+lp parallel.grid=[3,1]", "optimizer=lamb scheduler=polynomial"),
    ],
}


SMALL = (
    *("model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "data.samples=12"),
    *("data.validation_samples=3", "data.batch_size=4", "trainer.max_steps=3"),
    "trainer.precision=float64",
)


@pytest.mark.parametrize(("layout", "recipe"), cases(LAYOUTS))
def test_a_recipe_gives_the_numbers_of_one_process(
    layout: str, recipe: str, tmp_path: Path, ends_process_group: None
) -> None:
    world = MpiCommunicator(WORLD)
    options = [*ALL_AT_ONCE.split(), *recipe.split()]
    _, ours = trained(tmp_path / "ours", world, *SMALL, *layout.split(), *options)
    if world.rank != 0:
        return
    microbatches = {"pp": 1, "dp": 2, "sp+pp": 4}.get(layout.split(maxsplit=1)[0].split("=")[1], 1)
    alone = f"parallel.microbatches={microbatches}"
    _, plain = trained(tmp_path / "plain", SingleProcess(), *SMALL, alone, *options)
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-10)
    rows, expected = (table(tmp_path / name / "metrics.csv") for name in ("ours", "plain"))
    assert [row["learning_rate"] for row in rows] == [row["learning_rate"] for row in expected]
    losses = [[one["loss"] for one in run["validation"]] for run in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
