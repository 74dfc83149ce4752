"""Tiles read ahead by threads, and encoded in batches across slides.

Decoders and resampling release the GIL, so threads suffice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.inference.features.encoders.encoder import Encoder
from spatialdl.inference.features.encoders.preprocessing import Preprocess
from spatialdl.inference.features.sources import SlideTiles, TilePiece, Tiles
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.batch.report import TilingReport
from spatialdl.training.optimization.precision import Precision

Opened = SlideTiles | TilingReport
"""A slide to read, or the report of a slide without tiles to read."""


@dataclass(frozen=True)
class Read:
    """A piece of a slide, or the error of reading it; neither marks the end of the slide."""

    bag: SlideTiles
    piece: TilePiece | None = None
    problem: Exception | None = None


class ReadAhead:
    """A reader that prefetches slide after slide.

    ::

        with ReadAhead(opened, threads=4) as reading:
            for one in reading:  # a `TilingReport`, or a `Read`

    Args:
        opened: returns the next slide, None at the end; called by one thread at a time.
        threads: number of reading threads.
    """

    def __init__(self, opened: Callable[[], Opened | None], threads: int) -> None:
        self._opened, self._room = opened, 2 * threads + 2
        self._pool = ThreadPoolExecutor(threads, "reading")
        self._opening = self._pool.submit(opened)
        self._inside = False  # whether the slide that was opened last has more pieces

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the threads; pending reads are cancelled."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[TilingReport | Read]:
        """Yield results in order."""
        submitted, ahead = self._submit(), deque[tuple[Opened, Future[TilePiece] | None]]()
        while True:
            # never wait for a slide to be opened while tiles are there
            while len(ahead) < self._room and (self._inside or self._opening.done() or not ahead):
                one = next(submitted, None)
                if one is None:
                    break
                ahead.append(one)
            if not ahead:
                return
            found, future = ahead.popleft()
            if isinstance(found, TilingReport):
                yield found
            elif future is None:
                yield Read(found)
            else:
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield Read(found, None if error else future.result(), error)

    def _submit(self) -> Iterator[tuple[Opened, Future[TilePiece] | None]]:
        """Start to open the next slide, and to read one piece after the other of this one."""
        while (found := self._opening.result()) is not None:
            self._opening = self._pool.submit(self._opened)
            if not isinstance(found, TilingReport):
                self._inside = True
                for first, last in found.pieces():
                    yield found, self._pool.submit(found.read, first, last)
                self._inside = False
            yield found, None


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
        self._queued: deque[tuple[Filling, Tiles]] = deque()
        self._in_flight: deque[tuple[Tensor, Any, list[tuple[Filling, int]]]] = deque()
        self._slides: dict[int, Filling] = {}  # in order, by the identity of their tiles
        self.seconds = 0.0

    def add(self, bag: SlideTiles, piece: TilePiece) -> Iterator[Filling]:
        """Add tiles of a slide; yields completed slides."""
        filling = self._filling(bag)
        filling.parts.append(piece.part)
        if len(piece.tiles) and filling.problem is None:
            filling.rows += len(piece.tiles)
            self._queued.append((filling, piece.tiles))
        while self._count() >= self._batch_size:
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
        while count := self._count():
            self._encode(min(count, self._batch_size))
            yield from self._done()
        while self._in_flight:
            self._collect()
        yield from self._done()

    def _count(self) -> int:
        return sum(len(tiles) for _, tiles in self._queued)

    def _filling(self, bag: SlideTiles) -> Filling:
        return self._slides.setdefault(id(bag), Filling(bag))

    def _done(self) -> Iterator[Filling]:
        while self._slides and (first := next(iter(self._slides.values()))).is_done:
            del self._slides[id(first.bag)]
            yield first

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
                self._queued.popleft()
            left -= len(images[-1])
        return np.concatenate(images), owners

    def _collect(self) -> None:
        found, event, owners = self._in_flight.popleft()
        if event is not None:
            event.synchronize()
        features, first = found.numpy(), 0
        for filling, count in owners:
            filling.features.append(features[first : first + count].copy())
            first += count
