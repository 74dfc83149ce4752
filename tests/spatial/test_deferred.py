"""Gradients of weights that wait, in one process; on split images see tests/mpi."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from spatialdl.spatial.deferred_gradients import DeferredGradients
from spatialdl.spatial.deferred_layers import DeferWeightGradients


def test_each_backward_leaves_its_gradients_where_it_was_told():
    layers, x = [nn.Linear(2, 1, bias=False) for _ in range(2)], torch.tensor([2.0, 3.0])
    both = [DeferredGradients(), DeferredGradients()]
    for layer, waiting in zip(layers, both, strict=True):
        with waiting.gather(), DeferWeightGradients():
            layer(x).sum().backward()
    for _ in range(2):  # then all of it is done
        both[1].add_all()
        assert layers[1].weight.grad.tolist() == [x.tolist()]
    assert layers[0].weight.grad is None
    layers[0](x).sum().backward()  # outside, nothing waits
    assert layers[0].weight.grad.tolist() == [x.tolist()]
    with torch.no_grad():
        x.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"tensor of \(2,\) was modified by an inplace"):
        both[0].add_all()


def both(model: nn.Module, *inputs: Tensor, run: Callable[..., Tensor] | None = None) -> list[str]:
    """Compare all gradients with PyTorch's; the names of the parameters that waited for theirs."""
    run = run or (lambda network, *given: network(*given))
    plain, ours = model.double(), copy.deepcopy(model).double()
    expected = [x.double().requires_grad_() for x in inputs]
    given = [x.double().requires_grad_() for x in inputs]
    waited: list[str] = []
    for again in range(2):  # the second time there are gradients to add to
        y = run(plain, *expected)
        upstream = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        y.backward(upstream)
        waiting = DeferredGradients()
        with DeferWeightGradients():
            z = run(ours, *given)
        torch.testing.assert_close(z, y)
        before = {name: p.grad for name, p in ours.named_parameters()}
        with waiting.gather(), DeferWeightGradients():
            z.backward(upstream)
        if again == 0:
            waited = [n for n, p in ours.named_parameters() if p.requires_grad and p.grad is None]
            assert all(value is None for value in before.values())
        waiting.add_all()
        pairs = zip(plain.named_parameters(), ours.named_parameters(), strict=True)
        for (name, theirs), (_, mine) in pairs:
            assert (theirs.grad is None) == (mine.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
                assert mine.grad.stride() == theirs.grad.stride(), name
        for mine, theirs in zip(given, expected, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    return waited


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(7, 5), (3, 7)),
        (nn.Linear(7, 5, bias=False), (2, 3, 4, 7)),
        (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=2), (2, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 8)),
        (nn.Conv3d(2, 3, 3, padding=1), (2, 2, 5, 4, 3)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 9)),
        (
            nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
            (2, 4, 5, 6),
        ),
        (nn.ConvTranspose3d(2, 3, 2, stride=2, dilation=2, bias=False), (1, 2, 3, 4, 2)),
        (nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (2, 4, 9, 8)),
    ],
    ids=str,
)
def test_layers_have_the_gradients_of_pytorchs(layer, shape):
    assert both(layer, torch.randn(shape)) == ["weight"]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3), (4, 9, 8)),  # one image without a dim for it
        (weight_norm(nn.Linear(7, 5)), (3, 7)),
        (nn.Bilinear(4, 4, 3), None),
        (nn.LayerNorm(7), (3, 7)),
    ],
    ids=str,
)
def test_what_is_not_simple_gets_all_its_gradients_at_once(layer, shape):
    inputs = [torch.randn(shape)] if shape else [torch.randn(3, 4), torch.randn(3, 4)]
    assert both(layer, *inputs) == []


class Residual(nn.Module):
    """The first convolution comes twice, and the gradient of a sum goes two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def block(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)), inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.block(x))
        return x.mean((2, 3)) @ self.head.weight + self.head(x.mean((2, 3)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        keys = x if keys is None else keys
        y: Tensor = self.attend(x, keys, keys, need_weights=False)[0]
        return y


def test_layers_inside_attention():
    """Between two sequences the projection in is cut, and parts of a weight do not wait."""
    own, other = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    weights = ["attend.in_proj_weight", "attend.out_proj.weight"]
    assert both(SelfAttention(), own) == weights
    assert both(SelfAttention(), own, other) == weights[1:]


def test_weights_that_come_twice_and_elsewhere():
    """What `@` gives the head's weight does not wait, so that there is something at once."""
    assert both(Residual(), torch.randn(2, 4, 7, 6)) == ["conv.weight"]


def test_frozen_weights_and_images_that_need_no_gradient():
    model = Residual()
    model.conv.weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    assert both(model, torch.randn(2, 4, 7, 6)) == []
    conv, x, waiting = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 5, 6), DeferredGradients()
    with waiting.gather(), DeferWeightGradients():
        conv(x).square().sum().backward()
    assert conv.weight.grad is None
    waiting.add_all()
    expected = torch.autograd.grad(conv(x).square().sum(), conv.weight)[0]
    torch.testing.assert_close(conv.weight.grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_the_network_runs_again_by_itself(reentrant):
    def run(model: Residual, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(model.block, x, use_reentrant=reentrant)
        return model.head(x.mean((2, 3)))

    model = Residual()
    model.norm.track_running_stats = False
    assert both(model, torch.randn(2, 4, 7, 6), run=run) == ["conv.weight", "head.weight"]


def test_a_network_that_differentiates_itself():
    """As with a gradient penalty, whose weights have a part of their gradients at once."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return y + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0].mean()

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2))
    assert both(model, torch.randn(2, 3, 5, 6), run=run) == []


@pytest.mark.parametrize(
    "listen",
    [
        lambda weight, hook: weight.register_hook(hook),
        lambda weight, hook: weight.register_post_accumulate_grad_hook(hook),
        lambda weight, hook: torch.autograd.graph.register_multi_grad_hook([weight], hook),
    ],
)
def test_a_weight_to_whose_gradient_somebody_listens_does_not_wait(listen):
    """Hooks hear the gradient of both uses at once."""
    model, plain, heard = Residual(), Residual(), []
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, 7, 6)
    listen(model.conv.weight, lambda _: heard.append(1))
    with DeferredGradients().gather(), DeferWeightGradients():
        model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model.conv.weight.grad, plain.conv.weight.grad)
    assert heard == [1]


def test_autocast_and_evaluation_are_as_ever():
    model = nn.Linear(7, 5)
    for apart in (nullcontext(), DeferWeightGradients()):
        with torch.autocast("cpu", torch.bfloat16), apart:
            assert model(torch.randn(3, 7)).dtype == torch.bfloat16
        with apart, torch.no_grad():
            assert not model(torch.randn(3, 7)).requires_grad


def test_per_sample_gradients_of_torch_func():
    model = nn.Linear(7, 5)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    x = torch.randn(3, 7)
    expected = each(weights, x)["weight"]
    with DeferWeightGradients():
        torch.testing.assert_close(each(weights, x)["weight"], expected)
