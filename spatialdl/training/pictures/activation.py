"""Class activation maps: what each place of an image gives to the logit of a class.

Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016. Where a network
ends with the mean of its last feature map over all places, and a linear layer, this layer may be
applied to each place instead: the mean of what comes out is the logit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spatialdl.channels.weights import whole_outputs
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.spatial.tensor import SpatialTensor

NEEDED = "a network that ends with the mean over all places and a linear layer in one stage"

_CONVOLUTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Activation(NamedTuple):
    """What this rank has of the maps of some images.

    Attributes:
        size: (H, W) of the whole maps, of volumes and signals likewise.
        start: where its part begins, along each spatial dim.
        logits: (n, classes), of the images.
        values: (n, classes, *spatial), or (n, *spatial) of their most probable ones.
        is_split: whether other ranks have the other parts.
    """

    size: tuple[int, ...]
    start: tuple[int, ...]
    logits: Tensor
    values: Tensor
    is_split: bool


class Activations:
    """Watches the last stage of a network; the ranks of a stage make it together.

    Args:
        all_classes: whether maps are of all classes, or of each image's most probable one.

    Attributes:
        refusal: why there are no maps; known when the network has run, on ranks that hold its end.
    """

    def __init__(self, pipeline: PipelineRuntime, *, all_classes: bool) -> None:
        self._all = all_classes
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
            self.refusal = "its last stage has no linear layer"
            return
        self._handles.append(last.register_forward_pre_hook(self._begins))
        self._handles += [module.register_forward_pre_hook(self._enters) for module in modules]
        self._handles += [module.register_forward_hook(self._leaves) for module in modules]
        self._handles.append(linears[-1].register_forward_hook(self._classified))

    def take(self, output: Tensor) -> Activation | None:
        """Of the next micro-batch that has left the network, and its output."""
        seen = self._seen.popleft() if self._seen and not self.refusal else None
        if seen is not None and not torch.equal(seen.logits.double(), output.double()):
            self.refusal = "what leaves it is not what its last linear layer gives"
        return None if self.refusal else seen

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._large, self._last = [], []
        self._seen.clear()

    def _begins(self, module: nn.Module, args: Any) -> None:
        """A stage takes tensors by their names."""
        self._large, self._last = [], []
        self._keep(args[0].values() if isinstance(args[0], dict) else args)

    def _enters(self, module: nn.Module, args: Any) -> None:
        self._keep(args)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        self._keep((output,))

    def _keep(self, values: Iterable[Any]) -> None:
        """The last maps, which may be several, and the last ones with more than one place."""
        leaves = tree_leaves(list(values))
        dims = 2 + self._dims
        maps = [one for one in leaves if isinstance(one, Tensor) and one.dim() == dims]
        self._last = maps or self._last
        self._large = [m for m in maps if prod(m.shape[2:]) > 1] or self._large

    def _classified(self, module: nn.Linear, args: Any, output: Tensor) -> None:
        features, output = whole_outputs((args[0], output))
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
            self.refusal = "its last linear layer does not get one number a channel of a map"
            return
        if self._chosen is None:  # looked at once
            means = (n for n, one in enumerate(fitting) if _is_mean(whole_outputs(one), features))
            self._chosen = next(means, None)
        if self._chosen is None:
            self.refusal = "what its last linear layer gets is not the mean of the map before it"
            return
        found = whole_outputs(fitting[self._chosen])
        tile, start = found, (0,) * self._dims
        if isinstance(found, SpatialTensor):
            box = found.mesh.own_box(found.spatial_layout)
            tile, start = found.to_local(), tuple(first for first, _ in box.spatial)
        size = tuple(map(int, found.shape[2:]))
        is_split = isinstance(found, SpatialTensor)
        values = self._values(module, tile, output.argmax(1))
        self._seen.append(Activation(size, start, output, values, is_split))

    def _values(self, module: nn.Linear, tile: Tensor, classes: Tensor) -> Tensor:
        weight: Tensor = whole_outputs(module.weight).detach()
        bias = whole_outputs(module.bias)
        ones = (1,) * self._dims
        shape = (len(weight), *tile.shape[2:]) if self._all else tile.shape[2:]
        if not tile.numel():
            return weight.new_zeros(len(tile), *shape)
        with torch.autocast(tile.device.type, enabled=False):
            tile = tile.to(weight.dtype)
            if self._all:
                return _CONVOLUTION[self._dims](tile, weight.reshape(*weight.shape, *ones), bias)
            values = torch.einsum("nc...,nc->n...", tile, weight[classes])
            return values if bias is None else values + bias.detach()[classes].reshape(-1, *ones)


def _is_mean(found: Tensor, features: Tensor) -> bool:
    """Whether what is classified is the mean of a map; the ranks of a grid ask together."""
    tile = found.to_local() if isinstance(found, SpatialTensor) else found
    means = tile.double().flatten(2).sum(2) / prod(found.shape[2:])
    if isinstance(found, SpatialTensor):
        means = found.mesh.grid_comm.all_reduce(means)
    most = float((means - features.double()).abs().max())
    return not most > _CLOSE[features.dtype] * float(means.abs().max() + 1)
