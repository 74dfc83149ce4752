"""Whether a network gives what its task needs, known before the first step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from spatialdl.spatial.shadow import meta_copy
from spatialdl.training.settings import TARGETED, Sources
from spatialdl.training.tasks.task import Task

_SAMPLES = 2  # one may be refused by normalisation over samples


def check_head(model: nn.Module, task: Task, sources: Sources) -> None:
    """Run a network without memory on images of the data and check the shape of its output.

    A network that cannot run so is checked by its first loss.

    Args:
        model: stays as it is.

    Raises:
        ValueError: the output has another number of classes, or another shape, than the task.
    """
    size = (sources.channels, *sources.image_size)
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    try:
        with _generators_kept(), torch.no_grad(), torch.device("meta"):
            output = meta_copy(model)(torch.empty(_SAMPLES, *size, dtype=dtype))
    except Exception:
        return
    task.check_output(output, _target(task, sources))


def _target(task: Task, sources: Sources) -> Tensor:
    """Labels or masks without values."""
    if task.name == "segmentation":
        return torch.empty(_SAMPLES, *sources.image_size, dtype=torch.int64, device="meta")
    columns = (sources.num_classes,) if task.name in TARGETED else ()
    return torch.empty(_SAMPLES, *columns, device="meta")


@contextmanager
def _generators_kept() -> Iterator[None]:
    """A forward may draw by them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
