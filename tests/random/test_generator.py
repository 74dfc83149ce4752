"""Random numbers by key and place."""

from __future__ import annotations

import math

import pytest
import torch

from spatialdl.random import generator
from spatialdl.random.generator import (
    TensorRegion,
    _bits,
    bernoulli,
    exponential,
    keep_mask,
    key_of,
    normal,
    signed,
    uniform,
)
from spatialdl.random.streams import whole

CPU = torch.device("cpu")


def test_it_is_splitmix64() -> None:
    """The first outputs for the seed 0, of the authors' program; we keep the upper 53 bits."""
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert _bits(0, torch.arange(4)).tolist() == [word >> 11 for word in known]


def test_keys_and_numbers_are_those_of_earlier_versions() -> None:
    """A run that a later version resumes draws on."""
    keys = {key_of(*one) for one in [(), (0,), (0, 0), (0, 1), (1, 0), (-1,), (2**64 + 5,)]}
    assert len(keys) == 7
    assert [key_of(), key_of(0)] == [0, 0xA706DD2F4D197E6F]
    assert [key_of(1, 2, 3), key_of(-1, 2**64 + 5)] == [0x882D1ACC8D6C3B48, 0xF141F21DAD8D041B]
    numbers = uniform(whole((3,)), key_of(1, 2, 3), torch.float64, CPU).tolist()
    known = ("0x1.f8d999b974d14p-1", "0x1.f7cb1718f0acep-2", "0x1.3598b59b4e951p-1")
    assert [number.hex() for number in numbers] == list(known)


def test_the_lowest_64_bits_are_an_integer_of_pytorch() -> None:
    words = (0, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1)
    assert [signed(word) for word in words] == [0, 2**63 - 1, -(2**63), -1, 0, -1]


@pytest.mark.parametrize("chunk", [2**4, 2**16, 2**22])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 5, 7), (3, 2, 300, 301)])
def test_a_part_draws_what_the_whole_draws(
    shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of any size, too."""
    if chunk > 2**4 or math.prod(shape) < 1000:  # or it would take long
        monkeypatch.setattr(generator, "_CHUNK", chunk)
    full = uniform(whole(shape), 5, torch.float64, CPU)
    mask = keep_mask(whole(shape), 0.3, 5, CPU)
    assert full.shape == mask.shape == shape
    positions = tuple(torch.arange(size)[size // 3 :: 2] for size in shape)
    part = TensorRegion(positions, shape)
    expected = full
    for dim, places in enumerate(positions):
        expected = expected.index_select(dim, places)
    assert torch.equal(uniform(part, 5, torch.float64, CPU), expected)
    assert torch.equal(mask, full < 0.3)


def test_numbers_are_as_they_should_be() -> None:
    region = whole((4, 50, 50, 20))
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
    (largest,) = uniform(whole((1,)), 0, dtype, CPU).double().tolist()
    assert largest == 1 - torch.finfo(dtype).eps / 2 < 1


def test_numbers_of_bits_that_are_all_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest normal one, of a logarithm of 0 + 1; what is impossible does not occur."""
    monkeypatch.setattr(generator, "_bits", lambda _, places: torch.zeros_like(places))
    (largest,) = normal(whole((1,)), 5, torch.float64, CPU).tolist()
    assert largest == pytest.approx(math.sqrt(-2 * math.log(2**-53)), rel=1e-15)
    assert bernoulli(torch.tensor([0.0, 1e-9]), whole((2,)), 5).tolist() == [0, 1]


def test_a_mask_is_true_where_fewer_than_the_probability_of_all_bits_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for word, expected in [(2**52 - 1, True), (2**52, False)]:
        monkeypatch.setattr(
            generator, "_bits", lambda _, places, word=word: torch.full_like(places, word)
        )
        mask = keep_mask(whole((2,)), 0.5, 5, CPU)
        assert mask.dtype == torch.bool
        assert mask.tolist() == [expected] * 2


def test_exponential_numbers_are_logarithms_of_uniform_ones() -> None:
    region = whole((4, 50, 50, 20))
    numbers = exponential(region, 9, torch.float64, CPU)
    assert torch.equal(numbers, -(uniform(region, 9, torch.float64, CPU) + 2.0**-53).log())
    assert numbers.mean().item() == pytest.approx(1, abs=1e-2)
    assert numbers.var().item() == pytest.approx(1, abs=3e-2)
    assert exponential(region, 9, torch.float16, CPU).dtype == torch.float16


@pytest.mark.parametrize("word", [0, 2**53 - 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logarithms_of_exponential_numbers_are_finite(
    dtype: torch.dtype, word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever 53 bits are drawn."""
    monkeypatch.setattr(generator, "_bits", lambda _, places: torch.full_like(places, word))
    assert exponential(whole((3,)), 5, dtype, CPU).log().isfinite().all()


def test_bernoulli_numbers_compare_uniform_ones_with_probabilities() -> None:
    region = whole((40, 50))
    chances = torch.linspace(0, 1, 2000).view(40, 50)
    numbers = bernoulli(chances, region, 9)
    assert numbers.dtype == chances.dtype
    assert torch.equal(numbers.bool(), uniform(region, 9, torch.float64, CPU) < chances)
    assert numbers[0, 0] == 0
    assert numbers[-1, -1] == 1


def test_numbers_are_drawn_on_the_device_of_the_others() -> None:
    region, meta = whole((3, 2)), torch.device("meta")
    drawn = [draw(region, 5, torch.float32, meta) for draw in (uniform, normal, exponential)]
    drawn += [bernoulli(torch.empty(3, 2, device=meta), region, 5), keep_mask(region, 0.5, 5, meta)]
    assert {one.device for one in drawn} == {meta}
