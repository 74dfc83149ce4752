from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import spatialdl
from spatialdl.channels.weights import own_state, whole_state
from tests.mpi.channels.divided import WORLD, Block, divided

RANKS = WORLD.size


def test_parameters_stay_the_objects_that_optimizers_know():
    network = Block()
    before = list(network.parameters())
    sizes = [one.numel() for one in before]
    divided(network, torch.randn(2, 3, 6, 6))
    assert all(a is b for a, b in zip(before, network.parameters(), strict=True))
    assert before[0].numel() < sizes[0]


def test_whole_weights_come_and_go():
    torch.manual_seed(1)
    network = Block()
    state = copy.deepcopy(network.state_dict())
    divided(network, torch.randn(2, 3, 6, 6))
    whole = whole_state(network)
    assert list(whole) == list(state)
    assert all(torch.equal(whole[name], one) for name, one in state.items())
    other = {name: one + 1 for name, one in state.items()}
    network.load_state_dict(own_state(network, other))
    assert torch.equal(whole_state(network)["wide.weight"], other["wide.weight"])
    network.load_state_dict(own_state(network, network.state_dict()))  # parts, too


def test_a_copy_has_weights_of_its_own():
    network = divided(Block(), torch.randn(2, 3, 6, 6))
    copied = copy.deepcopy(network)
    with torch.no_grad():
        copied.wide.weight.part.fill_(0)
    assert float(whole_state(copied)["wide.weight"].abs().sum()) == 0
    assert float(whole_state(network)["wide.weight"].abs().sum()) > 0


def test_forwards_see_the_whole_shape():
    network = divided(Block(), torch.randn(2, 3, 6, 6))
    assert network.wide.weight.shape == (12, 3, 3, 3)
    assert dict(network.named_parameters())["wide.weight"].shape != (12, 3, 3, 3)


def test_saving_a_part_as_if_it_were_the_weight_is_refused():
    network = divided(Block(), torch.randn(2, 3, 6, 6))
    with pytest.raises(RuntimeError, match="channels are divided over ranks: save full_tensor"):
        copy.copy(network.wide.weight).__reduce_ex__(2)


class Tracked(nn.Module):
    """Keeps statistics in buffers by operations of its own, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("largest", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
            self.largest = torch.maximum(self.largest, x.amax((0, 2, 3)))
        return (x - self.mean[None, :, None, None]).square().mean((1, 2, 3))


def test_buffers_that_a_forward_writes_are_those_of_one_process():
    torch.manual_seed(3)
    plain = Tracked().double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain), mesh)
    for step in range(3):
        x = torch.randn(2, 3, 5, 4, dtype=torch.float64) + step
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)
    found = spatialdl.full_state_dict(model, mesh)
    for name, one in plain.state_dict().items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-12)


class Shared(nn.Module):
    """One BatchNorm on divided channels, on others, and on whole ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.third, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.first(x), self.second(x)], 1)
        if self.how == "only in training" and not self.training:
            return self.third(x)
        if self.how == "only in training":
            return self.norm(self.third(x))
        is_divided = self.how == "two partitions"
        other = self.third(x) if is_divided else x.repeat(1, 3, 1, 1)[:, :8]
        return self.norm(joined) + self.norm(other)


@pytest.mark.parametrize("how", ["only in training", "two partitions", "whole, too"])
def test_statistics_of_a_norm_are_kept_whatever_it_meets(how: str):
    """They were updated in copies, so that evaluation was wrong."""
    torch.manual_seed(3)
    plain = Shared(how).double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain), mesh)
    for _ in range(3):
        x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)
    found = spatialdl.full_state_dict(model, mesh)
    for name, one in plain.state_dict().items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_those_that_forwards_use(assign: bool):
    """With assign=True modules had a part, and took it for the whole weight."""
    torch.manual_seed(3)
    plain, other = Block().double(), Block().double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain), mesh)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    with torch.inference_mode():
        model.eval()(x)  # whose tensors training could not use
    model.load_state_dict(other.state_dict(), assign=assign)
    torch.testing.assert_close(model.train()(x), other(x), rtol=0, atol=1e-12)
    model(x).sum().backward()


def test_layers_give_half_precision_under_autocast():
    model = spatialdl.SpatialParallel(Block(), spatialdl.init_mesh((1, 1), tensor=RANKS))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(2, 3, 6, 6)).dtype == torch.bfloat16
