"""End-to-end training of encoder and aggregator on all tiles of a slide, split over ranks and time.

Every rank encodes its own range of tiles. Their features are one split signal (1, D, tiles), which
the aggregator processes like any other: by split reductions, softmax and ring attention. Nothing
is gathered. The objective is the mean over ranks of each rank's loss, so that gradients of features
are those of the sum, and gradients of parameters are averaged over all ranks of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from spatialdl.bags.encoding import (
    BagEncoding,
    batch_statistics,
    freeze_norms,
    without_autocast,
)
from spatialdl.bags.tiles import OwnTiles, ReadTiles
from spatialdl.channels.parallel import average_gradients
from spatialdl.comm.agreement import broadcast_state, is_due
from spatialdl.comm.mesh import Mesh
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.random import keyed
from spatialdl.random.streams import thread
from spatialdl.spatial.replicas import BatchNormOver
from spatialdl.spatial.tensor import SpatialTensor, from_tile

MODES = ("slices", "graph")
SHOWN_AFTER = 2.0
"""Seconds of a step after which rank 0 shows a progress bar."""


class EndToEnd(nn.Module):
    """An encoder of tiles and an aggregator of bags, trained on whole slides.

    Losses, gradients and weights are those of a single process that runs
    ``aggregator(encoder(tiles).T[None])`` and keeps the whole graph, as ``mode="graph"`` does. With
    ``"slices"`` the encoder first runs slice by slice without a graph; forward and backward of the
    aggregator compute the gradients of the features; then the encoder recomputes each slice with
    the same random numbers and backpropagates. Memory then does not grow with the number of tiles,
    except for features and their gradients (2 * D numbers per tile).

    Weights and buffers are broadcast from rank 0. Parameters are those of both networks, for any
    optimizer; `spatialdl.clip_grad_norm_` and ``state_dict`` work as for any module.

    Random numbers are keyed by the index of the tile in its slide, the number of steps, and the
    replica; within `spatialdl.random.keyed` by its keys.

    Args:
        encoder: tiles (n, C, h, w) to features (n, D). Features of a tile must not depend on other
            tiles: BatchNorm in training is refused with slices; with a graph it uses all tiles.
        aggregator: a bag of features (1, D, tiles) to the output of the slide.
        mesh: ``init_mesh(grid=(ranks,), data=...)``: each replica may have a different slide.
        slice_size: tiles per call of the encoder, with slices.
        mode: "slices" or "graph".
        frozen_norm: keep BatchNorm of the encoder in evaluation mode, also after ``train()``.
        progress: rank 0 shows a progress bar for steps longer than 2 seconds.

    Raises:
        ValueError: a setting is invalid, or the networks differ across ranks.
    """

    def __init__(
        self,
        encoder: nn.Module,
        aggregator: nn.Module,
        mesh: Mesh,
        slice_size: int = 32,
        mode: str = "slices",
        frozen_norm: bool = False,
        progress: bool = True,
    ) -> None:
        super().__init__()
        if len(mesh.grid) != 1 or mesh.tensor > 1:
            raise ValueError(
                "tiles are split over a grid with one axis, init_mesh(grid=(ranks,)), got grid="
                f"{mesh.grid}, tensor={mesh.tensor}"
            )
        if slice_size < 1 or mode not in MODES:
            raise ValueError(
                f"slice_size must be at least 1 and mode one of {', '.join(MODES)}, got "
                f"slice_size={slice_size}, mode={mode!r}"
            )
        self.encoder, self.aggregator = encoder, aggregator
        self._mesh, self._size, self._mode = mesh, slice_size, mode
        self._frozen, self._progress = frozen_norm, progress
        self._steps = 0
        if frozen_norm:
            freeze_norms(encoder)
        broadcast_state(self, mesh.comm)
        self._seed: int = mesh.comm.bcast(torch.initial_seed())

    def train(self, mode: bool = True) -> EndToEnd:
        """Set the training mode, except for frozen norms."""
        super().train(mode)
        if self._frozen:
            freeze_norms(self.encoder)
        return self

    @torch.no_grad()
    def forward(self, tiles: Tensor | ReadTiles, count: int | None = None) -> Any:
        """Compute the output for a slide without a graph; arguments as in `step`, which trains."""
        with self._drawing(), self._bar(tiles, count, runs=1) as bar:
            own = OwnTiles(tiles, count, self._mesh, self._device())
            encoding = BagEncoding(self.encoder, own, self._size, bar.update)
            self._check_norms("slices")
            return self.aggregator(self._bag(encoding, own, encoding.first())[1])

    def step(
        self,
        tiles: Tensor | ReadTiles,
        target: Any,
        criterion: Callable[[Any, Any], Tensor],
        count: int | None = None,
        average: bool = True,
    ) -> Tensor:
        """Run forward and backward of one slide; accumulates and averages gradients.

        Collective over all ranks of the mesh. To accumulate gradients of several slides, call it
        several times; only the last call must average. Both forward runs use the surrounding
        autocast, backward does not.

        Args:
            tiles: the local range of the slide's tiles, (n, C, h, w), in rank order and of any
                length, 0 included; or a function that reads tiles ``(start, stop)`` of the slide.
                Each rank reads its range ``mesh.box((count,))``, twice with slices, one slice
                ahead of the computation.
            target: for the criterion, the same on all ranks of a grid.
            criterion: maps the aggregator's output and the target to a scalar loss, which it may
                scale.
            count: tiles of the whole slide; required with a function.
            average: False defers the averaging of gradients to a later step.

        Returns:
            The loss of this replica's slide, detached.

        Raises:
            UnsupportedSpatialOp: the encoder has BatchNorm in training, and runs in slices.
            ValueError: on all ranks, if their tiles are inconsistent.
        """
        self._check_norms(self._mode)
        self._steps += 1
        in_slices = self._mode == "slices"
        with self._drawing(), self._bar(tiles, count, runs=1 + in_slices) as bar:
            own = OwnTiles(tiles, count, self._mesh, self._device())
            encoding = BagEncoding(self.encoder, own, self._size, bar.update)
            features = encoding.first() if in_slices else self._whole(encoding, own)
            leaf, bag = self._bag(encoding, own, features)
            loss = criterion(self.aggregator(bag), target)
            if not isinstance(loss, Tensor) or isinstance(loss, SpatialTensor) or loss.dim():
                raise ValueError("the criterion must return a scalar loss of the slide's output")
            no_autocast = without_autocast(leaf.device)
            with no_autocast():
                loss.backward()  # type: ignore[no-untyped-call]
            if in_slices and leaf.grad is not None:
                grad, leaf.grad = leaf.grad, None
                encoding.second(leaf.detach(), grad, is_due(self._steps), no_autocast)
        if average:
            average_gradients(self, self._mesh)
        return loss.detach()

    def _whole(self, encoding: BagEncoding, own: OwnTiles) -> Tensor | None:
        """Features with their graph; ranks without tiles join in statistics over all ranks."""
        across = bool(batch_statistics(self.encoder)) and self._mesh.parts > 1
        if not (len(own.own) or across):
            return None
        with BatchNormOver(self._mesh.grid_comm) if across else nullcontext():
            return encoding.whole()

    def _bag(
        self, encoding: BagEncoding, own: OwnTiles, features: Tensor | None
    ) -> tuple[Tensor, SpatialTensor]:
        """Local features (n, D), and the features of all ranks as one signal (1, D, tiles)."""
        local = None
        if features is not None and len(features):
            shape = features.shape[1], features.dtype, features.requires_grad, encoding.drawn
            local = _Encoded(self._mesh.part, *shape, encoding.written)
        all_ranks = self._mesh.grid_comm.allgather(local)
        known = [each for each in all_ranks if each is not None]
        first = known[0]
        if any(each[1:] != first[1:] for each in known):
            raise ValueError(
                "features of one slide are inconsistent across ranks: "
                + "; ".join(each.describe() for each in known)
                + "; the encoder must treat all tiles alike"
            )
        encoding.finish(first.drawn)
        if len(known) < len(all_ranks) and first.written:
            self._share_buffers(first)
        if features is None:
            features = torch.empty(0, first.width, dtype=first.dtype, device=self._device())
        if torch.is_grad_enabled() and not features.requires_grad:
            features.requires_grad_(first.has_graph or self._trains_encoder())
        tile = features.t().unsqueeze(0).contiguous()
        if self._mesh.agreement is not None:
            self._mesh.agreement.tiles(tile.detach(), own.layout.size)
        return features, from_tile(tile, own.layout, self._mesh)

    def _share_buffers(self, owner: _Encoded) -> None:
        """Copy the buffers modified by the owner's encoder to ranks without tiles."""
        buffers = dict(self.encoder.named_buffers())
        is_owner = self._mesh.part == owner.part
        values = {name: buffers[name].cpu() for name in owner.written} if is_owner else None
        for name, value in self._mesh.grid_comm.allgather(values)[owner.part].items():
            buffers[name].copy_(value)

    def _trains_encoder(self) -> bool:
        return any(parameter.requires_grad for parameter in self.encoder.parameters())

    def _check_norms(self, mode: str) -> None:
        layers = batch_statistics(self.encoder)
        if not layers or (mode == "graph" and self._mesh.data == 1 and not self._instance(layers)):
            return
        raise UnsupportedSpatialOp(
            f"{', '.join(layers[:3])}{' ...' if len(layers) > 3 else ''} of the encoder computes "
            "statistics over the tiles of a call, which are only a part of the slides: freeze it "
            'with frozen_norm=True or eval(); or, on a mesh with data=1, set mode="graph", where '
            "BatchNorm uses all tiles of the slide"
        )

    def _instance(self, layers: list[str]) -> bool:
        return self._mesh.parts > 1 and any("InstanceNorm" in name for name in layers)

    def _device(self) -> torch.device:
        for tensor in chain(self.encoder.parameters(), self.encoder.buffers()):
            return tensor.device
        return torch.device("cpu")

    def _drawing(self) -> AbstractContextManager[object]:
        if thread.stream is not None:
            return nullcontext()
        return keyed(self._seed, self._steps, self._mesh.replica)

    def _bar(self, tiles: Tensor | ReadTiles, count: int | None, runs: int) -> tqdm[None]:
        own = count // self._mesh.parts if count and not isinstance(tiles, Tensor) else None
        if own is None and isinstance(tiles, Tensor) and tiles.dim():
            own = len(tiles)
        is_off = not self._progress or self._mesh.comm.rank != 0
        return tqdm(
            total=own and runs * own,
            desc="tiles of rank 0",
            unit="tile",
            delay=SHOWN_AFTER,
            leave=False,
            disable=is_off,
        )


class _Encoded(NamedTuple):
    """Properties of the local features, which must match across ranks, apart from `part`."""

    part: int
    width: int
    dtype: torch.dtype
    has_graph: bool
    drawn: int | None
    written: list[str]

    def describe(self) -> str:
        return (
            f"part {self.part} of the grid has (n, {self.width}) of {self.dtype}, drew random "
            f"numbers in {self.drawn} calls, and modified buffers {self.written}"
        )
