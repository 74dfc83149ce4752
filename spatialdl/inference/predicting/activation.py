"""Class activation maps (CAM): contribution of each position to the logit of a class.

Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016. If a network ends
with global average pooling and a linear layer, this layer can be applied to each position of the
last feature map; the mean of the results is the logit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.spatial.channels.weights import full_outputs
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import tree_leaves

NEEDED = "a network that ends with global average pooling and a linear layer in one stage"

_CONVOLUTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Activation(NamedTuple):
    """This rank's part of the activation maps of some images.

    Attributes:
        size: spatial size of the whole maps.
        start: start of this rank's part along each spatial dim.
        logits: (n, classes), logits of the images.
        values: (n, classes, *spatial).
        is_split: whether other ranks have the other parts.
    """

    size: tuple[int, ...]
    start: tuple[int, ...]
    logits: Tensor
    values: Tensor
    is_split: bool


class Activations:
    """Hooks on the last stage that compute activation maps; collective over the stage.

    Args:
        pipeline: the network on its ranks.

    Attributes:
        refusal: why there are no maps; known after a forward, on ranks of the last stage.
    """

    def __init__(self, pipeline: PipelineRuntime) -> None:
        self._chosen: int | None = None
        self._large: list[Tensor] = []
        self._last: list[Tensor] = []
        self._seen: deque[Activation] = deque()
        self.refusal = ""
        self._handles: list[Any] = []
        self._dims = pipeline.placement.dims
        last = pipeline.stages.get(pipeline.placement.stages - 1)
        if last is None:
            return
        modules = [module for module in last.modules() if module is not last]
        linears = [module for module in (*modules, last) if isinstance(module, nn.Linear)]
        if not linears:
            self.refusal = "the last stage has no linear layer"
            return
        self._handles.append(last.register_forward_pre_hook(self._begins))
        self._handles += [module.register_forward_pre_hook(self._enters) for module in modules]
        self._handles += [module.register_forward_hook(self._leaves) for module in modules]
        self._handles.append(linears[-1].register_forward_hook(self._classified))

    def take(self, output: Tensor) -> Activation | None:
        """Return the maps of the next micro-batch, whose output is `output`."""
        maps = self._seen.popleft() if self._seen and not self.refusal else None
        if maps is not None and not torch.equal(maps.logits.double(), output.double()):
            self.refusal = "its output is not that of its last linear layer"
        return None if self.refusal else maps

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._large, self._last = [], []
        self._seen.clear()

    def _begins(self, module: nn.Module, args: Any) -> None:
        """Record the inputs of the stage, which are a dictionary after the first stage."""
        self._large, self._last = [], []
        self._keep(args[0].values() if isinstance(args[0], dict) else args)

    def _enters(self, module: nn.Module, args: Any) -> None:
        self._keep(args)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        self._keep((output,))

    def _keep(self, values: Iterable[Any]) -> None:
        """Remember the latest maps, and the latest with more than one position."""
        leaves = tree_leaves(list(values))
        dims = 2 + self._dims
        maps = [one for one in leaves if isinstance(one, Tensor) and one.dim() == dims]
        self._last = maps or self._last
        self._large = [m for m in maps if prod(m.shape[2:]) > 1] or self._large

    def _classified(self, module: nn.Linear, args: Any, output: Tensor) -> None:
        features, output = full_outputs((args[0], output))
        fitting: list[Tensor] = []
        if features.dim() == 2:
            large, last = (
                [one for one in maps if one.shape[1] == features.shape[1]]
                for maps in (self._large, self._last)
            )
            fitting = large or last
        self._large, self._last = [], []
        if self.refusal:
            return
        if not fitting:
            self.refusal = "the input of its last linear layer is not one number per map channel"
            return
        if self._chosen is None:  # checked once
            means = (n for n, one in enumerate(fitting) if _is_mean(full_outputs(one), features))
            self._chosen = next(means, None)
        if self._chosen is None:
            self.refusal = "the input of its last linear layer is not the mean of a feature map"
            return
        features_map = full_outputs(fitting[self._chosen])
        tile, start = features_map, (0,) * self._dims
        if isinstance(features_map, SpatialTensor):
            box = features_map.mesh.own_box(features_map.spatial_layout)
            tile, start = features_map.to_local(), tuple(first for first, _ in box.spatial)
        size = tuple(map(int, features_map.shape[2:]))
        is_split = isinstance(features_map, SpatialTensor)
        values = self._values(module, tile)
        self._seen.append(Activation(size, start, output, values, is_split))

    def _values(self, module: nn.Linear, tile: Tensor) -> Tensor:
        weight: Tensor = full_outputs(module.weight).detach()
        bias = full_outputs(module.bias)
        ones = (1,) * self._dims
        if not tile.numel():
            return weight.new_zeros(len(tile), len(weight), *tile.shape[2:])
        with torch.autocast(tile.device.type, enabled=False):
            tile = tile.to(weight.dtype)
            return _CONVOLUTION[self._dims](tile, weight.reshape(*weight.shape, *ones), bias)


def _is_mean(features_map: Tensor, features: Tensor) -> bool:
    """Whether features are the spatial mean of a map; collective over the grid."""
    tile = features_map.to_local() if isinstance(features_map, SpatialTensor) else features_map
    means = tile.double().flatten(2).sum(2) / prod(features_map.shape[2:])
    if isinstance(features_map, SpatialTensor):
        means = features_map.mesh.grid_comm.all_reduce(means)
    most = float((means - features.double()).abs().max())
    return not most > _CLOSE[features.dtype] * float(means.abs().max() + 1)
