"""Random generators of a user's data set, seeded by (seed, epoch, sample).

Transforms draw from the global generators of PyTorch, NumPy and Python, or from their own, as those
of MONAI and albumentations do. All of them are seeded before a sample is made, so a sample does not
depend on the rank, the process or earlier samples. The global generators are restored afterwards.
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
"""Separates these random numbers from those of the sample order, and of `data.augment`."""

_MOST_ITEMS = 256  # items of a container that is searched; lists of files are longer
_MOST_OBJECTS = 20_000
_PLAIN = (str, bytes, int, float, complex, np.ndarray, np.generic, torch.Tensor, ModuleType, type)

_GENERATORS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)

Seed = Callable[[int], object]
"""Function that seeds a generator with a 32-bit number."""


def own_generators(root: object) -> list[Seed]:
    """Seed functions of the generators that an object and its attributes hold, in a fixed order.

    These are generators of PyTorch, NumPy and Python, and objects with `set_random_seed`
    (albumentations) or `set_random_state` (MONAI). Containers of many items are not searched.
    """
    found: list[Seed] = []
    waiting, seen = deque([root]), set[int]()
    kept = []  # keeps objects alive, so that their ids stay unique
    while waiting and len(seen) < _MOST_OBJECTS:
        item = waiting.popleft()
        if item is None or isinstance(item, _PLAIN) or id(item) in seen:
            continue
        seen.add(id(item))
        kept.append(item)
        seed = _seed_of(item)
        if seed is not None:
            found.append(seed)
        if isinstance(item, _GENERATORS):
            continue
        inside = _inside(item)
        if seed is not None:  # it replaces its own generators, but perhaps not those of its parts
            inside = [part for part in inside if not isinstance(part, _GENERATORS)]
        waiting.extend(inside)
    return found


def _seed_of(item: Any) -> Seed | None:
    if isinstance(item, np.random.RandomState | random.Random):
        return item.seed
    if isinstance(item, torch.Generator):
        return item.manual_seed
    if isinstance(item, np.random.Generator):
        return partial(_reseed, item.bit_generator)
    for name in ("set_random_seed", "set_random_state"):  # albumentations' state is not a number
        method = getattr(item, name, None)
        if inspect.ismethod(method):
            return method
    return None


def _reseed(bits: Any, seed: int) -> None:
    bits.state = type(bits)(seed).state


def _inside(item: Any) -> Iterable[object]:
    if isinstance(item, dict):
        return list(item.values()) if len(item) <= _MOST_ITEMS else ()
    if isinstance(item, list | tuple):
        return item if len(item) <= _MOST_ITEMS else ()
    if isinstance(item, partial):
        return (item.func, item.args, item.keywords)
    if inspect.ismethod(item):
        return (item.__self__,)
    found = getattr(item, "__dict__", None)
    return list(found.values()) if isinstance(found, dict) else ()


def _reduced(generator: torch.Generator) -> tuple[Any, ...]:
    """Pickle the state by value: a shared-memory tensor could vanish before it is opened."""
    return _rebuilt, (generator.device.type, generator.get_state().numpy().tobytes())


def _rebuilt(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


ForkingPickler.register(torch.Generator, _reduced)


@contextmanager
def seeded(own: Sequence[Seed], seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Seed all generators with (seed, epoch, sample) within the block.

    No other thread may draw from the global generators in the block.

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
