"""Layers with divided weights, and the moves between ranks that they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spatialdl.comm.reduce import sum_over_ranks
from spatialdl.layout.partition import Partition, joined
from spatialdl.spatial.channels.moves import (
    all_gather,
    local_part,
    reduce_scatter,
)
from spatialdl.spatial.channels.tensor import ChannelTensor, all_channels
from spatialdl.spatial.channels.weights import Use, divide, full_state
from tests.mpi.device import DEVICE
from tests.mpi.spatial.channels.divided import WORLD, channels, drawn

RANKS = WORLD.size


def assert_layer(layer: nn.Module, x: Tensor, ats: dict[str, int], divided: bool) -> Any:
    """A layer whose weights are divided along some dims gives what the whole one gives."""
    layer = layer.double()
    x_reference = x.clone().requires_grad_()
    reference = layer(x_reference)
    weights = drawn(*reference.shape, seed=4)
    (reference * weights).sum().backward()
    reference = reference.detach()  # or its graph would remember the shapes of whole weights
    wanted = {name: one.grad.clone() for name, one in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    uses = {
        name: Use(at, Partition.even(dict(layer.named_parameters())[name].shape[at], RANKS), True)
        for name, at in ats.items()
    }
    divide(layer.to(DEVICE), uses, WORLD)
    own: Any = channels(x.requires_grad_()) if divided else x.to(DEVICE).detach().requires_grad_()
    given = layer(own.like(own.part * 1) if divided else own)
    whole = all_channels(given)
    torch.testing.assert_close(whole.detach().cpu(), reference, rtol=0, atol=1e-12)
    (whole * weights.to(DEVICE)).sum().backward()
    grad_x = own.like(own.part.grad).full_tensor() if divided else own.grad
    torch.testing.assert_close(grad_x.cpu(), x_reference.grad, rtol=0, atol=1e-12)
    with torch.no_grad():
        for one in layer.parameters():
            one.copy_(one.grad)
    found = full_state(layer)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name].cpu(), grad, rtol=0, atol=1e-12)
    return given


LAYERS = {
    "conv": (lambda: nn.Conv2d(7, 9, 3, 2, 1), (2, 7, 8, 5)),
    "conv of signals, no bias": (lambda: nn.Conv1d(5, 8, 5, bias=False, dilation=2), (2, 5, 13)),
    "transposed": (lambda: nn.ConvTranspose2d(7, 5, 3, 2, 1, 1), (2, 7, 4, 5)),
    "linear": (lambda: nn.Linear(7, 11), (3, 7)),
}


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("along", ["outputs", "inputs", "neither"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_divided_either_way(name: str, along: str, divided: bool):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()
    into = {"outputs": 0, "inputs": 1}
    at = 1 - into[along] if name == "transposed" and along in into else into.get(along)
    if layer.weight.shape[at or 0] < RANKS:
        at = None
    ats = {} if at is None else {"weight": at}
    if at is not None and layer.bias is not None and along == "outputs":
        ats["bias"] = 0
    if not ats and not divided:
        return
    assert_layer(layer, drawn(*shape), ats, divided)


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_are_divided(kind: Any, groups: int):
    torch.manual_seed(0)
    layer = kind(8, 16, 3, 2, 1, groups=groups)
    assert_layer(layer, drawn(2, 8, 6, 5), {}, True)
    unit = layer.weight.shape[0] // groups
    if groups >= RANKS:
        use = Use(0, Partition.even(layer.weight.shape[0], RANKS, unit), True)
        x, whole = drawn(2, 8, 6, 5), layer(drawn(2, 8, 6, 5).to(DEVICE)).detach()
        divide(layer, {"weight": use}, WORLD)
        given = layer(channels(x))
        assert isinstance(given, ChannelTensor)
        torch.testing.assert_close(all_channels(given).detach(), whole, rtol=0, atol=1e-12)


NORMS = {
    "batch": (lambda: nn.BatchNorm2d(7), (2, 7, 4, 5)),
    "instance": (lambda: nn.InstanceNorm2d(7, affine=True), (2, 7, 4, 5)),
    "group": (lambda: nn.GroupNorm(4, 8), (2, 8, 4, 5)),
    "prelu": (lambda: nn.PReLU(7), (2, 7, 4, 5)),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("whole", [True, False])
def test_layers_with_a_weight_for_each_channel(name: str, whole: bool):
    torch.manual_seed(0)
    make, shape = NORMS[name]
    layer = make()
    parameters = dict(layer.named_parameters())
    ats = {} if whole else dict.fromkeys(parameters, 0)
    for one in layer.parameters():
        nn.init.normal_(one)
    assert_layer(layer, drawn(*shape), ats, True)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_takes_statistics_of_all_ranks(affine: bool):
    class Last(nn.Module):
        """Over channels, which are the last dim there."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(7, elementwise_affine=affine)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(1, 2) + 100)

    layer = Last()
    for one in layer.parameters():
        nn.init.normal_(one)
    given = assert_layer(layer, drawn(2, 7, 5), dict.fromkeys(["norm.weight"] * affine, 0), True)
    assert isinstance(given, ChannelTensor)


# --- half precision

HALVES = [torch.float16, torch.bfloat16]


def halves(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[nn.Linear, int]:
    """A layer of ones, and a number of whose digits nothing is left beside ones."""
    layer = nn.Linear(inputs, outputs).to(dtype)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    return layer, 256 if dtype == torch.bfloat16 else 2048


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("outputs", [1, RANKS, 2 * RANKS + 1])
def test_sums_of_halves_are_rounded_once(outputs: int, dtype: torch.dtype):
    """After a rank's product beside a large one nothing was left of it, nor of the bias."""
    layer, large = halves(RANKS, outputs, dtype)
    x = torch.ones(3, RANKS, dtype=dtype)
    x[:, 0] = large
    divide(layer.to(DEVICE), {"weight": Use(1, Partition.even(RANKS, RANKS), True)}, WORLD)
    given = layer(channels(x))
    assert given.dtype == dtype
    wanted = torch.full((3, outputs), large + RANKS, dtype=torch.float32).to(dtype)
    assert torch.equal(all_channels(given).cpu(), wanted)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_halves_are_rounded_once(dtype: torch.dtype):
    layer, large = halves(RANKS, RANKS, dtype)
    with torch.no_grad():
        layer.weight[0] = large  # of the first output
    x = channels(torch.ones(3, RANKS, dtype=dtype).requires_grad_())
    divide(layer.to(DEVICE), {"weight": Use(0, Partition.even(RANKS, RANKS), True)}, WORLD)
    all_channels(layer(x)).sum().backward()
    wanted = torch.full((3, 1), large + RANKS - 1, dtype=torch.float32).to(dtype)
    assert torch.equal(x.part.grad.cpu(), wanted)


# --- moves


PARTITIONS = {
    "even": Partition.even(7, RANKS),
    "heads": Partition.even(3 * 4 * RANKS, RANKS, unit=2, pieces=3),
    "joined": joined([Partition.even(5, RANKS), Partition.even(3, RANKS)]),
    "fewer than ranks": Partition.even(1, RANKS),
}


def on_device(*shape: int, alike: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0 if alike else 1 + WORLD.rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE)


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize(("at", "channels_last"), [(0, False), (1, True), (2, False), (2, True)])
def test_what_is_divided_is_gathered_again(name: str, at: int, channels_last: bool):
    partition = PARTITIONS[name]
    shape = [2, 3, 5, 4]
    shape[at] = partition.size
    whole = on_device(*shape)
    if channels_last:
        whole = whole.to(memory_format=torch.channels_last)
    part = local_part(whole, at, partition, WORLD.rank)
    assert torch.equal(all_gather(part, at, partition, WORLD), whole)
    total = reduce_scatter(whole, at, partition, WORLD)
    torch.testing.assert_close(total, part * RANKS, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PARTITIONS)
def test_moves_are_the_adjoints_of_each_other(name: str):
    """<gather x, y> summed over ranks is <x, reduce_scatter y> summed over ranks."""
    partition = PARTITIONS[name]
    part = on_device(3, partition.size_of(WORLD.rank), 2, alike=False)
    other = on_device(3, partition.size, 2, alike=False)
    one = (all_gather(part, 1, partition, WORLD) * other).sum()
    two = (part * reduce_scatter(other, 1, partition, WORLD)).sum()
    sums = sum_over_ranks(WORLD, torch.stack([one, two]))
    torch.testing.assert_close(sums[0], sums[1], rtol=0, atol=1e-12)
