"""An encoder over the tiles of a rank: slice after slice without a graph, and once more with one.

The second run is on the same slices, draws the same random numbers, and leaves buffers alone, as in
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (https://arxiv.org/abs/1604.06174),
section 3, with slices of the batch in place of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from spatialdl.bags.tiles import OwnTiles
from spatialdl.random.drawing import PartsOfSamples

Progress = Callable[[int], object]
TOLERANCE = 1e-3
"""By how much of the largest feature those of the second run may differ where they are compared."""


class BagEncoding:
    """The features of one slide's tiles that this rank has; to be made within `keyed`.

    Args:
        encoder: (n, C, h, w) to (n, D).
        tiles: of this rank.
        size: tiles of a slice.
        progress: is given the number of tiles of each slice that is done.

    Attributes:
        drawn: calls that drew random numbers, the same for each slice; None without tiles.
    """

    def __init__(self, encoder: nn.Module, tiles: OwnTiles, size: int, progress: Progress) -> None:
        self._encoder, self._tiles, self._size, self._progress = encoder, tiles, size, progress
        self._numbers = PartsOfSamples()
        self._buffers = _Buffers(encoder)
        self._generators: list[_Generators] = []
        self.drawn: int | None = None

    @property
    def written(self) -> list[str]:
        """Names of the buffers that the encoder has changed."""
        return self._buffers.written()

    def finish(self, drawn: int | None) -> None:
        """What is drawn from now on comes after so many calls, also on ranks without tiles."""
        self._numbers.finish(drawn or 0)

    def whole(self) -> Tensor:
        """Features of all own tiles by one call, which keeps its graph."""
        with self._numbers.of(self._tiles.own):
            features = self._features(self._tiles.all(), len(self._tiles.own))
        self.drawn = self._numbers.drawn
        self._progress(len(features))
        return features

    @torch.no_grad()
    def first(self) -> Tensor | None:
        """Features of all own tiles without a graph, (n, D); None without tiles."""
        found: list[Tensor] = []
        counts: set[int] = set()
        for part, tiles in self._tiles.slices(self._size):
            self._generators.append(_Generators(tiles.device))
            # each slice begins with the same buffers, and they are updated once
            with self._buffers.again() if found else nullcontext(), self._numbers.of(part):
                found.append(self._features(tiles, len(part)))
            counts.add(self._numbers.drawn)
            self._progress(len(part))
        if len(counts) > 1:
            raise ValueError(
                f"the encoder draws random numbers {sorted(counts)} times for slices of one slide: "
                'it must not depend on the tiles how often; take mode="graph"'
            )
        self.drawn = counts.pop() if counts else None
        torch.clear_autocast_cache()  # of weights, cast without a graph
        return torch.cat(found) if found else None

    def second(self, first: Tensor, grad: Tensor, compare: bool, no_autocast: Any) -> None:
        """Run again, with a graph, and add the gradients of features to those of parameters.

        Args:
            first: features of the first run.
            grad: of the loss with regard to them.
            compare: whether features of both runs are compared.
            no_autocast: makes a context for backward.

        Raises:
            RuntimeError: if they are others.
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
    """The features (count, D) of tiles.

    Raises:
        ValueError: the encoder gives something else.
    """
    features = encoder(tiles)
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != count:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features)
        raise ValueError(
            f"the encoder must map tiles {tuple(tiles.shape)} to features ({count}, D), got "
            f"{shape}: pool and flatten its maps"
        )
    return features


def _check_same(first: Tensor, second: Tensor, part: range) -> None:
    difference = (first - second).abs().max()
    if not bool(difference <= TOLERANCE * first.abs().max()):
        raise RuntimeError(
            "the second run of the encoder gives other features for tiles "
            f"{part.start} to {part.stop - 1}, by up to {float(difference):.3g}: what reads tiles "
            "must give the same ones both times (augment by the number of the tile), and the "
            "encoder must draw random numbers by PyTorch only"
        )


# --- what both runs begin with


class _Buffers:
    """The buffers of a module as they are now, for runs that must not change the real ones."""

    def __init__(self, module: nn.Module) -> None:
        self._start = [
            (f"{path}.{name}".lstrip("."), owner, name, buffer, buffer._version, buffer.clone())
            for path, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def written(self) -> list[str]:
        """Those that have been changed since, by their names in the module."""
        return [
            path
            for path, owner, name, buffer, version, _ in self._start
            if owner._buffers.get(name) is not buffer or buffer._version != version
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it the module has copies of the buffers as they were."""
        real = [(owner, name, owner._buffers[name]) for _, owner, name, *_ in self._start]
        for _, owner, name, *_, start in self._start:
            owner._buffers[name] = start.clone()
        try:
            yield
        finally:
            for owner, name, buffer in real:
                owner._buffers[name] = buffer


class _Generators:
    """PyTorch's own generators as they are now: of what is drawn from them all the same."""

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


# --- what sees more than one tile


def batch_statistics(encoder: nn.Module) -> list[str]:
    """Layers whose outputs or buffers come from all tiles of a call: BatchNorm in training."""
    return [
        f"{name or 'encoder'} ({type(layer).__name__})"
        for name, layer in encoder.named_modules()
        if (isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None))
        or (isinstance(layer, _InstanceNorm) and layer.training and layer.track_running_stats)
    ]


def freeze_norms(encoder: nn.Module) -> None:
    """BatchNorm in evaluation: with the running statistics that it has."""
    for layer in encoder.modules():
        if isinstance(layer, _BatchNorm | _InstanceNorm):
            layer.eval()


def without_autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes a context for backward, whose operations have the types of forward."""
    return lambda: torch.autocast(device.type, enabled=False)
