"""Compares state that must match across ranks in a user's program: images, labels, weights.

Comparisons run in the first steps, then at growing intervals, over separate communicators: most
steps have no cost and no device synchronisation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.digest import first_difference
from spatialdl.errors import CommMismatch
from spatialdl.torch_internals import current_graph_task_id

FIRST, WINDOW, LONGEST = 8, 4, 1024
OF_WEIGHTS = 2**16
"""Maximum number of compared elements of a parameter."""

HOW_TO_SWITCH_OFF = "init_mesh(check=False) disables this comparison"


_SAMPLER = "DistributedSampler(num_replicas=mesh.data, rank=mesh.replica)"


def _sampler_advice() -> str:
    """Usual reasons why ranks of a grid load different images."""
    return _accelerate() or f"; distribute samples over replicas, not over ranks, by {_SAMPLER}"


def _accelerate() -> str:
    """Advice about loaders of Accelerate, in programs that have imported it."""
    if "accelerate" not in sys.modules:
        return ""
    return (
        "; accelerator.prepare gives each process different samples: do not pass it the "
        f"DataLoader, and use {_SAMPLER}"
    )


def is_due(number: int) -> bool:
    """Whether call `number`, from 1, compares.

    The first 8, and 4 each from 16, 32, 64 ... on, finally every 1,024: so that programs with two
    calls a step, for an image and a mask, have both compared.
    """
    if number <= FIRST:
        return True
    interval = min(LONGEST, 1 << (number.bit_length() - 1))
    return number % interval < WINDOW


class Agreement:
    """Comparisons between the ranks of a mesh; raises on all of them.

    Args:
        comm: all ranks, which have the same weights.
        grid_comm: ranks that hold one image, and have the same images and labels.
        tensor_comm: ranks of them that have the same tile.
        channels_comm: ranks of them that have the same channels of other tiles.

    Attributes:
        compares: whether the current step is compared.
        any_compares: whether the current step of any mesh is compared.
    """

    any_compares: ClassVar[bool] = False

    def __init__(
        self,
        comm: Communicator,
        grid_comm: Communicator,
        tensor_comm: Communicator,
        channels_comm: Communicator,
    ) -> None:
        self.rank = comm.rank * tensor_comm.size + tensor_comm.rank
        self._comm, self._grid_comm = comm.duplicate(), grid_comm.duplicate()
        self._tensor_comm = tensor_comm.duplicate()
        divides = tensor_comm.size > 1
        self._channels_comm = channels_comm.duplicate() if divides else self._grid_comm
        self._images = self._averages = 0
        self._backward = -1
        self.compares = False

    def images(self, image: Tensor) -> None:
        """Compare the whole image at the start of a step; it must match across the grid.

        Raises:
            ValueError: if images differ.
            CommMismatch: if ranks have called different operations before.
        """
        if self._begins():
            self._compare(
                {"image": image},
                "shard takes each rank's box from that rank's image: load, draw and augment the "
                "same image on all ranks of a grid, or pass each rank's tile to from_local"
                f"{_sampler_advice()}",
            )

    def tiles(self, tile: Tensor, size: Sequence[int]) -> None:
        """Compare common properties of the tiles of a grid at the start of a step.

        Raises:
            ValueError: if they differ.
            CommMismatch: if ranks have called different operations before.
        """
        if not self._begins():
            return
        common = tuple(tile.shape[: -len(size)])
        own = f"{tile.dtype}, {common} x {tuple(size)}".removeprefix("torch.")
        for rank, other in enumerate(self._grid_comm.allgather(own)):
            if other != own:
                ranks = self._grid_comm.world_ranks
                raise ValueError(
                    f"ranks have tiles of different images: {own} on rank "
                    f"{ranks[self._grid_comm.rank]}, {other} on rank {ranks[rank]} (dtype, samples "
                    "and channels x size of the whole image): pass tiles of the same image"
                )
        if self._tensor_comm.size > 1:
            difference = first_difference(self._tensor_comm, {"tile": tile})
            if difference:
                raise ValueError(
                    f"{difference}: ranks of the tensor axis divide channels, and share one tile: "
                    f"load, draw and augment the same tile on all of them ({HOW_TO_SWITCH_OFF})"
                )

    def operand(self, value: Tensor) -> None:
        """Compare a whole image beside a split one, such as labels, or this rank's channels of it.

        Raises:
            ValueError: if it differs between ranks of the grid.
        """
        if self.compares and self._channels_comm.size > 1:
            self._compare(
                {"tensor beside a split image": value},
                "each rank takes its box from that rank's tensor: pass the same labels, pixel "
                "weights and masks on all ranks of a grid",
                self._channels_comm,
            )

    def gradient(self, grad: Tensor, compares: bool) -> None:
        """Compare the first gradient in backward that reaches a tensor whole on all ranks.

        Raises:
            ValueError: if it differs, and hence the losses.
        """
        task = current_graph_task_id()
        if task == self._backward:
            return
        self._backward = task
        if compares and self.compares and self._grid_comm.size > 1:  # from image to loss
            self._compare(
                {"gradient of the loss": grad},
                "the ranks of a grid have one output, but different losses: use the same labels "
                "and loss weights on all ranks, and the same seed for random operations after the "
                f"last operation on a split image, such as dropout{_accelerate()}",
            )

    def weights(self, parameters: Iterable[nn.Parameter]) -> None:
        """Compare weights where gradients are averaged.

        Raises:
            ValueError: if weights differ between ranks.
        """
        self._averages += 1
        if not is_due(self._averages):
            return
        named = {f"parameter {number}": one for number, one in enumerate(parameters)}
        difference = first_difference(self._comm, named, OF_WEIGHTS)
        if difference:
            raise ValueError(
                f"ranks have different weights: {difference}; use the same seed on all ranks to "
                "build the network, or wrap it in SpatialParallel, which broadcasts the weights "
                f"of rank 0; load and change weights on every rank ({HOW_TO_SWITCH_OFF})"
            )

    def _begins(self) -> bool:
        """Whether this step is compared; False in other threads, which may be ahead."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._images += 1
        self.compares = Agreement.any_compares = is_due(self._images)
        if not self.compares or self._grid_comm.size == 1:
            return False
        calls = dict(enumerate(self._grid_comm.allgather(check.last_calls())))
        mismatch = check.first_mismatch(calls)
        if mismatch:
            raise CommMismatch(f"{mismatch}; {check.how_to_switch_on()}")
        return True

    def _compare(
        self, named: dict[str, Tensor], advice: str, comm: Communicator | None = None
    ) -> None:
        difference = first_difference(comm or self._grid_comm, named)
        if difference:
            raise ValueError(f"{difference}: {advice} ({HOW_TO_SWITCH_OFF})")
