"""Mixed precision: what a stage runs under autocast, and the types of what it gives to others.

Under autocast the type of an activation is that of the operation which made it. Tensors on the
``meta`` device are not cast, so types are found on fake tensors, which say that they are on the
stages' own device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from spatialdl.pipeline.stage import run_stage
from spatialdl.pipeline.steps import IMAGE, Value


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast on `device` to `dtype`; nothing for None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@torch.no_grad()
def value_types(
    stages: Sequence[nn.Module],
    image: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[Value, torch.dtype]:
    """Types of the values that stages give under autocast; they do not depend on the layout.

    Args:
        stages: the first ones of a network, on the ``meta`` device, in evaluation.
        image: (N, C, *spatial), on the ``meta`` device.
        device: of the stages.
        dtype: to which autocast casts.

    Raises:
        ValueError: if a stage cannot be run without data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), device, autocast(device, dtype):
        values = {IMAGE: torch.empty(image.shape, dtype=image.dtype)}
        for number, stage in enumerate(stages):
            try:
                values |= run_stage(_fake_copy(stage), values, len(image))
            except Exception as error:
                raise ValueError(
                    f"which types stage {number} gives to others under autocast cannot be found "
                    f"without data ({error}): take trainer.precision=float32"
                ) from error
    return {value: tensor.dtype for value, tensor in values.items()}


def _fake_copy(stage: nn.Module) -> nn.Module:
    """A copy on the default device, to be made among fake tensors."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False)
        for p in stage.parameters()
    }
    memo |= {id(b): torch.empty(b.shape, dtype=b.dtype) for b in stage.buffers()}
    return copy.deepcopy(stage, memo)
