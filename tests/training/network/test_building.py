from __future__ import annotations

import random

import numpy as np
import torch

from spatialdl.training.network.building import peak_memory_mb, seed_generators


def test_memory_is_told_in_megabytes():
    assert 20 < peak_memory_mb(torch.device("cpu")) < 100_000


def test_the_seed_is_that_of_all_generators_a_network_may_draw_by():
    """A run that was killed before its first checkpoint began anew with other numbers of NumPy."""
    drawn = []
    for seed in (-1, -1, 7):
        seed_generators(seed)
        drawn.append((torch.rand(()).item(), np.random.random(), random.random()))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[1], drawn[2], strict=True))
