from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spatialdl.data.sample_generators import own_generators, seeded


def draws() -> list[float]:
    return [float(torch.rand(())), np.random.rand(), random.random()]


def test_common_generators_follow_from_seed_epoch_and_sample():
    found = {}
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]:
        with seeded([], *key):
            one = draws()
        assert found.setdefault(key, one) == one
    assert len({tuple(one) for one in found.values()}) == 4


def test_common_generators_go_on_as_if_nothing_had_been():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = [draws(), draws()]
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    found = [draws()]

    def failing() -> None:
        with seeded([], 1, 2, 3):
            draws()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert [*found, draws()] == expected


class Monai:
    def __init__(self) -> None:
        self.inner = np.random.RandomState()

    def set_random_state(self, seed: int) -> None:
        self.inner = np.random.RandomState(seed)


def test_generators_of_objects_are_found_wherever_they_lie():
    kept = SimpleNamespace(
        a=[np.random.default_rng(), (random.Random(),)],
        b={"c": partial(max, torch.Generator())},
        d=SimpleNamespace(legacy=np.random.RandomState()),
        monai=Monai(),
        files=["x"] * 10_000,
        module=np,
    )
    kept.itself = kept

    def numbers() -> list[float]:
        with seeded(own_generators(kept), 3, 1, 4):
            generator = kept.b["c"].args[0]
            return [
                *(kept.a[0].random(), kept.a[1][0].random(), kept.d.legacy.random()),
                *(kept.monai.inner.random(), float(torch.rand((), generator=generator))),
            ]

    first = numbers()
    assert len(set(first)) == 5
    assert numbers() == first
    assert len(own_generators(kept)) == 5


class Albumentations(Monai):
    """Of version 2: its state is two generators, and a number is set by another method."""

    def set_random_state(self, first: np.random.Generator, second: random.Random) -> None:
        raise AssertionError

    def set_random_seed(self, seed: int) -> None:
        self.inner = np.random.RandomState(seed)


def test_a_seed_goes_to_the_method_that_takes_one():
    one = Albumentations()
    found = set()
    for _ in range(2):
        with seeded(own_generators(one), 3, 1, 4):
            found.add(one.inner.random())
    assert len(found) == 1
