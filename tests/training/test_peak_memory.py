from __future__ import annotations

import torch

from spatialdl.training.peak_memory import device_memory_mb


def test_what_a_device_says_is_in_use_is_not_only_its_tensors(monkeypatch):
    assert device_memory_mb(torch.device("cpu")) is None

    class Module:
        @staticmethod
        def mem_get_info(device):
            return 3 * 2**20, 10 * 2**20

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert device_memory_mb(torch.device("meta")) == 7.0
