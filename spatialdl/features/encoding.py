"""Batches of tiles of whatever slides through an encoder, and the features back to their slides."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.features.encoders.encoder import Encoder
from spatialdl.features.encoders.preprocessing import Preprocess
from spatialdl.features.sources import SlideTiles, TilePiece, Tiles
from spatialdl.slides.batch.record import PartRecord
from spatialdl.training.optimization.precision import Precision


@dataclass
class Filling:
    """A slide whose features come in.

    Attributes:
        rows: tiles that were given to the encoder.
        features: of its tiles, in order, float (tiles, width) each.
        is_read: no more tiles of it will come.
        problem: why it cannot be used, if it cannot.
    """

    bag: SlideTiles
    parts: list[PartRecord] = field(default_factory=list)
    rows: int = 0
    features: list[npt.NDArray[Any]] = field(default_factory=list)
    is_read: bool = False
    problem: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether all of its features are there."""
        return self.is_read and sum(map(len, self.features)) == self.rows


class DeviceEncoder:
    """An encoder at work on one device.

    On an accelerator a batch is computed while the features of the one before are fetched.

    Args:
        encoder: as made, on the CPU.
        device: where it computes.
        precision: in which numbers.
        batch_size: tiles at a time.

    Attributes:
        seconds: that the encoder took.
    """

    def __init__(
        self, encoder: Encoder, device: torch.device, precision: Precision, batch_size: int
    ) -> None:
        self._network = encoder.network.to(device, precision.dtype)
        self._preprocess = Preprocess(encoder.preprocessing, precision.dtype).to(device)
        self._device, self._precision, self._batch_size = device, precision, batch_size
        self._waiting: list[tuple[Filling, Tiles]] = []
        self._count = 0
        self._underway: deque[tuple[Tensor, Any, list[tuple[Filling, int]]]] = deque()
        self._slides: deque[Filling] = deque()
        self._of: dict[int, Filling] = {}
        self.seconds = 0.0

    def add(self, bag: SlideTiles, piece: TilePiece) -> Iterator[Filling]:
        """Take tiles of a slide; gives slides that are done."""
        filling = self._filling(bag)
        filling.parts.append(piece.part)
        if len(piece.tiles) and filling.problem is None:
            filling.rows += len(piece.tiles)
            self._waiting.append((filling, piece.tiles))
            self._count += len(piece.tiles)
        while self._count >= self._batch_size:
            self._encode(self._batch_size)
            yield from self._done()  # written before the next batch

    def fail(self, bag: SlideTiles, problem: Exception) -> None:
        """Note that a slide cannot be used."""
        self._filling(bag).problem = problem

    def end(self, bag: SlideTiles) -> Iterator[Filling]:
        """Note that all tiles of a slide were given."""
        self._filling(bag).is_read = True
        yield from self._done()

    def flush(self) -> Iterator[Filling]:
        """Encode what is left."""
        while self._count:
            self._encode(min(self._count, self._batch_size))
            yield from self._done()
        while self._underway:
            self._collect()
        yield from self._done()

    def _filling(self, bag: SlideTiles) -> Filling:
        found = self._of.get(id(bag))
        if found is None:
            found = self._of[id(bag)] = Filling(bag)
            self._slides.append(found)
        return found

    def _done(self) -> Iterator[Filling]:
        while self._slides and self._slides[0].is_done:
            found = self._slides.popleft()
            del self._of[id(found.bag)]
            yield found

    def _encode(self, count: int) -> None:
        started = time.monotonic()
        taken, owners = self._take(count)
        tiles = torch.from_numpy(taken)
        mixed = self._precision.mixed
        kind = self._device.type
        if kind != "cpu":
            tiles = tiles.pin_memory().to(self._device, non_blocking=True)
        with (
            torch.inference_mode(),
            nullcontext() if mixed is None else torch.autocast(kind, mixed),
        ):
            found = self._network(self._preprocess(tiles)).to(self._precision.dtype)
        event = None
        if kind != "cpu":
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            found = host.copy_(found, non_blocking=True)
            event = torch.Event(kind)
            event.record()
        self._underway.append((found, event, owners))
        while len(self._underway) > (kind != "cpu"):
            self._collect()
        self.seconds += time.monotonic() - started

    def _take(self, count: int) -> tuple[Tiles, list[tuple[Filling, int]]]:
        """The first tiles that wait, and whose they are."""
        images, owners, left = [], [], count
        while left:
            filling, tiles = self._waiting[0]
            images.append(tiles[:left])
            owners.append((filling, len(images[-1])))
            if len(tiles) > left:
                self._waiting[0] = filling, tiles[left:]
            else:
                self._waiting.pop(0)
            left -= len(images[-1])
        self._count -= count
        return np.concatenate(images), owners

    def _collect(self) -> None:
        found, event, owners = self._underway.popleft()
        if event is not None:
            event.synchronize()
        features, first = found.numpy(), 0
        for filling, count in owners:
            filling.features.append(features[first : first + count].copy())
            first += count
