"""What PyTorch builds on groups runs over mpi4py, with the results of gloo or of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("over_mpi4py")

STEPS = 3
TOLERANCE = 1e-10


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 5)
    ).to(dtype)


def images(step: int, of: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + of)
    return torch.randn(4, 7, dtype=torch.float64, generator=draw)


def train(model: nn.Module, loss: Callable[[int], Tensor], steps: int = STEPS) -> list[Tensor]:
    """The weights after some steps, whole."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    return [whole(parameter) for parameter in model.parameters()]


def whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def one_process(ranks: int, model: nn.Module | None = None) -> list[Tensor]:
    """The weights that training on the batches of all ranks together gives."""
    plain = network() if model is None else model

    def loss(step: int) -> Tensor:
        return plain(torch.cat([images(step, of) for of in range(ranks)])).square().mean()

    return train(plain, loss)


def close(ours: list[Tensor], plain: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(ours) == len(plain)
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)


def own_loss(model: nn.Module) -> Callable[[int], Tensor]:
    return lambda step: model(images(step, dist.get_rank())).square().mean()


# --- DistributedDataParallel


@pytest.mark.parametrize("options", [
    {},
    {"bucket_cap_mb": 0.001},  # several buckets, overlapped with backward
    {"find_unused_parameters": True},
], ids=str)  # fmt: skip
def test_data_parallel_equals_one_process(options):
    model = DistributedDataParallel(network(), **options)
    close(train(model, own_loss(model)), one_process(dist.get_world_size()))


def test_data_parallel_starts_with_the_weights_and_buffers_of_rank_0():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)).double()
    model[1].running_mean.fill_(dist.get_rank())
    model = DistributedDataParallel(model)
    torch.manual_seed(0)
    close([model.module[0].weight.detach()], [nn.Linear(7, 5).double().weight.detach()])
    assert (model.module[1].running_mean == 0).all()
    model(images(0, dist.get_rank()))
    model(images(1, dist.get_rank()))  # which begins with the buffers of rank 0
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, model.module[1].num_batches_tracked.item())
    assert set(everybody) == {2}


def size() -> int:
    return dist.get_world_size()


@pytest.mark.skipif(torch.cuda.is_available(), reason="PowerSGD waits for CUDA, not for tensors")
def test_a_hook_that_talks_in_what_it_chains(over_gloo):
    """PowerSGD: collectives that follow each other, each started when the one before is done.

    With several buckets gloo mixes them up with those of the next bucket; over mpi4py they come in
    the same order on all ranks.
    """

    def trained(group: dist.ProcessGroup | None, cap: float) -> list[Tensor]:
        model = DistributedDataParallel(
            network(torch.float32), process_group=group, bucket_cap_mb=cap
        )
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        def loss(step: int) -> Tensor:
            return model(images(step, dist.get_rank()).float()).square().mean()

        return train(model, loss, 6)

    close(trained(None, 25), trained(over_gloo, 25), tolerance=1e-4)
    weights = torch.cat([weight.flatten() for weight in trained(None, 0.001)])
    everybody = [torch.empty_like(weights) for _ in range(size())]
    dist.all_gather(everybody, weights)
    assert all(torch.equal(other, weights) for other in everybody)


# --- fully_shard


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (size(),), mesh_dim_names=("data",))


def sharded(mesh: DeviceMesh, **options: object) -> nn.Module:
    model = network()
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_sharded_equals_one_process(mesh, reshard):
    model = sharded(mesh, reshard_after_forward=reshard)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    everything = sum(parameter.numel() for parameter in network().parameters())
    assert held < everything / size() + 70 * size()
    close(train(model, own_loss(model)), one_process(size()))


@pytest.mark.world(4)
def test_sharded_in_rows_and_copied_over_columns_equals_one_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    assert mesh["shards"].get_local_rank() == dist.get_rank() % 2
    model = sharded(mesh)
    close(train(model, own_loss(model)), one_process(4))


# --- DTensor


def test_linear_layers_cut_in_columns_and_rows_equal_whole_ones(mesh):
    model = nn.Sequential(nn.Linear(7, 12 * size()), nn.Tanh(), nn.Linear(12 * size(), 9)).double()
    plain = copy.deepcopy(model)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    plain.load_state_dict(model.state_dict())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    assert model[0].weight.to_local().shape == (12, 7)
    ours = train(model, lambda step: model(images(step, 0)).square().mean())
    close(ours, train(plain, lambda step: plain(images(step, 0)).square().mean()))


def test_tensors_of_uneven_parts_are_laid_out_anew(mesh):
    draw = torch.Generator().manual_seed(0)
    full = torch.randn(size() + 1, 2 * size() + 1, dtype=torch.float64, generator=draw)
    rows = distribute_tensor(full, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), full)
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), full)
    product = columns @ distribute_tensor(full.t().contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), full @ full.t())
    torch.testing.assert_close(rows.sum().full_tensor(), full.sum())


# --- functional collectives


def test_functional_collectives(over_mpi4py):
    own = torch.full((2, 3), float(dist.get_rank()))
    ranks = [float(rank) for rank in range(size())]
    total = sum(ranks)
    assert torch.equal(funcol.all_reduce(own, "sum", over_mpi4py) + 0, torch.full((2, 3), total))
    average = funcol.all_reduce(own, "avg", over_mpi4py) + 0
    torch.testing.assert_close(average, torch.full((2, 3), total / size()))
    gathered = funcol.all_gather_tensor(own, 0, over_mpi4py) + 0
    assert gathered[::2, 0].tolist() == ranks
    columns = funcol.all_gather_tensor(own, 1, over_mpi4py) + 0
    assert columns[0, ::3].tolist() == ranks
    part = funcol.reduce_scatter_tensor(torch.ones(2 * size(), 3), "sum", 0, over_mpi4py) + 0
    assert torch.equal(part, torch.full((2, 3), float(size())))
    sent = torch.arange(float(size())) + 10 * dist.get_rank()
    swapped = funcol.all_to_all_single(sent, None, None, over_mpi4py) + 0
    assert swapped.tolist() == [10 * rank + dist.get_rank() for rank in ranks]
    assert (funcol.broadcast(own, size() - 1, over_mpi4py) == size() - 1).all()
    parts = funcol.all_reduce_coalesced([own, own + 1], "max", over_mpi4py)
    assert [float(tensor.max()) for tensor in parts] == [size() - 1, size()]
    parts = funcol.all_gather_into_tensor_coalesced([own, own + 1], over_mpi4py)
    assert [tensor.shape for tensor in parts] == [(2 * size(), 3)] * 2
    parts = funcol.reduce_scatter_tensor_coalesced([gathered, gathered], "sum", [0, 0], over_mpi4py)
    assert torch.equal(parts[1] + 0, own * size())


# --- checkpoints


def test_a_checkpoint_is_written_and_read(mesh, tmp_path_factory):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    path = [str(tmp_path_factory.mktemp("checkpoint"))]
    dist.broadcast_object_list(path)
    model = sharded(mesh)
    train(model, own_loss(model))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path[0])
    assert len(list(Path(path[0]).glob("*.distcp"))) == size()
    other = sharded(mesh)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path[0])
    set_model_state_dict(other, state["model"])
    close([whole(p) for p in other.parameters()], [whole(p) for p in model.parameters()], 0)
