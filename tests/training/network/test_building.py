from __future__ import annotations

import torch

from spatialdl.training.network.building import peak_memory_mb


def test_memory_is_told_in_megabytes():
    assert 20 < peak_memory_mb(torch.device("cpu")) < 100_000
