"""The choice for ranks on CPUs; that for devices is in tests/mpi/comm/test_device_transport.py."""

from __future__ import annotations

import pytest
import torch

from spatialdl.comm.device_path import (
    choose_device_path,
    device_of,
    device_path,
    reports_device_aware,
)
from spatialdl.comm.single_process import SingleProcess

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


@NO_GPU
def test_devices_by_name():
    assert device_of("cpu") == device_of("auto") == CPU
    with pytest.raises(ValueError, match="device=cuda, but PyTorch finds no cuda device"):
        device_of("cuda")


def test_apples_accelerator_is_not_taken(monkeypatch):
    """It has no float64, and no streams of its own."""
    apple = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: apple)
    assert device_of("auto") == CPU


def test_ranks_on_cpus_need_no_path():
    assert choose_device_path(SingleProcess(), CPU) is None
    assert choose_device_path(SingleProcess(), CPU, "nccl") is None
    assert device_path().name == "host"


def test_a_path_that_is_unknown():
    with pytest.raises(
        ValueError, match=r"unknown comm\.device_path=pigeon, must be one of auto, nccl"
    ):
        choose_device_path(SingleProcess(), CPU, "pigeon")


@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu"])
def test_an_mpi_library_of_pip_takes_no_device_memory(kind):
    assert not reports_device_aware(torch.device(kind, 0))
