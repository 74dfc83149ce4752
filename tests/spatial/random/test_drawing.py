"""Random numbers of a key, in one process."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl.spatial.random import checkpoint_contexts, generator, keyed, scope
from spatialdl.spatial.random.generator import (
    TensorRegion,
    bernoulli,
    exponential,
    keep_mask,
    key_of,
    normal,
    uniform,
)
from spatialdl.spatial.random.streams import full_region

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


CPU = torch.device("cpu")


def test_keys_and_numbers_are_those_of_earlier_versions() -> None:
    """A run that a later version resumes draws on."""
    keys = {key_of(*one) for one in [(), (0,), (0, 0), (0, 1), (1, 0), (-1,), (2**64 + 5,)]}
    assert len(keys) == 7
    assert [key_of(), key_of(0)] == [0, 0xA706DD2F4D197E6F]
    assert [key_of(1, 2, 3), key_of(-1, 2**64 + 5)] == [0x882D1ACC8D6C3B48, 0xF141F21DAD8D041B]
    numbers = uniform(full_region((3,)), key_of(1, 2, 3), torch.float64, CPU).tolist()
    known = ("0x1.f8d999b974d14p-1", "0x1.f7cb1718f0acep-2", "0x1.3598b59b4e951p-1")
    assert [number.hex() for number in numbers] == list(known)


@pytest.mark.parametrize("chunk", [2**4, 2**16, 2**22])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 5, 7), (3, 2, 300, 301)])
def test_a_part_draws_what_the_whole_draws(
    shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of any size, too."""
    if chunk > 2**4 or math.prod(shape) < 1000:  # or it would take long
        monkeypatch.setattr(generator, "_CHUNK", chunk)
    full = uniform(full_region(shape), 5, torch.float64, CPU)
    mask = keep_mask(full_region(shape), 0.3, 5, CPU)
    assert full.shape == mask.shape == shape
    positions = tuple(torch.arange(size)[size // 3 :: 2] for size in shape)
    part = TensorRegion(positions, shape)
    expected = full
    for dim, places in enumerate(positions):
        expected = expected.index_select(dim, places)
    assert torch.equal(uniform(part, 5, torch.float64, CPU), expected)
    assert torch.equal(mask, full < 0.3)


def test_numbers_are_as_they_should_be() -> None:
    region = full_region((4, 50, 50, 20))
    numbers = uniform(region, 9, torch.float64, CPU)
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=3e-3)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=1e-3)
    bell = normal(region, 9, torch.float64, CPU)
    moments = [bell.mean(), bell.var(), bell.pow(3).mean(), bell.pow(4).mean()]
    assert torch.stack(moments).tolist() == pytest.approx([0, 1, 0, 3], abs=4e-2)
    flat = numbers.flatten() - 0.5
    for lag in (1, 20, 1000):
        assert abs((flat[lag:] * flat[:-lag]).mean().item()) < 1e-3
    other = uniform(region, 10, torch.float64, CPU).flatten() - 0.5
    assert abs((flat * other).mean().item()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_number_is_one_step_of_the_dtype_below_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "_bits", lambda _, places: torch.full_like(places, 2**53 - 1))
    (largest,) = uniform(full_region((1,)), 0, dtype, CPU).double().tolist()
    assert largest == 1 - torch.finfo(dtype).eps / 2 < 1


def test_numbers_of_bits_that_are_all_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest normal one, of a logarithm of 0 + 1; what is impossible does not occur."""
    monkeypatch.setattr(generator, "_bits", lambda _, places: torch.zeros_like(places))
    (largest,) = normal(full_region((1,)), 5, torch.float64, CPU).tolist()
    assert largest == pytest.approx(math.sqrt(-2 * math.log(2**-53)), rel=1e-15)
    assert bernoulli(torch.tensor([0.0, 1e-9]), full_region((2,)), 5).tolist() == [0, 1]


@pytest.mark.parametrize("word", [0, 2**53 - 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logarithms_of_exponential_numbers_are_finite(
    dtype: torch.dtype, word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever 53 bits are drawn."""
    monkeypatch.setattr(generator, "_bits", lambda _, places: torch.full_like(places, word))
    assert exponential(full_region((3,)), 5, dtype, CPU).log().isfinite().all()
