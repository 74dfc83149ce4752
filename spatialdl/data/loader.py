"""Batches for one rank, in an order that all ranks know without asking, read ahead.

The order of the samples follows from (seed, epoch), so an epoch can be gone on with from any batch.
A batch is on its way to the device while the one before it is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.data.batches import Batch, Batching, BatchReader, Slice
from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.normalisation import Normalisation
from spatialdl.data.views import Views
from spatialdl.data.workers import Workers
from spatialdl.spatial.constants import on

Arrived = Callable[[], list[Slice]]


def sample_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The samples of an epoch, shuffled."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


class Loader:
    """Reads batches ahead of the training, and copies them ahead to the device.

    Args:
        views: the images.
        batching: how batches are cut, and which part is this rank's.
        seed: of the order; None takes samples as they come.
        workers: processes that read; 0 reads in a thread of this one, or, where a data set of a
            user's draws random numbers of the process, between the steps.
        prefetch: batches that each process reads ahead; the thread is one ahead.
        device: where batches go.
        one_batch: whether every epoch is the first batch of the first one.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        views: Views,
        batching: Batching,
        seed: int | None = None,
        *,
        workers: int = 0,
        prefetch: int = 2,
        device: torch.device | None = None,
        one_batch: bool = False,
    ) -> None:
        check_workers(workers, prefetch)
        self._one_batch = one_batch
        self.views, self.batching, self._seed = views, batching, seed
        self._reader = BatchReader(views, batching)
        self._workers = Workers(self._reader, workers, prefetch) if workers else None
        self._copy = DeviceCopy(device or torch.device("cpu"))

    def __len__(self) -> int:
        """Batches an epoch; the last may be smaller."""
        whole = (len(self.views) + self.batching.size - 1) // self.batching.size
        return min(whole, 1) if self._one_batch else whole

    def samples(self, batch: int) -> int:
        """How many a batch of an epoch holds."""
        return min(self.batching.size, len(self.views) - batch * self.batching.size)

    def batches(self, epoch: int = 0, first: int = 0) -> Iterator[list[Slice]]:
        """This rank's slices of the batches of an epoch, one a micro-batch.

        Args:
            first: go on with this batch, those before it have been there.

        Raises:
            Exception: what reading raised.
        """
        count, size = len(self.views), self.batching.size
        epoch = 0 if self._one_batch else epoch
        order = np.arange(count) if self._seed is None else sample_order(count, self._seed, epoch)
        wanted = [
            Batch(epoch, order[number * size : (number + 1) * size])
            for number in range(first, len(self))
        ]
        if not wanted:
            return
        found = self._workers.batches(wanted) if self._workers else map(self._reader.read, wanted)
        if not self._workers and isinstance(self.views.source, DatasetSource):
            # its generators are those of this thread, too, which shall draw what it would have
            for batch in found:
                yield self._copy.begin(batch)()
            return

        def following() -> Arrived | None:
            batch = next(found, None)
            return None if batch is None else self._copy.begin(batch)

        with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
            pending = reader.submit(following)
            while (arrived := pending.result()) is not None:
                pending = reader.submit(following)
                yield arrived()

    def close(self) -> None:
        """End the processes that read; they start again when needed."""
        if self._workers is not None:
            self._workers.close()


def check_workers(workers: int, prefetch: int) -> None:
    """Refuse numbers that make no sense.

    Raises:
        ValueError: names the key.
    """
    for name, value, least in (("workers", workers, 0), ("prefetch", prefetch, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"data.{name}={value} must be a whole number of at least {least}")


def to_input(
    tiles: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    normalisation: Normalisation = Normalisation(),  # noqa: B008
) -> Tensor:
    """(N, [d,] h, w, C) of pixels as a normalised (N, C, [d,] h, w) of `dtype`.

    A pixel becomes (x / scale - mean) / std.
    """
    # a copy: floats of this type would still be the loader's own
    pixels = tiles.to(device).movedim(-1, 1)
    pixels = pixels.to(dtype, copy=True, memory_format=torch.contiguous_format)
    scale = normalisation.scale
    if scale is None and not tiles.is_floating_point():
        scale = torch.iinfo(tiles.dtype).max
    if scale is not None:
        pixels.div_(scale)
    # numbers of Python, as a tensor of them would be copied to the device in every step
    if len(normalisation.mean) == len(normalisation.std) == 1:
        return pixels.sub_(normalisation.mean[0]).div_(normalisation.std[0])
    mean, std = normalisation.by_channel(pixels.shape[1])
    for channel, plane in enumerate(pixels.unbind(1)):
        plane.sub_(mean[channel]).div_(std[channel])
    return pixels


def bag_to_input(
    tiles: Tensor, dtype: torch.dtype, device: torch.device, normalisation: Normalisation
) -> Tensor:
    """(N, tiles, C) of features as a normalised (N, C, tiles) of `dtype`.

    In memory it stays tile by tile, as it is read and as linear layers take it. Whole numbers are
    pixels, and stay as they are: the network normalises them, some tiles at a time.
    """
    if not tiles.is_floating_point():
        return tiles.to(device).movedim(-1, 1)
    features = tiles.to(device, dtype)
    if normalisation.changes_floats:
        mean, std = (
            on(_row(values), device).to(dtype) for values in (normalisation.mean, normalisation.std)
        )
        features = (features - mean) / std
    return features.movedim(-1, 1)


@cache
def _row(values: tuple[float, ...]) -> Tensor:
    """The same tensor each time, so that it is copied to a device once."""
    return torch.tensor(values, dtype=torch.float64)


class DeviceCopy:
    """Begins to copy batches to a device, from any thread.

    An accelerator copies from pinned memory in a stream of its own, so that neither this process
    nor what the device computes waits for it. On a CPU batches are left as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def begin(self, batch: list[Slice]) -> Arrived:
        """Call what this returns where the batch is needed, on the stream that needs it."""
        stream = self._stream
        if stream is None:
            return lambda: batch
        with stream:
            copied = [one.map(self._copy) for one in batch]
            done = stream.record_event()

        def arrived() -> list[Slice]:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(done)
            for tensor in _tensors(copied):
                # its memory belongs to the other stream, which must not take it back too early
                tensor.record_stream(current)
            return copied

        return arrived

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _tensors(batch: list[Slice]) -> Iterator[Tensor]:
    return (tensor for one in batch for tensor in one.tensors())
