"""Stateless random numbers from a key and a position: SplitMix64, for any region of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORD = 2**64 - 1
_BITS = 53  # bits of a random number, the precision of float64
_CHUNK = 2**16  # numbers drawn at a time, so that intermediate integers fit in a CPU cache
_CHUNK_ON_DEVICE = 2**22  # few kernels, and 32 MB of intermediate integers


def _mix(word: int) -> int:
    for shift, factor in _ROUNDS:
        word = (word ^ (word >> shift)) * factor & _WORD
    return word ^ (word >> 31)


def key_of(*numbers: int) -> int:
    """Combine integers to a 64-bit key."""
    key = 0
    for number in numbers:
        key = _mix((key ^ _mix((number + _GAMMA) & _WORD)) + _GAMMA & _WORD)
    return key


def signed(word: int) -> int:
    """The lowest 64 bits as an int64 value."""
    word &= _WORD
    return word - 2**64 if word >= 2**63 else word


def _shift_right(words: Tensor, shift: int) -> Tensor:
    """Logical right shift of int64."""
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _bits(key: int, places: Tensor) -> Tensor:
    """Random 53-bit integers for positions in a tensor."""
    words = places * signed(_GAMMA) + signed(key + _GAMMA)
    for shift, factor in _ROUNDS:
        words ^= _shift_right(words, shift)
        words *= signed(factor)
    words ^= _shift_right(words, 31)
    return _shift_right(words, 64 - _BITS)


class TensorRegion(NamedTuple):
    """Region of a whole tensor that this rank holds.

    Attributes:
        positions: int64 indices of the own elements along each dim.
        shape: shape of the whole tensor.
    """

    positions: tuple[Tensor, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(len(places) for places in self.positions)

    def of_channels(self) -> TensorRegion:
        """Region with one number for each sample and channel: (N, C, 1, ...)."""
        rest = len(self.shape) - 2
        one = torch.zeros(1, dtype=torch.int64)
        return TensorRegion(self.positions[:2] + (one,) * rest, self.shape[:2] + (1,) * rest)


def _fill_region(
    region: TensorRegion,
    key: int,
    out: Tensor,
    transform: Callable[[Callable[[int], Tensor], Tensor], Tensor],
) -> Tensor:
    """Fill `out` in chunks with a function of random integers.

    `transform` is given a function from a stream index to integers, and the chunk to be filled.
    """
    if out.device.type == "meta":
        return out
    chunk = _CHUNK if out.device.type == "cpu" else _CHUNK_ON_DEVICE
    positions = _on_device(region.positions, out.device)
    steps = [math.prod(region.shape[dim + 1 :]) for dim in range(len(region.shape))]

    def fill(part: Tensor, base: Tensor, dim: int) -> None:
        inner = math.prod(part.shape[1:])
        if part.dim() == 0 or part.numel() <= chunk:
            for places, step in zip(positions[dim:], steps[dim:], strict=True):
                base = base[..., None] + places * step
            places = base.view(part.shape)
            part.copy_(transform(lambda stream: _bits(key_of(key, stream), places), part))
            return
        if inner > chunk:
            for row, place in zip(part.unbind(0), positions[dim], strict=True):
                fill(row, base + place * steps[dim], dim + 1)
            return
        rows = max(1, chunk // inner)
        kept = positions[dim]
        for start in range(0, len(kept), rows):
            positions[dim] = kept[start : start + rows]
            fill(part[start : start + rows], base, dim)
        positions[dim] = kept

    fill(out, torch.zeros((), dtype=torch.int64, device=out.device), 0)
    return out


def _on_device(positions: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Positions on a device, by one asynchronous copy."""
    if device.type == "cpu" or not positions:
        return list(positions)
    joined = torch.cat(tuple(positions)).pin_memory().to(device, non_blocking=True)
    return list(torch.split(joined, [len(places) for places in positions]))


def keep_mask(region: TensorRegion, probability: float, key: int, device: torch.device) -> Tensor:
    """Boolean mask, True with `probability`; identical on all devices."""
    limit = round(probability * 2**_BITS)
    out = torch.empty(region.size, dtype=torch.bool, device=device)
    return _fill_region(region, key, out, lambda bits, part: bits(0) < limit)


def uniform(region: TensorRegion, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in [0, 1), with as many bits as `dtype` has."""
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    out = torch.empty(region.size, dtype=dtype, device=device)

    def transform(bits: Callable[[int], Tensor], part: Tensor) -> Tensor:
        return _shift_right(bits(0), _BITS - digits).double() * 2.0**-digits

    return _fill_region(region, key, out, transform)


def normal(region: TensorRegion, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers (Box and Muller, 1958)."""
    out = torch.empty(region.size, dtype=dtype, device=device)

    def transform(bits: Callable[[int], Tensor], part: Tensor) -> Tensor:
        radius = (-2 * ((bits(0).double() + 1) * 2.0**-_BITS).log()).sqrt()
        return radius * (bits(1).double() * (2 * math.pi * 2.0**-_BITS)).cos()

    return _fill_region(region, key, out, transform)


def exponential(region: TensorRegion, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Exponentially distributed numbers of rate 1; never 0, so that their logarithm is finite."""
    out = torch.empty(region.size, dtype=dtype, device=device)

    def transform(bits: Callable[[int], Tensor], part: Tensor) -> Tensor:
        smallest = torch.finfo(dtype).tiny
        return -((bits(0).double() + 1) * 2.0**-_BITS).log().clamp_(max=-smallest)

    return _fill_region(region, key, out, transform)


def bernoulli(probabilities: Tensor, region: TensorRegion, key: int) -> Tensor:
    """Ones where a uniform number is below the probability; dtype as `probabilities`."""
    numbers = uniform(region, key, torch.float64, probabilities.device)
    return (numbers < probabilities).to(probabilities.dtype)
