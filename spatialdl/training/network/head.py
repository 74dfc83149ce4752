"""Check of the network's output shape before the first step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spatialdl.spatial.meta import meta_copy, on_meta
from spatialdl.training.checkpoints.content import random_states, restore_random
from spatialdl.training.settings import TARGETED, Sources
from spatialdl.training.tasks.task import Task

_CPU = torch.device("cpu")
_SAMPLES = 2  # BatchNorm may reject a single sample


def check_head(model: nn.Module, task: Task, sources: Sources) -> int | None:
    """Run a network on the meta device and check the shape of its output.

    A network that cannot run there is checked by its first loss.

    Args:
        model: the network, not changed.
        task: the task.
        sources: data of the run.

    Returns:
        Number of output columns, or of classes per pixel; None if it cannot run on meta.

    Raises:
        ValueError: if shape or number of classes do not match the task.
    """
    size = (sources.channels, *sources.image_size)
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    states = random_states(_CPU)
    try:
        with torch.no_grad(), on_meta():
            output = meta_copy(model)(torch.empty(_SAMPLES, *size, dtype=dtype))
    except Exception:
        return None
    finally:  # a forward may draw random numbers
        restore_random(states, _CPU)
    task.check_output(output, _target(task, sources))
    return int(output.shape[1]) if isinstance(output, Tensor) and output.dim() > 1 else None


def _target(task: Task, sources: Sources) -> Tensor:
    """Labels or masks on the meta device."""
    if task.name == "segmentation":
        return torch.empty(_SAMPLES, *sources.image_size, dtype=torch.int64, device="meta")
    columns = (sources.num_classes,) if task.name in TARGETED else ()
    return torch.empty(_SAMPLES, *columns, device="meta")
