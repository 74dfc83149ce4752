"""Checkpointed encoder of the local tiles: forward by slices without a graph, recomputed with one.

The recomputation runs on the same slices, draws the same random numbers, and does not update
buffers, as in Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016
(https://arxiv.org/abs/1604.06174), section 3, with slices of the batch instead of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.bags.tiles import OwnTiles
from spatialdl.random.drawing import PartsOfSamples
from spatialdl.torch_internals import BatchNormBase, InstanceNormBase

Progress = Callable[[int], object]
TOLERANCE = 1e-3
"""Largest accepted difference of recomputed features, relative to the largest feature."""


class BagEncoding:
    """Features of the local tiles of one slide; create it within `keyed`.

    Args:
        encoder: (n, C, h, w) to (n, D).
        tiles: of this rank.
        size: tiles per slice.
        progress: called with the number of tiles of each finished slice.

    Attributes:
        drawn: number of calls that draw random numbers, equal for all slices; None without tiles.
    """

    def __init__(self, encoder: nn.Module, tiles: OwnTiles, size: int, progress: Progress) -> None:
        self._encoder, self._tiles, self._size, self._progress = encoder, tiles, size, progress
        self._numbers = PartsOfSamples()
        self._buffers = _Buffers(encoder)
        self._generators: list[_Generators] = []
        self.drawn: int | None = None

    @property
    def written(self) -> list[str]:
        """Names of the buffers that the encoder has modified."""
        return self._buffers.written()

    def finish(self, drawn: int | None) -> None:
        """Continue random numbers after `drawn` calls, on ranks without tiles, too."""
        self._numbers.finish(drawn or 0)

    def whole(self) -> Tensor:
        """Encode all local tiles in one call, with its graph."""
        with self._numbers.of(self._tiles.own):
            features = self._features(self._tiles.all(), len(self._tiles.own))
        self.drawn = self._numbers.drawn
        self._progress(len(features))
        return features

    @torch.no_grad()
    def first(self) -> Tensor | None:
        """Encode all local tiles by slices without a graph, (n, D); None without tiles."""
        features: list[Tensor] = []
        counts: set[int] = set()
        for part, tiles in self._tiles.slices(self._size):
            self._generators.append(_Generators(tiles.device))
            # each slice starts with the same buffers; only the first one updates them
            with self._buffers.again() if features else nullcontext(), self._numbers.of(part):
                features.append(self._features(tiles, len(part)))
            counts.add(self._numbers.drawn)
            self._progress(len(part))
        if len(counts) > 1:
            raise ValueError(
                f"the encoder draws random numbers {sorted(counts)} times for slices of one slide: "
                'the number must not depend on the tiles; set mode="graph"'
            )
        self.drawn = counts.pop() if counts else None
        torch.clear_autocast_cache()  # its casts of weights have no graph
        return torch.cat(features) if features else None

    def second(self, first: Tensor, grad: Tensor, compare: bool, no_autocast: Any) -> None:
        """Recompute features by slices with a graph, and backpropagate their gradients.

        Args:
            first: features of the first run.
            grad: gradient of the loss with respect to these features.
            compare: compare the features of both runs.
            no_autocast: creates the context for backward.

        Raises:
            RuntimeError: the features differ.
        """
        generators = iter(self._generators)
        for part, tiles in self._tiles.slices(self._size):
            rows = slice(part.start - self._tiles.own.start, part.stop - self._tiles.own.start)
            with self._buffers.again(), self._numbers.of(part), next(generators).again():
                features = self._features(tiles, len(part))
                if compare:
                    _check_same(first[rows], features.detach(), part)
                with no_autocast():
                    features.backward(grad[rows])  # type: ignore[no-untyped-call]
            self._progress(len(part))

    def _features(self, tiles: Tensor, count: int) -> Tensor:
        return encoded(self._encoder, tiles, count)


def encoded(encoder: nn.Module, tiles: Tensor, count: int) -> Tensor:
    """Run the encoder and check that it returns features (count, D).

    Raises:
        ValueError: it returns anything else.
    """
    features = encoder(tiles)
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != count:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features)
        raise ValueError(
            f"the encoder must map tiles {tuple(tiles.shape)} to features ({count}, D), got "
            f"{shape}; pool and flatten its maps"
        )
    return features


def _check_same(first: Tensor, second: Tensor, part: range) -> None:
    difference = (first - second).abs().max()
    if not bool(difference <= TOLERANCE * first.abs().max()):
        raise RuntimeError(
            "recomputed features of the encoder differ from those of the first run for tiles "
            f"{part.start} to {part.stop - 1}, by up to {float(difference):.3g}: the function that "
            "reads tiles must return the same tiles both times (key augmentation by the number of "
            "the tile), and the encoder must draw random numbers only with PyTorch"
        )


# --- state that both runs start from


class _Buffers:
    """Snapshot of the buffers of a module, for runs that must not modify the real ones."""

    def __init__(self, module: nn.Module) -> None:
        self._start = [
            (f"{path}.{name}".lstrip("."), owner, name, buffer, buffer._version, buffer.clone())
            for path, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def written(self) -> list[str]:
        """Return the names of the buffers modified since the snapshot."""
        return [
            path
            for path, owner, name, buffer, version, _ in self._start
            if owner._buffers.get(name) is not buffer or buffer._version != version
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Replace the buffers of the module by copies of the snapshot within the context."""
        real = [(owner, name, owner._buffers[name]) for _, owner, name, *_ in self._start]
        for _, owner, name, *_, start in self._start:
            owner._buffers[name] = start.clone()
        try:
            yield
        finally:
            for owner, name, buffer in real:
                owner._buffers[name] = buffer


class _Generators:
    """Snapshot of PyTorch's default generators, for draws that are not keyed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._own = None if device.type == "cpu" else self._of_device().get_rng_state(device)

    def _of_device(self) -> Any:
        return torch.get_device_module(self._device)

    @contextmanager
    def again(self) -> Iterator[None]:
        around = _Generators(self._device)
        self._set()
        try:
            yield
        finally:
            around._set()

    def _set(self) -> None:
        torch.set_rng_state(self._host)
        if self._own is not None:
            self._of_device().set_rng_state(self._own, self._device)


# --- layers that depend on several tiles


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


def without_autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory of contexts for backward, which uses the dtypes of forward."""
    return lambda: torch.autocast(device.type, enabled=False)
