"""Random numbers of a user's data set that follow from (seed, epoch, sample) alone.

Transforms draw from the generators of PyTorch, NumPy and Python, or from some of their own, as
those of MONAI and albumentations do. All of them are seeded before a sample is made, so that it
does not depend on the rank, the process or the samples before it; the common ones are restored
afterwards.
"""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import numpy as np
import torch

_STREAM = 0x5EED_DA7A
"""Keeps these numbers apart from those of the order of samples, and of `data.augment`."""

_MOST_ITEMS = 256  # of a container; lists of files are longer
_MOST_OBJECTS = 20_000
_PLAIN = (str, bytes, int, float, complex, np.ndarray, np.generic, torch.Tensor, ModuleType, type)

_GENERATORS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)

Seed = Callable[[int], object]
"""Seeds a generator with a number of 32 bits."""


def own_generators(root: object) -> list[Seed]:
    """How to seed the generators that an object and its attributes hold, in a fixed order.

    Found are generators of PyTorch, NumPy and Python, and objects with `set_random_seed`
    (albumentations) or `set_random_state` (MONAI). Containers of many items are not searched.
    """
    found: list[Seed] = []
    waiting, seen = deque([root]), set[int]()
    kept = []  # an object that is gone could give its id to another
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.popleft()
        if one is None or isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen.add(id(one))
        kept.append(one)
        seed = _seed_of(one)
        if seed is not None:
            found.append(seed)
        if isinstance(one, _GENERATORS):
            continue
        inside = _inside(one)
        if seed is not None:  # it replaces its own generators, those of its parts perhaps not
            inside = [part for part in inside if not isinstance(part, _GENERATORS)]
        waiting.extend(inside)
    return found


def _seed_of(one: Any) -> Seed | None:
    if isinstance(one, np.random.RandomState | random.Random):
        return one.seed
    if isinstance(one, torch.Generator):
        return one.manual_seed
    if isinstance(one, np.random.Generator):
        return partial(_reseed, one.bit_generator)
    for name in ("set_random_seed", "set_random_state"):  # albumentations' state is no number
        method = getattr(one, name, None)
        if inspect.ismethod(method):
            return method
    return None


def _reseed(bits: Any, seed: int) -> None:
    bits.state = type(bits)(seed).state


def _inside(one: Any) -> Iterable[object]:
    if isinstance(one, dict):
        return list(one.values()) if len(one) <= _MOST_ITEMS else ()
    if isinstance(one, list | tuple):
        return one if len(one) <= _MOST_ITEMS else ()
    if isinstance(one, partial):
        return (one.func, one.args, one.keywords)
    if inspect.ismethod(one):
        return (one.__self__,)
    found = getattr(one, "__dict__", None)
    return list(found.values()) if isinstance(found, dict) else ()


def _reduced(generator: torch.Generator) -> tuple[Any, ...]:
    """Its state by value: as a tensor, in shared memory, it is gone before a process opens it."""
    return _rebuilt, (generator.device.type, generator.get_state().numpy().tobytes())


def _rebuilt(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


ForkingPickler.register(torch.Generator, _reduced)


@contextmanager
def seeded(own: Sequence[Seed], seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Within it, all generators give what follows from these three numbers.

    No other thread may draw from the common generators meanwhile.

    Args:
        own: see `own_generators`.
    """
    numbers = np.random.SeedSequence([seed, _STREAM, epoch, sample]).generate_state(3 + len(own))
    for_torch, for_numpy, for_python, *others = numbers.tolist()
    common = torch.default_generator
    before = common.get_state(), np.random.get_state(), random.getstate()
    common.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)
    try:
        for seed_one, number in zip(own, others, strict=True):
            seed_one(number)
        yield
    finally:
        common.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
