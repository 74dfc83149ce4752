from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spatialdl.training.optimization.ema import WeightAverage


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def average_of(model: nn.Module, decay: float = 0.9) -> WeightAverage:
    return WeightAverage(dict(model.named_parameters()), decay)


def train(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.cos(parameter + step))


def test_the_average_is_that_of_pytorch():
    model = network()
    ours = average_of(model)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # the first time it copies
    for step in range(5):
        train(model, step)
        ours.update()
        theirs.update_parameters(model)
    for name, value in theirs.module.named_parameters():
        torch.testing.assert_close(ours.state_dict()[name], value.detach(), rtol=0, atol=1e-14)


def test_the_network_s_own_weights_come_back_bit_for_bit():
    model = network()
    average = average_of(model)
    train(model, 0)
    average.update()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    averages = {name: value.clone() for name, value in average.state_dict().items()}
    with average.swapped():
        for name, value in model.named_parameters():
            assert torch.equal(value, averages[name])
            assert not torch.equal(value, before[name])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(v, averages[name]) for name, v in average.state_dict().items())


def test_they_come_back_when_validation_fails():
    model = network()
    average = average_of(model)
    train(model, 0)
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(KeyboardInterrupt), average.swapped():
        raise KeyboardInterrupt
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("decay", [-0.1, 1, 1.5, "much"])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"trainer\.ema=.* must be at least 0 and below 1"):
        average_of(network(), decay)


def test_a_rank_may_have_no_parameters():
    average = WeightAverage({}, 0.9)
    average.update()
    with average.swapped():
        assert average.state_dict() == {}
