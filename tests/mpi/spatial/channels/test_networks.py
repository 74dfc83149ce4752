"""Networks in SpatialParallel on a tensor axis equal one process, over several optimizer steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl.comm.communicator import Communicator
from spatialdl.models.vit import VisionTransformer
from spatialdl.spatial.channels import tensor
from spatialdl.spatial.channels.weights import weights_of
from spatialdl.spatial.random import keyed
from tests.mpi.device import DEVICE
from tests.mpi.equality import slow_cases
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality
from tests.mpi.spatial.channels.divided import WORLD, drawn
from tests.mpi.spatial.channels.networks import NETWORKS

DEEP = ("amoebanet_d",)
AGAIN = ("tokens", "mobile", "resnet18", "swin")
"""Deep networks, and most of those that run again in backward, are left to the longer proof."""

STEPS = [
    *((name, False) for name in NETWORKS if name not in DEEP),
    *((name, True) for name in AGAIN[:2]),
    *(
        pytest.param(*case.values[0], marks=case.marks)
        for case in slow_cases([(n, False) for n in DEEP] + [(n, True) for n in AGAIN[2:]])
    ),
]

MIXED = ("amoebanet_d", "mobile")
"""Tensors meet in them that are divided otherwise, or too small for all ranks."""

# tensor, grid, data
LAYOUTS = {
    2: [(2, (1, 1), 1)],
    3: [(3, (1, 1), 1)],
    4: [(4, (1, 1), 1), (2, (2, 1), 1), (2, (1, 1), 2)],
}


def loss_of(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(2).mean(2) if y.dim() > 2 else y, labels)


def run_steps(model: nn.Module, x: Tensor, count: int) -> list[float]:
    """Losses of steps of training, and one of evaluation."""
    losses, labels = [], torch.tensor([1, 3], device=x.device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9)
    for step in range(count):
        with keyed(0, step):
            loss = loss_of(model(x), labels)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*losses, loss_of(model.eval()(x), labels).item()]


def gathers_of(model: nn.Module, x: Tensor) -> list[str]:
    """What asks for all channels in a forward, beside the layers with weights."""
    gathers: list[str] = []

    def listed(name: str) -> Callable[..., Any]:
        real = getattr(tensor, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if name == "on_all_channels" or args[4]:
                gathers.append(f"{name} {args[0] if callable(args[0]) else args[0].shape}")
            return real(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), keyed(0, 0):
        for name in ("on_all_channels", "gather"):
            patch.setattr(tensor, name, listed(name))
        model(x)
    return gathers


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize(("name", "recompute"), STEPS)
def test_steps_are_those_of_one_process(name: str, recompute: bool):
    """Loss, weights and buffers; each rank has its share of the weights and of activations.

    On all ranks, and of every other network with half of them on tiles or replicas.
    """
    make, shape = NETWORKS[name]
    torch.manual_seed(7)
    start = make().double()
    plain, images = copy.deepcopy(start), torch.randn(2, *shape, dtype=torch.float64)
    expected = run_steps(plain, images, 2)
    first, *others = LAYOUTS[WORLD.size]
    at = list(NETWORKS).index(name) + recompute
    for ranks, tiles, data in [first, *others[at // 2 % 2 :][: at % 2]]:
        network = copy.deepcopy(start)
        if recompute:
            spatialdl.recompute_blocks(network)
        mesh = spatialdl.init_mesh((*tiles, *(1,) * (len(shape) - 3)), data, tensor=ranks)
        model = spatialdl.SpatialParallel(network.to(DEVICE), mesh)
        x = spatialdl.shard(images.to(DEVICE), mesh)
        assert run_steps(model, x, 2) == pytest.approx(expected, abs=1e-9)
        found = spatialdl.full_state_dict(model, mesh)
        for key, one in plain.state_dict().items():
            torch.testing.assert_close(found[key].cpu(), one, rtol=1e-9, atol=1e-10)
        held = sum(one.numel() for one in model.parameters())
        whole = sum(one.numel() for one in plain.parameters())
        assert held < whole / ranks * 1.15 + 200
        if ranks == WORLD.size and name not in MIXED and not recompute:
            assert gathers_of(model.module.train(), x) == []


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_are_clipped_by_the_norm_of_the_whole_network(norm_type: float):
    """The norm of a rank's part is smaller, and another one on each rank."""
    torch.manual_seed(7)
    plain = VisionTransformer(5, patch=8, width=24, depth=1, heads=4).double()
    mesh = spatialdl.init_mesh((1, 1), tensor=WORLD.size)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain).to(DEVICE), mesh)
    x, labels = torch.randn(1, 3, 16, 24, dtype=torch.float64), torch.tensor([2])
    loss_of(model(x.to(DEVICE)), labels.to(DEVICE)).backward()
    loss_of(plain(x), labels).backward()
    found = spatialdl.clip_grad_norm_(model, mesh, 0.1, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert model.module.head.bias.part.grad.norm() < plain.head.bias.grad.norm() + 1e-12
    again = spatialdl.clip_grad_norm_(model, mesh, 1e9, norm_type)
    assert again.item() == pytest.approx(0.1, rel=1e-5)


class Mixed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.weight = nn.Parameter(drawn(8, 6))
        self.head = nn.Linear(6, 2)
        self.equation = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.equation == "bhwc,cd->bhwd":
            x = torch.einsum(self.equation, x.permute(0, 2, 3, 1), self.weight).permute(0, 3, 1, 2)
        else:
            x = torch.einsum(self.equation, x, self.weight)
        return self.head(x.square().mean((2, 3)))


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("equation", ["bchw,cd->bdhw", "bhwc,cd->bhwd"])
def test_einsum_of_split_images_with_divided_channels(equation: str):
    """PyTorch's function calls another of the same name, which no table of split images knows."""
    grid = (WORLD.size // 2, 1)
    reference, x = Mixed(equation).double(), drawn(1, 3, 8, 9)
    network = Mixed(equation).double()
    network.load_state_dict(reference.state_dict())
    mesh = spatialdl.init_mesh(grid=grid, tensor=2)
    parallel = spatialdl.SpatialParallel(network, mesh)
    reference.load_state_dict(WORLD.bcast(reference.state_dict()))
    given, expected = parallel(spatialdl.shard(x, mesh)), reference(x)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)
    assert network.weight.shape == (8, 6)
    assert dict(network.named_parameters())["weight"].numel() == 24
    for one in (given, expected):
        one.square().sum().backward()
    weight = weights_of(network)["weight"]
    whole = weight.full(weight.part.grad)
    torch.testing.assert_close(whole, reference.weight.grad, rtol=0, atol=1e-12)


# --- networks with checkpoints of their own

ONE = ((1, 1),)
SIZE = (21, 19)

CASES = [
    Case("none", "checkpointed", SIZE, ONE, 1, 2, 5, tensor=(2,)),
    Case("none", "checkpointed", SIZE, ONE, 1, 1, 5, recompute="stage", tensor=(2,)),
    Case("none", "checkpointed", SIZE, ONE, 1, 2, 5, recompute="stage", tensor=(2,)),
    Case("sp", "checkpointed", SIZE, ((2, 1),), 1, 2, 5, recompute="stage", tensor=(2,)),
    Case("pp", "checkpointed", SIZE, ONE * 2, 1, 2, 6, recompute="stage", tensor=(2, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checkpoints_of_the_network_equal_one_process(case: Case, world: Communicator) -> None:
    check_equality(case, world)
