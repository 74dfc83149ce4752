from __future__ import annotations

import subprocess
import sys

import torch

from spatialdl.training.peak_memory import device_memory_mb, peak_memory_mb

TELL = """
import torch
from spatialdl.training.peak_memory import peak_memory_mb
print(peak_memory_mb(torch.device("cpu")))
"""


def test_memory_of_the_process_that_starts_another_does_not_count():
    """As it did, so that a small program started by a large one seemed as large."""
    ballast = b"x" * 2**28
    done = subprocess.run(
        [sys.executable, "-c", TELL], check=True, capture_output=True, text=True, timeout=120
    )
    own = peak_memory_mb(torch.device("cpu"))
    assert own > len(ballast) / 2**20
    assert 50 < float(done.stdout) < own - 100


def test_what_a_device_says_is_in_use_is_not_only_its_tensors(monkeypatch):
    assert device_memory_mb(torch.device("cpu")) is None

    class Module:
        @staticmethod
        def mem_get_info(device):
            return 3 * 2**20, 10 * 2**20

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert device_memory_mb(torch.device("meta")) == 7.0
