"""Tests and the processes that they start see no GPU of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import torch


def test_no_gpu_is_visible_here_or_in_subprocesses():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["HIP_VISIBLE_DEVICES"] == "-1"
    assert torch.cuda.device_count() == torch.xpu.device_count() == 0
    program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    started = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert started.stdout.strip() == "-1"
