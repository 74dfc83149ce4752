from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spatialdl.streaming.copies import ModelCopies


class Tied(nn.Module):
    """A weight under two names, one that is frozen, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.norm.bias.requires_grad_(False)
        self.register_buffer("nothing", None)
        self.calls, self.rate, self.notes = 0, 0.5, ["own"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.second(self.first(x))) * self.rate


X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_weights_are_there_once_and_buffers_for_each(model):
    copies = ModelCopies(model, 3)
    assert copies.networks[0] is model
    assert len({id(one) for one in copies.networks}) == 3
    own = dict(model.named_parameters(remove_duplicate=False))
    for other in copies.networks[1:]:
        names = dict(other.named_parameters(remove_duplicate=False))
        assert list(names) == list(own)
        for name, parameter in names.items():
            assert memory(parameter) == memory(own[name])
            assert parameter is not own[name]
            assert parameter.requires_grad == own[name].requires_grad
        assert other.first.weight is other.second.weight
        assert memory(other.norm.running_mean) != memory(model.norm.running_mean)
    first, second = (dict(one.named_parameters()) for one in copies.networks[1:])
    assert all(first[name] is second[name] for name in first)


def test_gradients_of_all_come_together_apart_from_the_networks_own(model):
    model(X).square().sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    copies = ModelCopies(model, 2)
    with copies.in_place():
        for network in copies.networks:
            network(X).square().sum().backward()
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [names[one] for one in copies.trained] == list(before)
    for parameter, grad in zip(copies.trained, copies.take_gradients(copies.trained), strict=True):
        torch.testing.assert_close(grad, 2 * before[names[parameter]])
        torch.testing.assert_close(parameter.grad, before[names[parameter]], rtol=0, atol=0)
    assert copies.take_gradients(copies.trained) == [None] * len(before)


def test_the_network_has_its_own_parameters_again_behind_it(model):
    own = dict(model.named_parameters(remove_duplicate=False))
    copies = ModelCopies(model, 2)
    with copies.in_place():
        inside = dict(model.named_parameters(remove_duplicate=False))
        assert all(inside[name] is not own[name] for name in own)
        assert model.first.weight is model.second.weight is copies.networks[1].first.weight
    with pytest.raises(RuntimeError, match="in between"), copies.in_place():
        raise RuntimeError("in between")
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is own[name] for name in own)


def test_copies_follow_weights_buffers_modes_and_settings(model):
    copies = ModelCopies(model, 2)
    other = copies.networks[1]
    with torch.no_grad():
        model.first.weight.data = model.first.weight * 3  # other memory, as an average has
        model.norm.running_mean += 7
    model.first.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(True)
    model.eval()
    model.calls, model.rate = 5, 2.0
    copies.follow()
    assert torch.equal(other(X), model(X))
    assert (other.calls, other.rate, other.training, other.norm.training) == (6, 2.0, False, False)
    assert other.norm.running_mean.tolist() == [7, 7, 7]
    assert memory(other.norm.running_mean) != memory(model.norm.running_mean)
    assert not other.second.weight.requires_grad
    assert other.norm.bias.requires_grad
    assert [one is model.first.weight for one in copies.trained] == [False] * 3
    assert other.nothing is None


def test_an_optimizer_step_is_seen_by_copies_at_once(model):
    copies = ModelCopies(model, 2)
    with torch.no_grad():
        model.first.weight += 1
    assert torch.equal(copies.networks[1].first.weight, model.first.weight)
