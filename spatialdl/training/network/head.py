"""Whether a network gives what its task needs, known before the first step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spatialdl.spatial.shadow import meta_copy
from spatialdl.training.checkpoints.content import random_states, restore_random
from spatialdl.training.settings import TARGETED, Sources
from spatialdl.training.tasks.task import Task

_CPU = torch.device("cpu")
_SAMPLES = 2  # one may be refused by normalisation over samples


def check_head(model: nn.Module, task: Task, sources: Sources) -> int | None:
    """Run a network without memory on images of the data and check the shape of its output.

    A network that cannot run so is checked by its first loss.

    Args:
        model: stays as it is.

    Returns:
        Its columns, or classes of a pixel; None if it cannot run so.

    Raises:
        ValueError: the output has another number of classes, or another shape, than the task.
    """
    size = (sources.channels, *sources.image_size)
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    states = random_states(_CPU)
    try:
        with torch.no_grad(), torch.device("meta"):
            output = meta_copy(model)(torch.empty(_SAMPLES, *size, dtype=dtype))
    except Exception:
        return None
    finally:  # a forward may draw
        restore_random(states, _CPU)
    task.check_output(output, _target(task, sources))
    return int(output.shape[1]) if isinstance(output, Tensor) and output.dim() > 1 else None


def _target(task: Task, sources: Sources) -> Tensor:
    """Labels or masks without values."""
    if task.name == "segmentation":
        return torch.empty(_SAMPLES, *sources.image_size, dtype=torch.int64, device="meta")
    columns = (sources.num_classes,) if task.name in TARGETED else ()
    return torch.empty(_SAMPLES, *columns, device="meta")
