"""Random numbers of a key, in one process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl.random import checkpoint_contexts, keyed, scope

ATTENTION = nn.MultiheadAttention(6, 2, dropout=0.5)


def draw() -> list[Tensor]:
    x = torch.ones(3, 4, 5, 6)
    return [
        F.dropout(x),
        F.dropout2d(x),
        nn.Dropout(0.2)(x),
        torch.rand(3, 1),
        torch.rand((3, 1), dtype=torch.float64),
        torch.randn(size=(2, 2)),
        torch.rand_like(x),
        torch.randn_like(x),
        torch.bernoulli(x * 0.3),
        torch.empty(8).bernoulli_(0.5),
        x.new_empty(8).uniform_(2, 3),
        torch.empty(8).normal_(5, 0.1),
        torch.empty(8).exponential_(),
        F.gumbel_softmax(x),
        F.rrelu(-x, training=True),
        F.scaled_dot_product_attention(x, x, x * torch.rand(6), dropout_p=0.5),
        F.fractional_max_pool2d(x * torch.rand(5, 6), 2, 3),
        ATTENTION(x[0, 0, :, None], x[0, 0, :, None], torch.rand(5, 1, 6))[0],
        torch.empty(8).bernoulli_(torch.full((8,), 0.5)),
    ]


def test_a_key_repeats_and_leaves_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    results = []
    for key in ((1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3)):
        with keyed(*key):
            results.append(draw())
    assert torch.equal(torch.get_rng_state(), before)
    for same in zip(*results[:2], strict=True):
        assert torch.equal(*same)
    for other in results[2:]:
        assert not any(torch.equal(a, b) for a, b in zip(results[0][6:8], other[6:8], strict=True))
    numbers = results[0]
    assert numbers[3].dtype == torch.float32
    assert numbers[4].dtype == torch.float64
    assert 2 <= numbers[10].min() <= numbers[10].max() < 3


def test_calls_differ_and_contexts_nest() -> None:
    own = torch.rand(5, generator=torch.Generator().manual_seed(3))
    with keyed(0, 0):
        assert torch.equal(torch.rand(5, generator=torch.Generator().manual_seed(3)), own)
        first, second = torch.rand(5), torch.rand(5)
        with keyed(0, 0):
            assert torch.equal(torch.rand(5), first)
        third = torch.rand(5)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    with keyed(0, 0):
        assert [torch.equal(torch.rand(5), x) for x in (first, second, third)] == [True] * 3


def test_checkpointing_draws_the_same_again() -> None:
    def block(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5).sin()

    grads = []
    for context_fn in (None, checkpoint_contexts):
        x = torch.linspace(0, 1, 50, requires_grad=True)
        with keyed(4, 4):
            torch.rand(1)
            if context_fn is None:
                y = block(x)
            else:
                y = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_scope_does_not_depend_on_what_ran_before() -> None:
    with keyed(0, 0):
        with scope("a"):
            first = torch.rand(5)
        torch.rand(5)
        with scope("b"):
            other = torch.rand(5)
    with keyed(0, 0), scope("b"):
        assert torch.equal(torch.rand(5), other)
    assert not torch.equal(first, other)
    with scope("a"):  # outside of a key it does nothing
        assert torch.rand(5).shape == (5,)


def test_a_rank_with_some_samples_draws_what_one_process_draws_for_them() -> None:
    x, noise = torch.ones(5, 3, 4), nn.Dropout(0.5)

    def drawn(own: range | None) -> list[Tensor]:
        part = x if own is None else x[own.start : own.stop]
        with keyed(1, 2, 3, own), scope("layer"):
            masks = [noise(part), F.dropout1d(part), torch.rand(7)]  # the last of no sample
            return [*masks, torch.rand(len(part), 2)]

    whole, some = drawn(None), drawn(range(2, 5))
    for one, part in zip(whole, some, strict=True):
        assert torch.equal(part, one[-3:] if len(one) == 5 else one)


@pytest.mark.parametrize("training", [False, True])
def test_random_slopes_are_those_of_pytorch_at_zero_and_below(training: bool) -> None:
    """At zero PyTorch takes the slope of what is below; ours once took 1."""
    gradients = []
    for key in ((1, 2, 3), None):
        x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
        with keyed(*key) if key else nullcontext():
            F.rrelu(x * 1, 0.2, 0.2, training, inplace=True).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_dropout_keeps_the_mean_and_its_gradient_has_the_mask() -> None:
    x = torch.ones(8, 16, 40, 40, requires_grad=True)
    with keyed(0, 1):
        for p in (0.1, 0.5, 0.9):
            y = F.dropout(x, p)
            assert y.mean().item() == pytest.approx(1, abs=2e-2)
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(grad, y.detach())
        y = F.alpha_dropout(torch.randn(200, 1000), 0.3)
        assert [y.mean().item(), y.std().item()] == pytest.approx([0, 1], abs=2e-2)
        mask = F.dropout2d(x)[:, :, :1, :1]
        assert torch.equal(F.dropout3d(x.detach())[:, :1, :1, :1] > -1, torch.ones(8, 1, 1, 1) > 0)
        assert set(mask.flatten().tolist()) == {0.0, 2.0}


def test_errors_of_pytorch_stay() -> None:
    with keyed(0, 0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(torch.ones(3), 2.0)
        assert F.dropout(torch.ones(3), training=False).tolist() == [1, 1, 1]
