from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spatialdl.spatial.deferred_gradients import DeferredGradients, deferred


class Scale(torch.autograd.Function):
    """``x * weight``, whose weight can wait."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        waiting = deferred(ctx.parameter)
        if waiting is None:
            return grad * weight, (grad * x).sum()
        waiting.leave(ctx.parameter, (grad, x), (grad * x).sum)
        return grad * weight, None


def scaled(weight: Tensor, times: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    y = x
    for _ in range(times):
        y = Scale.apply(y, weight)
    return x, y


def test_the_gradient_of_the_input_comes_at_once_and_that_of_the_weight_when_asked_for():
    weight = nn.Parameter(torch.tensor(5.0))
    x, y = scaled(weight)
    waiting = DeferredGradients()
    with waiting.gather():
        y.sum().backward()
    assert (x.grad.tolist(), weight.grad) == ([5.0, 5.0], None)
    waiting.add_all()
    assert weight.grad.item() == 5.0
    waiting.add_all()  # all of it is done
    assert weight.grad.item() == 5.0


def test_a_weight_that_is_used_twice_gets_both_added_to_what_it_has():
    weight = nn.Parameter(torch.tensor(5.0))
    weight.grad = torch.tensor(1.0)
    waiting = DeferredGradients()
    with waiting.gather():
        scaled(weight, times=2)[1].sum().backward()
    waiting.add_all()
    assert weight.grad.item() == 1.0 + 2 * 5.0 * 5.0


def test_each_backward_leaves_its_gradients_where_it_was_told():
    weights = [nn.Parameter(torch.tensor(5.0)) for _ in range(2)]
    both = [DeferredGradients(), DeferredGradients()]
    for weight, waiting in zip(weights, both, strict=True):
        with waiting.gather():
            scaled(weight)[1].sum().backward()
    both[1].add_all()
    assert [weight.grad for weight in weights] == [None, torch.tensor(5.0)]
    scaled(weights[0])[1].sum().backward()  # outside, nothing waits
    assert weights[0].grad.item() == 5.0


@pytest.mark.parametrize(
    "listen",
    [
        lambda weight, hook: weight.register_hook(hook),
        lambda weight, hook: weight.register_post_accumulate_grad_hook(hook),
        lambda weight, hook: torch.autograd.graph.register_multi_grad_hook([weight], hook),
    ],
)
def test_a_weight_to_whose_gradient_somebody_listens_does_not_wait(listen):
    weight = nn.Parameter(torch.tensor(5.0))
    _, y = scaled(weight, times=2)
    heard = []
    listen(weight, lambda grad: heard.append(1))
    with DeferredGradients().gather():
        y.sum().backward()
    assert (weight.grad.item(), heard) == (50.0, [1])


def test_what_is_no_weight_but_made_of_one_does_not_wait():
    weight = nn.Parameter(torch.tensor(5.0))
    with DeferredGradients().gather():
        scaled(weight * 1.0)[1].sum().backward()
    assert weight.grad.item() == 5.0


def test_gradients_that_are_differentiated_again_do_not_wait():
    weight = nn.Parameter(torch.tensor(5.0))
    x, y = scaled(weight)
    waiting = DeferredGradients()
    with waiting.gather():
        grad, grad_weight = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
        assert grad_weight.item() == 2 * 5.0 * (2.0**2 + 3.0**2)
        grad.sum().backward()
    waiting.add_all()
    assert weight.grad.item() == 4 * 5.0 * (2.0 + 3.0)  # grad = 2 w^2 x


def test_who_writes_into_what_a_gradient_waits_for_is_told():
    weight = nn.Parameter(torch.tensor(5.0))
    x, y = scaled(weight)
    waiting = DeferredGradients()
    with waiting.gather():
        y.sum().backward()
    with torch.no_grad():
        x.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"tensor of \(2,\) was modified by an inplace"):
        waiting.add_all()
    assert weight.grad is None
