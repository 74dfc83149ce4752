"""Encoder and aggregator as one network, from the pixels of all tiles to a slide's output.

A bag is a signal (1, C * h * w, tiles) of pixels. Every rank encodes its tiles slice by slice, and
recomputes each slice in backward. The recomputation runs on the same slices, draws the same random
numbers, and does not update buffers, as in Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016 (https://arxiv.org/abs/1604.06174), section 3, with slices of the batch instead of
layers. The features are the split signal that the aggregator maps to the output. Nothing is
gathered, and the encoder needs no synchronisation of ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.spatial.random.drawing import PartsOfSamples
from spatialdl.spatial.random.streams import scope, thread
from spatialdl.spatial.recompute import recompute
from spatialdl.spatial.tensor import SpatialTensor, from_tile
from spatialdl.torch_internals import BatchNormBase, InstanceNormBase

__all__ = ["EndToEndNetwork"]

MODES = ("slices", "graph")


class TileEncoder(nn.Module):
    """Maps pixels of tiles, (1, C * h * w, tiles), to their features, (1, D, tiles).

    Args:
        network: tiles (n, C, h, w) to features (n, D). Features of a tile must not depend on other
            tiles.
        tile: (C, h, w).
        slice_size: tiles per call of the network, with slices.
        mode: "slices" recomputes each slice in backward; "graph" keeps all activations.
        frozen_norm: keep BatchNorm in evaluation mode, also after ``train()``.
        mean, std: normalise pixels / scale: one number, or one per channel.
        scale: pixel value that is mapped to 1.

    Raises:
        ValueError: a setting is invalid, or the network has BatchNorm in training.
    """

    def __init__(
        self,
        network: nn.Module,
        tile: Sequence[int],
        slice_size: int = 32,
        mode: str = "slices",
        frozen_norm: bool = False,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if type(slice_size) is not int or slice_size < 1 or mode not in MODES:
            raise ValueError(
                f"slice_size must be at least 1 and mode one of {', '.join(MODES)}, got "
                f"slice_size={slice_size}, mode={mode!r}"
            )
        if len(tile) != 3 or min(tile) < 1:
            raise ValueError(f"tile must be [channels,rows,columns], got {list(tile)}")
        self.network, self.tile = network, tuple(tile)
        self._size, self._mode, self._frozen, self._scale = slice_size, mode, frozen_norm, scale
        for name, values in (("mean", mean), ("std", std)):
            row = torch.as_tensor(values, dtype=torch.float64).reshape(-1, 1, 1)
            if len(row) not in (1, tile[0]):
                raise ValueError(
                    f"{name} has {len(row)} numbers, but tiles have {tile[0]} channels: give one, "
                    "or one for each channel"
                )
            self.register_buffer(name, row, persistent=False)
        if frozen_norm:
            freeze_norms(network)
        if layers := batch_statistics(network):
            raise ValueError(
                f"{', '.join(layers[:3])}{' ...' if len(layers) > 3 else ''} of the encoder "
                "computes statistics over the tiles of a call, which are only a part of the slide: "
                "set model.frozen_norm=true, or use an encoder with GroupNorm"
            )

    mean: Tensor
    std: Tensor

    def train(self, mode: bool = True) -> TileEncoder:
        """Set the training mode, except for frozen norms."""
        super().train(mode)
        if self._frozen:
            freeze_norms(self.network)
        return self

    def forward(self, bag: Tensor) -> Tensor:
        """Compute the features of the tiles of a bag, which may be split over ranks.

        Raises:
            ValueError: the bag has tiles of another shape.
        """
        if bag.dim() != 3 or bag.shape[1] != prod(self.tile):
            raise ValueError(
                f"a bag of tiles {self.tile} is (1, {prod(self.tile)}, tiles), got "
                f"{tuple(bag.shape)}"
            )
        if not isinstance(bag, SpatialTensor):
            return self._features(bag, 0)
        layout, mesh = bag.spatial_layout, bag.mesh
        (start, _), *_ = layout.boxes[mesh.part].spatial
        return from_tile(self._features(bag._tile, start), layout, mesh)

    def _features(self, bag: Tensor, start: int) -> Tensor:
        """Features of the local tiles, the first of which is number `start` of the bag."""
        count = bag.shape[2]
        tiles = bag.transpose(1, 2).reshape(len(bag) * count, *self.tile)
        # a separate scope, so that draws of the aggregator do not depend on the local tiles
        with scope("encoder of tiles"):
            features = self._of_tiles(tiles, start) if count else self._of_none(tiles)
        return features.reshape(len(bag), count, features.shape[1]).transpose(1, 2)

    def _of_tiles(self, tiles: Tensor, start: int) -> Tensor:
        parts = PartsOfSamples() if thread.stream is not None else None
        in_slices = self._mode == "slices" and not tiles.is_meta  # meta tensors need no memory
        size = self._size if in_slices else len(tiles)
        learns = any(each.requires_grad for each in self.network.parameters())
        again = in_slices and learns and torch.is_grad_enabled()
        features: list[Tensor] = []
        buffers = _buffers_of(self.network)
        for first in range(0, len(tiles), size):
            some = tiles[first : first + size]
            own = range(start + first, start + first + len(some))
            run = partial(self._run, parts=parts, own=own)
            # each slice starts with the same buffers; only the first one updates them
            with _starting_with(buffers) if features else nullcontext():
                features.append(
                    recompute(run, some, modules=[self.network]) if again else run(some)
                )
        return torch.cat(features)

    def _of_none(self, tiles: Tensor) -> Tensor:
        """Features of no tiles, with the width, dtype and graph of those of other ranks."""
        blank = tiles.new_zeros(1, *self.tile)
        return self._run(blank, parts=None, own=range(1))[:0]

    def _run(self, tiles: Tensor, parts: PartsOfSamples | None, own: range) -> Tensor:
        with parts.of(own) if parts is not None else nullcontext():
            features = self.network(self._normalised(tiles))
        if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != len(tiles):
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features)
            raise ValueError(
                f"the encoder must map tiles {tuple(tiles.shape)} to features ({len(tiles)}, D), "
                f"got {shape}; pool and flatten its maps"
            )
        return features

    def _normalised(self, tiles: Tensor) -> Tensor:
        dtype = next((p.dtype for p in self.network.parameters()), self.mean.dtype)
        return (tiles.to(dtype) / self._scale - self.mean.to(dtype)) / self.std.to(dtype)


class EndToEndNetwork(nn.Sequential):
    """An encoder of tiles and an aggregator of their features, trained together as one network.

    Args:
        encoder: tiles (n, C, h, w) to features (n, D).
        aggregator: a bag of features (1, D, tiles) to the output of the slide.
        tile: (C, h, w).
        settings: slice_size, mode, frozen_norm, mean, std and scale, see `TileEncoder`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        aggregator: nn.Module,
        tile: Sequence[int],
        **settings: Any,
    ) -> None:
        parts = {"encoder": TileEncoder(encoder, tile, **settings), "aggregator": aggregator}
        super().__init__(OrderedDict(parts))

    @property
    def attention(self) -> Callable[[Tensor], Tensor] | None:
        """Function from a bag to the attention of its tiles, (1, maps, tiles), if supported."""
        encoder: Any = self.encoder
        attend: Any = getattr(self.aggregator, "attention", None)
        return None if attend is None else lambda bag: attend(encoder(bag))


# --- layers that depend on several tiles, and buffers


def batch_statistics(encoder: nn.Module) -> list[str]:
    """List layers whose outputs or buffers depend on all tiles of a call: BatchNorm in training."""
    return [
        f"{name or 'encoder'} ({type(layer).__name__})"
        for name, layer in encoder.named_modules()
        if (isinstance(layer, BatchNormBase) and (layer.training or layer.running_mean is None))
        or (isinstance(layer, InstanceNormBase) and layer.training and layer.track_running_stats)
    ]


def freeze_norms(encoder: nn.Module) -> None:
    """Set BatchNorm and InstanceNorm layers to evaluation mode, with their running statistics."""
    for layer in encoder.modules():
        if isinstance(layer, BatchNormBase | InstanceNormBase):
            layer.eval()


Buffers = list[tuple[nn.Module, str, Tensor]]


def _buffers_of(module: nn.Module) -> Buffers:
    """Copies of the buffers of a module, with their owners and names."""
    return [
        (owner, name, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


@contextmanager
def _starting_with(buffers: Buffers) -> Iterator[None]:
    """Replace the buffers by copies of earlier ones within the context."""
    real = [(owner, name, owner._buffers[name]) for owner, name, _ in buffers]
    for owner, name, start in buffers:
        owner._buffers[name] = start.clone()
    try:
        yield
    finally:
        for owner, name, buffer in real:
            owner._buffers[name] = buffer
