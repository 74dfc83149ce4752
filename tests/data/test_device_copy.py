from __future__ import annotations

import torch

from spatialdl.data.batches import Slice
from spatialdl.data.device_copy import DeviceCopy


def test_on_a_cpu_nothing_is_copied():
    tiles = torch.arange(12, dtype=torch.uint8).view(1, 2, 2, 3)
    batch = [Slice(torch.tensor([3]), 1.0, tiles)]
    assert DeviceCopy(torch.device("cpu")).begin(batch)() is batch
