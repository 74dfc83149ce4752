"""Batched encoding of tiles across slides, with features returned per slide."""

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
    """A slide with its features so far.

    Attributes:
        rows: tiles passed to the encoder.
        features: features of its tiles in order, each float (tiles, width).
        is_read: whether all tiles were passed.
        problem: why the slide failed, if it did.
    """

    bag: SlideTiles
    parts: list[PartRecord] = field(default_factory=list)
    rows: int = 0
    features: list[npt.NDArray[Any]] = field(default_factory=list)
    is_read: bool = False
    problem: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether its features are complete."""
        return self.is_read and sum(map(len, self.features)) == self.rows


class DeviceEncoder:
    """An encoder on one device.

    On an accelerator, computing a batch overlaps copying the features of the previous one.

    Args:
        encoder: the encoder, on the CPU.
        device: device of the computation.
        precision: precision of the computation.
        batch_size: tiles per batch.

    Attributes:
        seconds: time spent encoding.
    """

    def __init__(
        self, encoder: Encoder, device: torch.device, precision: Precision, batch_size: int
    ) -> None:
        self._network = encoder.network.to(device, precision.dtype)
        self._preprocess = Preprocess(encoder.preprocessing, precision.dtype).to(device)
        self._device, self._precision, self._batch_size = device, precision, batch_size
        self._queued: list[tuple[Filling, Tiles]] = []
        self._count = 0
        self._in_flight: deque[tuple[Tensor, Any, list[tuple[Filling, int]]]] = deque()
        self._slides: deque[Filling] = deque()
        self._by_bag: dict[int, Filling] = {}
        self.seconds = 0.0

    def add(self, bag: SlideTiles, piece: TilePiece) -> Iterator[Filling]:
        """Add tiles of a slide; yields completed slides."""
        filling = self._filling(bag)
        filling.parts.append(piece.part)
        if len(piece.tiles) and filling.problem is None:
            filling.rows += len(piece.tiles)
            self._queued.append((filling, piece.tiles))
            self._count += len(piece.tiles)
        while self._count >= self._batch_size:
            self._encode(self._batch_size)
            yield from self._done()  # lets the caller write them before the next batch

    def fail(self, bag: SlideTiles, problem: Exception) -> None:
        """Mark a slide as failed."""
        self._filling(bag).problem = problem

    def end(self, bag: SlideTiles) -> Iterator[Filling]:
        """Mark a slide as completely read; yields completed slides."""
        self._filling(bag).is_read = True
        yield from self._done()

    def flush(self) -> Iterator[Filling]:
        """Encode the remaining tiles; yields completed slides."""
        while self._count:
            self._encode(min(self._count, self._batch_size))
            yield from self._done()
        while self._in_flight:
            self._collect()
        yield from self._done()

    def _filling(self, bag: SlideTiles) -> Filling:
        found = self._by_bag.get(id(bag))
        if found is None:
            found = self._by_bag[id(bag)] = Filling(bag)
            self._slides.append(found)
        return found

    def _done(self) -> Iterator[Filling]:
        while self._slides and self._slides[0].is_done:
            found = self._slides.popleft()
            del self._by_bag[id(found.bag)]
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
        self._in_flight.append((found, event, owners))
        while len(self._in_flight) > (kind != "cpu"):
            self._collect()
        self.seconds += time.monotonic() - started

    def _take(self, count: int) -> tuple[Tiles, list[tuple[Filling, int]]]:
        """Dequeue `count` tiles, and the slides that own them."""
        images, owners, left = [], [], count
        while left:
            filling, tiles = self._queued[0]
            images.append(tiles[:left])
            owners.append((filling, len(images[-1])))
            if len(tiles) > left:
                self._queued[0] = filling, tiles[left:]
            else:
                self._queued.pop(0)
            left -= len(images[-1])
        self._count -= count
        return np.concatenate(images), owners

    def _collect(self) -> None:
        found, event, owners = self._in_flight.popleft()
        if event is not None:
            event.synchronize()
        features, first = found.numpy(), 0
        for filling, count in owners:
            filling.features.append(features[first : first + count].copy())
            first += count
