"""Batches on their way to a device, and the states of its random numbers."""

from __future__ import annotations

import pytest
import torch

from spatialdl.data.batches import Slice
from spatialdl.data.loader import DeviceCopy, Loader
from spatialdl.training.checkpoints.content import random_states, restore_random
from spatialdl.training.peak_memory import peak_memory_mb
from tests.data.numbers import WHOLE, batching, contents, views
from tests.simulated_device.holding import held


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_while_others_are_computed_with(workers, delays):
    device = torch.device("sim", 0)
    cut = batching(2, 2, mask_box=WHOLE)
    expected = contents(Loader(views(9), cut, 0).batches())
    loader = Loader(views(9), cut, 0, workers=workers, device=device)
    found = []
    for batch in loader.batches():
        assert all(x.device == device for one in batch for x in one.tensors())
        found.append([one.map(lambda x: x + 0) for one in batch])
        del batch  # its memory may be taken again by the next copy
    loader.close()
    assert contents([[one.map(torch.Tensor.cpu) for one in batch] for batch in found]) == expected


def test_a_device_copies_beside_what_it_computes():
    copy = DeviceCopy(torch.device("sim", 0))
    with held() as computing:
        arrived = copy.begin([Slice(torch.tensor([3]), 1.0, None)])
        assert copy._stream is not None
        copy._stream.synchronize()  # it has not waited for the computing
        computing.set()
        assert arrived()[0].labels.tolist() == [3]


def test_random_numbers_resume():
    device = torch.device("sim", 0)
    states = random_states(device)
    first = torch.rand(5, device=device)
    restore_random(states, device)
    assert torch.equal(torch.rand(5, device=device), first)


def test_the_peak_is_that_of_the_device():
    device = torch.device("sim", 0)
    torch.sim.reset_peak_memory_stats(device)
    before = peak_memory_mb(device)
    block = torch.empty(2**22, device=device)
    assert peak_memory_mb(device) >= before + 16
    del block
