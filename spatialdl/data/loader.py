"""Batches for one rank, in an order that all ranks compute, prefetched.

The order of the samples depends only on (seed, epoch), so an epoch can resume at any batch. A batch
is copied to the device while the previous one is computed.
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
    """The shuffled sample indices of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


class Loader:
    """Prefetch batches and copy them to the device ahead of training.

    Args:
        views: the images.
        batching: how batches are divided, and this rank's part.
        seed: seed of the order; None keeps the order of the data set.
        workers: reader processes; 0 reads in a thread of this process, or, if a user's data set
            draws from the process's random generators, between the steps.
        device: device of the batches.
        one_batch: whether every epoch is the first batch of epoch 0.

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
        device: torch.device | None = None,
        one_batch: bool = False,
    ) -> None:
        check_workers(workers)
        self._one_batch = one_batch
        self.views, self.batching, self._seed = views, batching, seed
        self._reader = BatchReader(views, batching)
        self._workers = Workers(self._reader, workers) if workers else None
        self._copy = DeviceCopy(device or torch.device("cpu"))

    def __len__(self) -> int:
        """Batches per epoch; the last may be smaller."""
        whole = (len(self.views) + self.batching.size - 1) // self.batching.size
        return min(whole, 1) if self._one_batch else whole

    def samples(self, batch: int) -> int:
        """Number of samples in a batch of an epoch."""
        return min(self.batching.size, len(self.views) - batch * self.batching.size)

    def batches(self, epoch: int = 0, first: int = 0) -> Iterator[list[Slice]]:
        """This rank's slices of the batches of an epoch, one per micro-batch.

        Args:
            first: resume at this batch.

        Raises:
            Exception: any error of reading.
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
            # The generators of the data set are this thread's: a reader thread would draw from
            # them in another order.
            for batch in found:
                yield self._copy.begin(batch)()
            return

        def next_batch() -> Arrived | None:
            batch = next(found, None)
            return None if batch is None else self._copy.begin(batch)

        with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
            pending = reader.submit(next_batch)
            while (arrived := pending.result()) is not None:
                pending = reader.submit(next_batch)
                yield arrived()

    def close(self) -> None:
        """End the reader processes; they restart when needed."""
        if self._workers is not None:
            self._workers.close()


def check_workers(workers: int) -> None:
    """Reject an invalid number of workers.

    Raises:
        ValueError: with the key and its value.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
        raise ValueError(f"data.workers={workers} must be a whole number of at least 0")


def to_input(
    tiles: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    normalisation: Normalisation = Normalisation(),  # noqa: B008
) -> Tensor:
    """Pixels (N, [d,] h, w, C) as a normalised (N, C, [d,] h, w) of `dtype`.

    A pixel becomes (x / scale - mean) / std.
    """
    # Copy: without it, floats of this dtype would share memory with the loader.
    pixels = tiles.to(device).movedim(-1, 1)
    pixels = pixels.to(dtype, copy=True, memory_format=torch.contiguous_format)
    scale = normalisation.scale
    if scale is None and not tiles.is_floating_point():
        scale = torch.iinfo(tiles.dtype).max
    if scale is not None:
        pixels.div_(scale)
    # Python numbers: a tensor of them would be copied to the device in every step.
    if len(normalisation.mean) == len(normalisation.std) == 1:
        return pixels.sub_(normalisation.mean[0]).div_(normalisation.std[0])
    mean, std = normalisation.by_channel(pixels.shape[1])
    for channel, plane in enumerate(pixels.unbind(1)):
        plane.sub_(mean[channel]).div_(std[channel])
    return pixels


def bag_to_input(
    tiles: Tensor, dtype: torch.dtype, device: torch.device, normalisation: Normalisation
) -> Tensor:
    """Features (N, tiles, C) as a normalised (N, C, tiles) of `dtype`.

    The memory layout stays tile by tile, as read and as linear layers use it. Integers are pixels
    and stay unchanged: the network normalises them, some tiles at a time.
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
    """The values as a cached tensor, so that it is copied to a device once."""
    return torch.tensor(values, dtype=torch.float64)


class DeviceCopy:
    """Asynchronous copies of batches to a device, started from any thread.

    An accelerator copies from pinned memory on a separate stream, so that neither this process nor
    computation waits for it. On a CPU batches are returned unchanged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def begin(self, batch: list[Slice]) -> Arrived:
        """Start a copy; call the result where the batch is used, on the stream that uses it."""
        stream = self._stream
        if stream is None:
            return lambda: batch
        with stream:
            copied = [part.map(self._copy) for part in batch]
            done = stream.record_event()

        def arrived() -> list[Slice]:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(done)
            for tensor in _tensors(copied):
                # The memory belongs to the copy stream, which must not reuse it too early.
                tensor.record_stream(current)
            return copied

        return arrived

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _tensors(batch: list[Slice]) -> Iterator[Tensor]:
    return (tensor for part in batch for tensor in part.tensors())
