"""Encoder and aggregator trained together on all tiles of a slide, divided over ranks and time.

Every rank encodes its own range of tiles. Their features are one split signal (1, D, tiles), of
which the aggregator makes the output of the slide as of any other: by split reductions, softmax
and ring attention. Nothing is gathered. The objective is the mean over the ranks of each rank's
loss, so that gradients of features are those of the sum, and parameters' are averaged over all
ranks of the mesh.
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
from spatialdl.comm.agreement import is_due
from spatialdl.comm.broadcast import broadcast_state
from spatialdl.comm.mesh import Mesh
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.random import keyed
from spatialdl.random.streams import thread
from spatialdl.spatial.replicas import BatchNormOver
from spatialdl.spatial.tensor import SpatialTensor, from_tile

MODES = ("slices", "graph")
SHOWN_AFTER = 2.0
"""Seconds of a step, after which rank 0 shows its progress."""


class EndToEnd(nn.Module):
    """An encoder of tiles and an aggregator of bags, which a step trains on a whole slide.

    Losses, gradients and weights are those of one process that runs
    ``aggregator(encoder(tiles).T[None])`` and keeps the whole graph. With ``mode="graph"`` this
    does, too. With ``"slices"`` the encoder runs without a graph first, a slice after the other;
    forward and backward of the aggregator give the gradients of the features; with these the
    encoder runs again, slice by slice, with the same random numbers. Memory then does not grow with
    the tiles, apart from their features and gradients of features (2 * D numbers a tile).

    Weights and buffers become those of rank 0 on all ranks. Parameters are those of both networks,
    for any optimizer; `spatialdl.clip_grad_norm_` and ``state_dict`` take it as a network.

    Random numbers are keyed by the number of the tile in its slide, a running number of steps, and
    the replica; within `spatialdl.random.keyed` by what that says.

    Args:
        encoder: tiles (n, C, h, w) to features (n, D). What it makes of a tile must not depend on
            others: BatchNorm in training is refused in slices; in a graph it sees all tiles.
        aggregator: a bag of features (1, D, tiles) to the output of the slide.
        mesh: ``init_mesh(grid=(ranks,), data=...)``: each replica may have a slide of its own.
        slice_size: tiles that the encoder is given at once, if in slices.
        mode: "slices" or "graph".
        frozen_norm: BatchNorm of the encoder stays in evaluation, also after ``train()``.
        progress: rank 0 shows a bar of steps that take longer than 2 seconds.

    Raises:
        ValueError: if a setting does not fit, or ranks have other networks.
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
                "tiles are divided over a grid of one number, init_mesh(grid=(ranks,)), got grid="
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
        """As of any module, but for norms that are frozen."""
        super().train(mode)
        if self._frozen:
            freeze_norms(self.encoder)
        return self

    @torch.no_grad()
    def forward(self, tiles: Tensor | ReadTiles, count: int | None = None) -> Any:
        """The output for a slide, without a graph; arguments as of `step`, which trains."""
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
        """Forward and backward of one slide; gradients are added to those there are, and averaged.

        Every rank of the mesh must call it. For several slides between two steps of the optimizer
        call it several times; only the last one need average. Forward runs under the autocast
        that is around it, both times, backward outside.

        Args:
            tiles: this rank's own range of the slide's tiles, (n, C, h, w), in the order of the
                ranks and of any length, none included; or a function that reads tiles
                ``(start, stop)`` of the slide, of which each rank reads its range
                ``mesh.box((count,))``, twice in slices, while the slice before is computed.
            target: for the criterion, the same on all ranks of a grid.
            criterion: the loss of the aggregator's output and the target, a scalar; may scale it.
            count: tiles of the whole slide; needed with a function.
            average: False leaves gradients to be averaged by a later step.

        Returns:
            The loss of this replica's slide, detached.

        Raises:
            UnsupportedSpatialOp: if the encoder has BatchNorm in training, and runs in slices.
            ValueError: on all ranks, if they bring tiles that do not fit together.
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
                raise ValueError("the criterion must give a scalar loss of the slide's output")
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
        """With its graph; a rank without tiles takes part where statistics are of all ranks."""
        across = bool(batch_statistics(self.encoder)) and self._mesh.parts > 1
        if not (len(own.own) or across):
            return None
        with BatchNormOver(self._mesh.grid_comm) if across else nullcontext():
            return encoding.whole()

    def _bag(
        self, encoding: BagEncoding, own: OwnTiles, features: Tensor | None
    ) -> tuple[Tensor, SpatialTensor]:
        """The features of this rank, (n, D), and those of all as one signal (1, D, tiles)."""
        found = None
        if features is not None and len(features):
            shape = features.shape[1], features.dtype, features.requires_grad, encoding.drawn
            found = _Found(self._mesh.part, *shape, encoding.written)
        everybody = self._mesh.grid_comm.allgather(found)
        known = [one for one in everybody if one is not None]
        first = known[0]
        if any(one[1:] != first[1:] for one in known):
            raise ValueError(
                "ranks have other features of one slide: "
                + "; ".join(one.describe() for one in known)
                + ": the encoder must do the same with all tiles"
            )
        encoding.finish(first.drawn)
        if len(known) < len(everybody) and first.written:
            self._share_buffers(first)
        if features is None:
            features = torch.empty(0, first.width, dtype=first.dtype, device=self._device())
        if torch.is_grad_enabled() and not features.requires_grad:
            features.requires_grad_(first.has_graph or self._trains_encoder())
        tile = features.t().unsqueeze(0).contiguous()
        if self._mesh.agreement is not None:
            self._mesh.agreement.tiles(tile.detach(), own.layout.size)
        return features, from_tile(tile, own.layout, self._mesh)

    def _share_buffers(self, found: _Found) -> None:
        """Ranks without tiles get the buffers that the encoder of another one has written."""
        buffers = dict(self.encoder.named_buffers())
        has_them = self._mesh.part == found.part
        values = {name: buffers[name].cpu() for name in found.written} if has_them else None
        for name, value in self._mesh.grid_comm.allgather(values)[found.part].items():
            buffers[name].copy_(value)

    def _trains_encoder(self) -> bool:
        return any(parameter.requires_grad for parameter in self.encoder.parameters())

    def _check_norms(self, mode: str) -> None:
        found = batch_statistics(self.encoder)
        if not found or (mode == "graph" and self._mesh.data == 1 and not self._instance(found)):
            return
        raise UnsupportedSpatialOp(
            f"{', '.join(found[:3])}{' ...' if len(found) > 3 else ''} of the encoder takes "
            f"statistics over the tiles of a call, which here are a part of the slides: freeze it "
            'by frozen_norm=True or eval(); or, on a mesh with data=1, take mode="graph", where '
            "BatchNorm sees all tiles of the slide"
        )

    def _instance(self, found: list[str]) -> bool:
        return self._mesh.parts > 1 and any("InstanceNorm" in name for name in found)

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


class _Found(NamedTuple):
    """What the encoder of a rank has made of its tiles."""

    part: int
    width: int
    dtype: torch.dtype
    has_graph: bool
    drawn: int | None
    written: list[str]

    def describe(self) -> str:
        return (
            f"part {self.part} of the grid (n, {self.width}) of {self.dtype}, after "
            f"{self.drawn} calls that draw random numbers, and changed buffers {self.written}"
        )
