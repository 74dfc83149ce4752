"""Class activation maps: what each place of an image gives to the logit of a class.

Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016. Where a network
ends with the mean of its last feature map over all places, and a linear layer, this layer may be
applied to each place instead: the mean of what comes out is the logit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.validation import Evaluated

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class _Part:
    """Of one box of some images; `samples` are not known while the network runs."""

    size: tuple[int, int]
    row: int
    col: int
    values: npt.NDArray[np.float32]
    is_split: bool
    samples: range = range(0)


class Activations:
    """Watches the last stage of a network; the ranks of a stage make it together.

    Raises:
        ValueError: while the network runs, if it does not end with a mean over all places and a
            linear layer.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._checked = False
        self._map: Tensor | None = None
        self._seen: deque[_Part] = deque()
        self._parts: list[_Part] = []
        last = pipeline.stages.get(pipeline.placement.stages - 1)
        modules = [] if last is None else list(last.modules())
        linears = [module for module in modules if isinstance(module, nn.Linear)]
        if last is not None and not linears:
            raise _refusal("its last stage has no linear layer")
        self._handles = [m.register_forward_hook(self._passed) for m in modules if m is not last]
        if linears:
            self._handles.append(linears[-1].register_forward_hook(self._classified))

    def note(self, one: Evaluated) -> None:
        """Keep what was seen of the images that have been evaluated, in the same order."""
        seen = self._seen.popleft()
        if seen.is_split or one.counts:
            self._parts.append(replace(seen, samples=one.samples))

    def gathered(self, world: Communicator, images: int) -> npt.NDArray[np.float32] | None:
        """float32 (images, classes, rows, columns) on rank 0; all ranks must ask, at the end."""
        for handle in self._handles:
            handle.remove()
        everybody = world.gather(self._parts)
        if everybody is None:
            return None
        parts = [part for one in everybody for part in one]
        found = np.zeros((images, parts[0].values.shape[1], *parts[0].size), np.float32)
        for part in parts:
            rows, cols = part.values.shape[2:]
            place = np.s_[part.row : part.row + rows, part.col : part.col + cols]
            found[part.samples.start : part.samples.stop, :, *place] = part.values
        return found

    def _passed(self, module: nn.Module, args: Any, output: Any) -> None:
        """The last feature map with more than one place, or the last one at all."""
        if not isinstance(output, Tensor) or output.dim() != 4:
            return
        if self._map is None or output.shape[2] * output.shape[3] > 1:
            self._map = output

    def _classified(self, module: nn.Linear, args: Any, output: Any) -> None:
        features, found = args[0], self._map
        self._map = None
        if found is None or features.dim() != 2 or found.shape[1] != features.shape[1]:
            raise _refusal("its last linear layer does not get one number a channel of a map")
        tile, row, col = found, 0, 0
        if isinstance(found, SpatialTensor):
            box = found.mesh.own_box(found.spatial_layout)
            tile, row, col = found.to_local(), box.row0, box.col0
        self._check_mean(found, tile, features)
        weight = module.weight.detach()
        values = weight.new_zeros(len(tile), len(weight), *tile.shape[2:])
        if tile.numel():
            with torch.autocast(tile.device.type, enabled=False):
                values = F.conv2d(tile.to(weight.dtype), weight[:, :, None, None], module.bias)
        size = int(found.shape[2]), int(found.shape[3])
        is_split = isinstance(found, SpatialTensor)
        self._seen.append(_Part(size, row, col, values.float().cpu().numpy(), is_split))

    def _check_mean(self, found: Tensor, tile: Tensor, features: Tensor) -> None:
        """Once, that what is classified is the mean of the map."""
        if self._checked:
            return
        means = tile.double().sum((2, 3)) / (found.shape[2] * found.shape[3])
        if isinstance(found, SpatialTensor):
            means = found.mesh.grid_comm.all_reduce(means)
        most = float((means - features.double()).abs().max())
        if most > _CLOSE[features.dtype] * float(means.abs().max() + 1):
            raise _refusal("what its last linear layer gets is not the mean of the map before it")
        self._checked = True


def _refusal(why: str) -> ValueError:
    return ValueError(
        f"activation=true needs a network that ends with the mean over all places and a linear "
        f"layer in one stage, and {why}: leave it out"
    )
