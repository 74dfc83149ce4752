"""Freezing of parameters by name patterns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from spatialdl.pipeline.stage import rest_in_training
from spatialdl.torch_internals import BatchNormBase

log = logging.getLogger("spatialdl.trainer")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of the patterns (``layer1.*``, ``*.bias``).

    BatchNorm layers with only frozen parameters stay in evaluation mode, see `pipeline.stage`:
    their running statistics are frozen too.

    Raises:
        ValueError: if a pattern matches nothing, or no trainable parameter is left.
    """
    parameters = dict(model.named_parameters())
    matched: set[nn.Parameter] = set()
    for pattern in patterns:
        chosen = [name for name in parameters if fnmatchcase(name, pattern)]
        if not chosen:
            names = [*parameters, *(f"{name}.*" for name, _ in model.named_modules() if name)]
            near = get_close_matches(str(pattern), names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"trainer.freeze: no parameter matches {pattern}; did you mean {' or '.join(near)}?"
            )
        for name in chosen:
            parameters[name].requires_grad_(False)
            matched.add(parameters[name])
    for layer in model.modules():
        own = set(layer.parameters(recurse=False))
        if isinstance(layer, BatchNormBase) and own and own <= matched:
            rest_in_training(layer)
    frozen = [p.numel() for p in parameters.values() if not p.requires_grad]
    if patterns and len(frozen) == len(parameters):
        raise ValueError(
            f"trainer.freeze={list(patterns)} freezes all {len(frozen)} parameters: nothing is "
            "left to train"
        )
    if patterns:
        total = sum(p.numel() for p in parameters.values())
        log.info("frozen: %.2f of %.2f M parameters", sum(frozen) / 1e6, total / 1e6)
