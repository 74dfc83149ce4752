"""The device on which these tests compute: the CPU, or the simulated accelerator."""

from __future__ import annotations

import os

import torch

from spatialdl.comm.alone import Alone
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import choose_device_path, current_device
from spatialdl.comm.launch import launched
from tests import simulated_device

OF_THE_CPU = {
    "test_a_frozen_kernel_and_a_frozen_image",
    "test_a_module_of_linear_layers",
    "test_a_transformer_of_pytorch",
    "test_an_encoder_layer",
    "test_attention_whose_weights_are_kept",
    "test_batch_norm",
    "test_batch_norm_of_channels_last",
    "test_channels_last",
    "test_classes_at_the_end_and_tokens",
    "test_dice_from_monai",
    "test_every_part",
    "test_frozen_operands_where_ranks_have_no_pixels",
    "test_full_outputs_with_split_targets",
    "test_given_numbers_are_taken",
    "test_layers",
    "test_legacy_arguments_batchmean_and_broadcast",
    "test_modules_with_dropout",
    "test_of_signals_and_volumes",
    "test_take_along_dim",
    "test_the_same_picture_in_every_layout",
    "test_where_ranks_have_no_pixels",
    "test_write_into_channels_and_samples",
}
"""Tests whose networks, labels or indices lie on the CPU: they are not for other devices."""

PATH = os.environ.get("SPATIALDL_DEVICE_PATH", "auto")


def _device() -> torch.device:
    kind = os.environ.get("SPATIALDL_DEVICE", "cpu")
    if kind == "sim":
        os.environ.setdefault("SIM_DEVICES", str(launched().size))
        simulated_device.load()
    return torch.device(kind)


DEVICE = _device()


def device_key(comm: Communicator) -> str:
    """The override for a run of `comm`; a process by itself is a reference, on the CPU."""
    return "device=cpu" if isinstance(comm, Alone) else f"device={DEVICE.type}"


def put_on(world: Communicator) -> torch.device:
    """Give every rank a device, of its own if there are enough; all ranks call it."""
    if DEVICE.type == "cpu":
        return DEVICE
    torch.accelerator.set_device_index(world.rank % torch.accelerator.device_count())
    if DEVICE.type == "sim":
        from tests.simulated_device.device_aware_mpi import take_device_memory

        if PATH == "mpi":
            take_device_memory()
    path = choose_device_path(world, current_device(), PATH)
    assert path is not None
    assert PATH in ("auto", path.name)
    return current_device()
