"""Gradients that are averaged while backwards run are, to the last bit, those averaged after them.

Over gloo, made to overlap as NCCL does, and without the check of communications.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import spatialdl
from spatialdl.comm import check
from spatialdl.comm.distributed import TorchCommunicator
from spatialdl.comm.gradients import Reducer
from spatialdl.comm.launch import launched
from spatialdl.comm.world import torch_world
from spatialdl.pipeline import runtime
from spatialdl.spatial import parallel as spatial_parallel
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import TOLERANCE, parallel, reference

ONE, TWO = (1, 1), (2, 1)
CASES = [
    Case("dp", "resnet18", (64, 64), (ONE,), data=2, microbatches=2, clip=0.05),
    Case("dp", "odd", (45, 50), (ONE,), data=3, microbatches=2, batch=5),  # one has no last sample
    Case("sp+pp", "odd", (50, 50), (TWO, ONE), microbatches=2, cut=("2",)),
    Case("dp+pp", "odd", (50, 50), (ONE, ONE), data=2, microbatches=2, batch=8, cut=("2",)),
    Case("gems", "odd", (45, 50), (ONE, ONE), microbatches=4, batch=9, schedule="basic"),
    Case("dp+sp", "odd", (50, 50), (TWO,), data=2, recompute=True),
]


@cache
def over_torch() -> TorchCommunicator:
    return torch_world(launched())


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (runtime, spatial_parallel):
        monkeypatch.setattr(module, "lane_of", lambda comm: comm.duplicate())
    check.enable(False)
    yield
    check.enable(True)


def count_early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By steps, how many sums were started before backwards were done."""
    started, early = [], []
    start, reduce = TorchCommunicator.start_all_reduce, Reducer.reduce

    def start_all_reduce(comm: TorchCommunicator, values: Tensor) -> object:
        started.append(comm)
        return start(comm, values)

    def counted(reducer: Reducer) -> None:
        lanes = [one.lane for one in reducer._modules]
        early.append(sum(comm in lanes for comm in started))
        reduce(reducer)
        started.clear()

    monkeypatch.setattr(TorchCommunicator, "start_all_reduce", start_all_reduce)
    monkeypatch.setattr(Reducer, "reduce", counted)
    return early


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process_whether_overlapped_or_not(
    case: Case, overlapping: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = over_torch()
    if case.placement.world_size != world.size:
        pytest.skip(f"needs {case.placement.describe()}")
    early = count_early(monkeypatch)
    overlapped = parallel(case, world)
    replicas_without_samples = case.batch // case.microbatches < case.data
    assert early[0] == 0
    assert all(early[1:3]) or case.placement.stages > 1 or replicas_without_samples
    assert any(world.allgather(sum(early)))
    monkeypatch.setattr(runtime, "lane_of", lambda comm: None)
    early.clear()
    after = parallel(case, world)
    assert not any(early)
    plain = reference(case)
    assert overlapped.losses == after.losses
    for name, value in overlapped.state.items():
        assert torch.equal(value, after.state[name]), name
        assert (value - plain.state[name]).abs().max() <= TOLERANCE, name


class Forked(nn.Module):
    """Layers of which a rank leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4)).double()

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == left_out else layer(x)
        return x


def test_a_rank_may_lack_gradients(overlapping: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have sent theirs by then; the last layer has none on any rank."""
    from spatialdl.comm import gradients

    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    world = over_torch()
    mesh = spatialdl.init_mesh((1, 1), data=world.size, comm=world, check=False)
    torch.manual_seed(0)
    model, plain = spatialdl.SpatialParallel(Forked(), mesh), Forked()
    plain.load_state_dict(model.state_dict())
    early = count_early(monkeypatch)
    for step in range(3):
        model.zero_grad(), plain.zero_grad()
        x = torch.randn(world.size, 5, 2, dtype=torch.float64)
        model(x[world.rank], (world.rank + step) % 3).square().sum().backward()
        losses = [plain(x[n], (n + step) % 3).square().sum() for n in range(world.size)]
        torch.stack(losses).mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert early[0] == 0
    assert sum(early) or world.size == 1
