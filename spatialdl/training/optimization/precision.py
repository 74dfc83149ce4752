"""Numerical precision, deterministic algorithms and loss scaling."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GROWTH, SHRINKAGE = 2.0, 0.5
LEAST_SCALE = 1.0


@dataclass(frozen=True)
class Precision:
    """Dtypes of a value of ``trainer.precision``.

    Attributes:
        dtype: dtype of parameters, gradients and images.
        mixed: dtype of autocast; None without autocast.
    """

    dtype: torch.dtype
    mixed: torch.dtype | None = None


PRECISIONS = {
    "float32": Precision(torch.float32),
    "float64": Precision(torch.float64),
    "bf16-mixed": Precision(torch.float32, torch.bfloat16),
    "fp16-mixed": Precision(torch.float32, torch.float16),
}


def precision_of(name: str, device: torch.device) -> Precision:
    """Look up a precision by name and check that the device supports it.

    Raises:
        ValueError: if it does not.
    """
    precision = PRECISIONS[name]
    mixed = precision.mixed
    if mixed is not None and device.type != "cpu" and not _has(device, mixed):
        kind = torch.get_device_module(device).get_device_properties(device).name
        other = "fp16-mixed" if mixed is torch.bfloat16 else "bf16-mixed"
        raise ValueError(
            f"trainer.precision={name} is not supported by {kind}, which has no {mixed}: use "
            f"{other}"
        )
    return precision


def _has(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an accelerator supports a 16-bit dtype without emulation."""
    module = torch.get_device_module(device)
    supported = getattr(module, "get_amp_supported_dtype", None)  # on out-of-tree devices
    if supported is not None:
        return dtype in supported()
    has_bfloat16 = getattr(module, "is_bf16_supported", None)
    return dtype is not torch.bfloat16 or has_bfloat16 is None or has_bfloat16(False)


def set_arithmetic(*, tf32: bool, deterministic: bool, cudnn_benchmark: bool = False) -> None:
    """Set TF32, deterministic algorithms and cuDNN benchmarking of this process.

    Args:
        tf32: whether float32 products and convolutions on a GPU may round their operands to
            TensorFloat-32 (10 bits instead of 23).
        deterministic: whether nondeterministic operations raise ``RuntimeError``; to be set
            before CUDA starts.
        cudnn_benchmark: whether cuDNN (MIOpen) times its algorithms for each new shape and uses
            the fastest; no effect on other devices.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)  # imports the compiler: 2 s of a CPU


def channels_last(x: Tensor) -> Tensor:
    """The tensor in the channels-last memory format of images or volumes; others are unchanged."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


class LossScaler:
    """Loss scale that keeps small float16 gradients from underflow.

    Micikevicius et al., "Mixed precision training", 2018, section 3.2: the scale shrinks when
    gradients overflow and the step is skipped, and grows after `interval` steps without overflow.
    It is a power of two, so scaling does not round. All ranks have the same scale.

    Attributes:
        scale: scale of the next step, at least 1.
    """

    def __init__(self, scale: float = 2.0**16, interval: int = 2000) -> None:
        self.scale, self._interval, self._steps = scale, interval, 0

    def update(self, is_finite: bool) -> None:
        """Adapt the scale after a step; `is_finite` is that of the gradients of all ranks."""
        self._steps = self._steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale * SHRINKAGE, LEAST_SCALE)
        elif self._steps == self._interval:
            self.scale, self._steps = self.scale * GROWTH, 0

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers."""
        return {"scale": self.scale, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self._steps = float(state["scale"]), int(state["steps"])
