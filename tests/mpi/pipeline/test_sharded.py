"""Sharded state: what a rank holds, and what is refused; the table of layouts has the
numbers."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import device_path
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.mpi.device import DEVICE, device_key
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

pytestmark = [pytest.mark.usefixtures("ends_process_group"), pytest.mark.world(2, 3)]
RANKS = MPI.COMM_WORLD.size
BACKENDS = ["null", "nccl"] if device_path().name == "nccl" else ["null"]
WIDTH = 12 * 32  # in equal parts for 2 and 3 ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(48, WIDTH, bias=False), nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.wide(x).relu())


def network() -> nn.Module:
    torch.manual_seed(3)
    blocks = nn.Sequential(*(Block() for _ in range(4)))
    return nn.Sequential(nn.Flatten(), blocks, nn.Linear(48, 48)).double()


class Branches(nn.Module):
    """Which part learns depends on what is in the image."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(48, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[int(x.sum() > 0)](x.flatten(1))


def pipeline_of(
    model: nn.Module,
    world: Communicator,
    shard: bool = True,
    parts: int = 1,
    backend: str | None = None,
) -> PipelineRuntime:
    placement = Placement(RANKS, ((1, 1),))
    schedule = make_schedule("gpipe", placement, parts)
    return PipelineRuntime(
        *(model, placement, schedule, world, F.cross_entropy, (3, 4, 4)),
        PipelineOptions(shard_state=shard, backend=backend if shard else None, device=DEVICE),
    )


def batch(replica: int, step: int = 0, samples: int = 2) -> Microbatch:
    draw = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(samples, 3, 4, 4, dtype=torch.float64, generator=draw)
    labels = torch.randint(6, (samples,), generator=draw)
    return Microbatch(samples, 1 / RANKS, x.to(DEVICE), labels.to(DEVICE))


def test_adamw_makes_the_same_steps_and_all_state_shrinks(world):
    found, held = {}, {}
    for shard in (False, True):
        pipeline = pipeline_of(network(), world, shard)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        for step in range(4):
            pipeline.train_step([batch(world.rank, step)], step)
            optimizer.step()
        assert isinstance(next(pipeline.parameters()), DTensor) == shard
        found[shard] = pipeline.state_dict()
        state = [one for slots in optimizer.state.values() for one in slots.values()]
        grads = [p.grad for p in pipeline.parameters()]
        held[shard] = sum(bytes_of(one) for one in [*pipeline.parameters(), *grads, *state])
        del optimizer, state, grads
    assert found[True].keys() == found[False].keys()
    for name, value in found[False].items():
        torch.testing.assert_close(found[True][name], value, rtol=0, atol=1e-10)
    assert held[True] <= held[False] / RANKS + 1000  # what is counted in steps is on every rank


def bytes_of(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


@pytest.fixture
def delays():
    torch.sim.set_delay(200)
    yield
    torch.sim.set_delay(int(os.environ.get("SIM_DELAY_US") or 0))


@pytest.mark.skipif(DEVICE.type != "sim", reason="streams are delayed on the simulated device only")
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_optimizer_may_read_gradients_after_they_are_freed(backend, delays, world):
    """They belong to the stream in which FSDP2 reduces, which waits before it allocates again."""
    found = []
    for shard in (False, True):
        named = None if backend == "null" else backend
        pipeline = pipeline_of(network(), world, shard, backend=named)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        for step in range(3):
            pipeline.train_step([batch(world.rank, step)], step)
            with torch.sim.held():
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.05)  # time enough for a stream that writes into what it got back
        found.append(pipeline.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-10)


class ViewBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 6, 8).view(-1, 48)


def test_a_block_may_return_a_view_that_the_next_layer_writes_into(world):
    found = []
    for shard in (False, True):
        torch.manual_seed(3)
        layers = [kind for _ in range(3) for kind in (ViewBlock(), nn.ReLU(inplace=True))]
        pipeline = pipeline_of(nn.Sequential(nn.Flatten(), *layers).double(), world, shard)
        pipeline.train_step([batch(world.rank)], 0)
        found.append([p.grad.full_tensor() if shard else p.grad for p in pipeline.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_no_weight_stays_gathered(world):
    """Nor do whole gradients stay: all tensors that there are, after a step."""
    before = live_bytes()
    model = network()
    whole = sum(p.nbytes for p in model.parameters())
    pipeline = pipeline_of(model, world, parts=2)
    pipeline.train_step([batch(world.rank), batch(world.rank, 1)], 0)
    del model
    after_step = live_bytes() - before
    pipeline.evaluate([batch(world.rank), batch(world.rank, 1)])
    after_evaluation = live_bytes() - before
    assert after_step <= 2 * whole / RANKS + 10_000  # parameters and gradients
    assert after_evaluation <= 2 * whole / RANKS + 10_000
    assert after_step > whole / RANKS


def live_bytes() -> int:
    """Bytes of all tensors that have memory; those of a dry run or of a compiler have none."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor) and not isinstance(one, FakeTensor):
            local = one.to_local() if isinstance(one, DTensor) else one
            with suppress(RuntimeError):  # "invalid python storage", or sparse ones of other tests
                memory = local.untyped_storage()
                storages[memory.data_ptr()] = memory.nbytes()
    storages.pop(0, None)  # on the meta device, and of tensors that wrap others
    return sum(storages.values())


def test_evaluation_takes_batches_that_leave_replicas_without_samples(world):
    model = network().eval()
    plain = [batch(0, step) for step in range(2)]
    with torch.no_grad():
        expected = [model(one.tile.cpu()) for one in plain]
    pipeline = pipeline_of(model, world)
    for one, output in zip(plain, expected, strict=True):
        mine = one if world.rank == 0 else Microbatch(0, 0.0)
        outputs = pipeline.evaluate([mine])
        if world.rank == 0:
            torch.testing.assert_close(outputs[0].cpu(), output)
        else:
            assert not outputs
        pipeline.train_step([batch(world.rank)], 0)  # without a step of the optimizer


def test_replicas_that_use_different_parameters_are_told(world):
    """FSDP2 adds up what has nothing to do with each other, as long as the sizes are the same."""
    pipeline = pipeline_of(Branches().double(), world)
    mine = batch(world.rank)
    mine.tile.abs_()
    if world.rank == 0:
        mine.tile.neg_()
    with pytest.raises(ValueError, match="4 parameters have gradients on some replicas only"):
        pipeline.train_step([mine], 0)


def test_gradient_hooks_of_parameters_are_called_unless_they_are_sharded(world):
    check_equality(Case("dp", "hooked", (17, 14), ((1, 1),), RANKS, 2, 4 * RANKS), world)
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        model = network()
        getattr(model[2].weight, hook)(lambda parameter: None)
        with pytest.raises(ValueError, match=r"'2.weight' has a gradient hook"):
            pipeline_of(model, world)


def test_what_cannot_be_sharded_is_refused(world):
    with pytest.raises(ValueError, match=r"replica \d has no samples in micro-batch 0"):
        pipeline_of(network(), world).train_step([Microbatch(0, 0.0)], 0)
    model = network()
    model[2].bias = nn.Parameter(torch.zeros(48))
    with pytest.raises(
        ValueError, match=r"one dtype in a stage, got torch\.float32, torch\.float6"
    ):
        pipeline_of(model, world)
    with pytest.raises(ValueError, match="last batch of an epoch of 19 has 1 for"):
        trainer(world, "parallel=dp", f"parallel.data={RANKS}", "parallel.shard_state=true")


TINY = [
    *("model.width=6", "data.image_size=[40,36]", "data.num_classes=3", "data.samples=19"),
    *("data.validation_samples=7", "data.batch_size=6", "trainer.precision=float64"),
    *("trainer.max_epochs=1", "trainer.clip_norm=0.5"),
]


def trainer(comm: Communicator, *overrides: str) -> Trainer:
    return Trainer(composed("train", *TINY, device_key(comm), *overrides), comm)
