"""In which numbers a network is trained, and how they reach the hardware."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

GROWTH, SHRINKAGE = 2.0, 0.5
LEAST_SCALE = 1.0


@dataclass(frozen=True)
class Precision:
    """What a value of ``trainer.precision`` stands for.

    Attributes:
        dtype: of parameters, gradients and images.
        mixed: to which autocast casts, if it does.
    """

    dtype: torch.dtype
    mixed: torch.dtype | None = None


PRECISIONS = {
    "float32": Precision(torch.float32),
    "float64": Precision(torch.float64),
    "bf16-mixed": Precision(torch.float32, torch.bfloat16),
    "fp16-mixed": Precision(torch.float32, torch.float16),
}


def named(name: str) -> Precision:
    """What a name stands for.

    Raises:
        ValueError: if it is none of `PRECISIONS`.
    """
    if name not in PRECISIONS:
        raise ValueError(
            f"trainer.precision={name} is not supported: take one of {', '.join(PRECISIONS)}"
        )
    return PRECISIONS[name]


def precision_of(name: str, device: torch.device) -> Precision:
    """The precision of a name of `PRECISIONS`.

    Raises:
        ValueError: if the device cannot do it.
    """
    found = named(name)
    if found.mixed is not None and device.type != "cpu" and not _has(device, found.mixed):
        kind = torch.get_device_module(device).get_device_properties(device).name
        other = "fp16-mixed" if found.mixed is torch.bfloat16 else "bf16-mixed"
        raise ValueError(
            f"trainer.precision={name} is not for {kind}, which has no {found.mixed}: take {other}"
        )
    return found


def _has(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an accelerator computes with numbers of 16 bits without emulating it."""
    module = torch.get_device_module(device)
    offered = getattr(module, "get_amp_supported_dtype", None)  # of devices out of PyTorch's tree
    if offered is not None:
        return dtype in offered()
    has_bfloat16 = getattr(module, "is_bf16_supported", None)
    return dtype is not torch.bfloat16 or has_bfloat16 is None or has_bfloat16(False)


def set_arithmetic(*, tf32: bool, deterministic: bool, cudnn_benchmark: bool = False) -> None:
    """How this process calculates from here on.

    Args:
        tf32: whether float32 products and convolutions on a GPU may round their operands to
            TensorFloat-32 (10 bits instead of 23).
        deterministic: whether an operation that may give other bits the next time raises
            ``RuntimeError``; call it before CUDA starts.
        cudnn_benchmark: whether cuDNN (MIOpen) times its algorithms for each new shape and takes
            the fastest; nothing on other devices.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


class LossScaler:
    """The factor of the loss that keeps small gradients in float16 from vanishing.

    Micikevicius et al., "Mixed precision training", 2018, section 3.2: it shrinks when gradients
    overflow, and the step is left out; it grows after `interval` steps without. Powers of two, so
    that scaling does not round. All ranks keep the same one.

    Attributes:
        scale: of the next step, at least 1.
    """

    def __init__(self, scale: float = 2.0**16, interval: int = 2000) -> None:
        self.scale, self._interval, self._steps = scale, interval, 0

    def update(self, is_finite: bool) -> None:
        """After a step, of which the gradients were finite on all ranks or not."""
        self._steps = self._steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale * SHRINKAGE, LEAST_SCALE)
        elif self._steps == self._interval:
            self.scale, self._steps = self.scale * GROWTH, 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"scale": self.scale, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self._steps = float(state["scale"]), int(state["steps"])
