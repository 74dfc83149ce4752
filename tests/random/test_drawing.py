"""Random numbers of a key, in one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spatialdl
from spatialdl.random import checkpoint_contexts, keyed

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


def test_a_generator_of_ones_own_is_left_alone() -> None:
    expected = torch.rand(5, generator=torch.Generator().manual_seed(3))
    with keyed(0, 0):
        assert torch.equal(torch.rand(5, generator=torch.Generator().manual_seed(3)), expected)


def test_calls_differ_and_contexts_nest() -> None:
    with keyed(0, 0):
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


def test_it_is_part_of_the_package() -> None:
    assert spatialdl.random.keyed is keyed
