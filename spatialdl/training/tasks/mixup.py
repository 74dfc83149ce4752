"""Mixup: samples and labels of a slice mixed in pairs (Zhang et al., "mixup", ICLR 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.pipeline.stage_runtime import Microbatch

_MIXUP = 0x6D697875  # separates the random stream from others of the same seed


def mix_samples(
    microbatches: Sequence[Microbatch],
    alpha: float,
    classes: int,
    seed: int,
    step: int,
    replica: int,
    replicas: int,
) -> list[Microbatch]:
    """Mix every sample with another of its slice; labels become shares of classes.

    Args:
        microbatches: micro-batches of this rank.
        alpha: parameter of Beta(alpha, alpha), the distribution of the first image's share, drawn
            once per slice; 0 leaves samples as they are.
        classes: classes of labels (N,).
        seed: seed of the run.
        step: steps done so far.
        replica: replica of this rank.
        replicas: number of replicas.
    """
    if alpha == 0:
        return list(microbatches)
    result = []
    for number, one in enumerate(microbatches):
        draw = np.random.default_rng([_MIXUP, seed, step, number * replicas + replica])
        share = float(draw.beta(alpha, alpha))
        partners = torch.from_numpy(draw.permutation(one.samples))
        tile, target = one.tile, one.target
        if target is not None and not target.is_floating_point():
            target = F.one_hot(target, classes).double()
        tile, target = (_mix(x, share, partners) for x in (tile, target))
        result.append(replace(one, tile=tile, target=target))
    return result


def _mix(x: Tensor | None, share: float, partners: Tensor) -> Tensor | None:
    if x is None:
        return None
    if not x.is_cpu:  # a copy from unpinned memory would make the host wait for the device
        partners = partners.pin_memory().to(x.device, non_blocking=True)
    return share * x + (1 - share) * x[partners]
