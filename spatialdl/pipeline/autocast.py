"""Autocast of a stage, and the dtypes of its outputs.

Under autocast the dtype of an activation is that of the operation that computed it. Tensors on the
``meta`` device are not cast, so dtypes are found with fake tensors that report the stages' own
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from spatialdl.pipeline.stage import run_stage
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.spatial.meta import meta_copy


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Context of autocast on `device` to `dtype`; does nothing for None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@torch.no_grad()
def value_types(
    stages: Sequence[nn.Module],
    image: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[Value, torch.dtype]:
    """Dtypes of the values that stages output under autocast; independent of the layout.

    Args:
        stages: the first ones of a network, on the ``meta`` device, in evaluation.
        image: (N, C, *spatial), on the ``meta`` device.
        device: of the stages.
        dtype: of autocast.

    Raises:
        ValueError: if a stage cannot be run without data.
    """
    from spatialdl.torch_internals import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), device, autocast(device, dtype):
        values = {IMAGE: torch.empty(image.shape, dtype=image.dtype)}
        for number, stage in enumerate(stages):
            try:
                values |= run_stage(meta_copy(stage, device), values, len(image))
            except Exception as error:
                raise ValueError(
                    f"the dtypes of the outputs of stage {number} under autocast cannot be found "
                    f"without data ({error}): take trainer.precision=float32"
                ) from error
    return {value: tensor.dtype for value, tensor in values.items()}
