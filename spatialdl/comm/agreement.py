"""What ranks must have alike in a program of a user's own: images, labels, weights.

It is compared in the first steps, and then now and then at growing intervals, over communicators
of its own: most steps pay nothing, and wait for no device.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.digest import first_difference
from spatialdl.errors import CommMismatch

FIRST, WINDOW, LONGEST = 8, 4, 1024
OF_WEIGHTS = 2**16
"""Elements of a parameter that are looked at."""

HOW_TO_SWITCH_OFF = "init_mesh(check=False) compares nothing"


_SAMPLER = "DistributedSampler(num_replicas=mesh.data, rank=mesh.replica)"


def _who_deals_out() -> str:
    """The usual reasons for which ranks of a grid have images of their own."""
    return _accelerate() or f"; samples are dealt out to replicas, not to ranks, by {_SAMPLER}"


def _accelerate() -> str:
    """How loaders of Accelerate deal out samples, in programs that have loaded it."""
    if "accelerate" not in sys.modules:
        return ""
    return (
        "; accelerator.prepare gives each process samples of its own: leave the DataLoader out "
        f"of it, and give it {_SAMPLER}"
    )


def is_due(number: int) -> bool:
    """Whether the call of this number, from 1, compares.

    The first 8, and 4 each from 16, 32, 64 ... on, at last every 1,024: programs that call twice a
    step, with an image and a mask, so have both compared.
    """
    if number <= FIRST:
        return True
    interval = min(LONGEST, 1 << (number.bit_length() - 1))
    return number % interval < WINDOW


class Agreement:
    """Comparisons between the ranks of a mesh; raises on all of them alike.

    Args:
        comm: all ranks, which have the same weights.
        grid_comm: those that hold one image, and have the same images and labels.
        tensor_comm: those of them that have the same tile.
        channels_comm: those of them that have the same channels of other tiles.

    Attributes:
        compares: whether the current step is one of those that are compared.
        any_compares: whether that of any mesh is.
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
        """At the beginning of a step: the whole image, which all ranks of the grid have.

        Raises:
            ValueError: if they have other ones.
            CommMismatch: if they have done different things before.
        """
        if self._begins():
            self._compare(
                {"image": image},
                "shard takes each rank's box of the image that it has: load, draw and augment the "
                "same one on all ranks of a grid, or give from_local each rank's own tile"
                f"{_who_deals_out()}",
            )

    def tiles(self, tile: Tensor, size: Sequence[int]) -> None:
        """At the beginning of a step: what the tiles of all ranks of the grid have in common.

        Raises:
            ValueError: if it differs.
            CommMismatch: if they have done different things before.
        """
        if not self._begins():
            return
        common = tuple(tile.shape[: -len(size)])
        own = f"{tile.dtype}, {common} x {tuple(size)}".removeprefix("torch.")
        for rank, other in enumerate(self._grid_comm.allgather(own)):
            if other != own:
                ranks = self._grid_comm.world_ranks
                raise ValueError(
                    f"ranks bring tiles of different images: {own} on rank "
                    f"{ranks[self._grid_comm.rank]}, {other} on rank {ranks[rank]} (type, samples "
                    "and channels x size of the whole image): bring tiles of the same image"
                )
        if self._tensor_comm.size > 1:
            difference = first_difference(self._tensor_comm, {"tile": tile})
            if difference:
                raise ValueError(
                    f"{difference}: ranks of the tensor axis divide channels, and have one tile: "
                    f"load, draw and augment the same one on all of them ({HOW_TO_SWITCH_OFF})"
                )

    def operand(self, value: Tensor) -> None:
        """A whole image beside a split one, such as labels, or this rank's channels of one.

        Raises:
            ValueError: if ranks of the grid have other ones.
        """
        if self.compares and self._channels_comm.size > 1:
            self._compare(
                {"tensor beside a split image": value},
                "each rank takes its box of the tensor that it has: give all ranks of a grid the "
                "same labels, weights of pixels and masks",
                self._channels_comm,
            )

    def gradient(self, grad: Tensor, compares: bool) -> None:
        """The first gradient in a backward that reaches what all ranks of a grid have whole.

        Raises:
            ValueError: if it differs, hence the losses.
        """
        task = torch._C._current_graph_task_id()
        if task == self._backward:
            return
        self._backward = task
        if compares and self.compares and self._grid_comm.size > 1:  # from image to loss
            self._compare(
                {"gradient of the loss": grad},
                "the ranks of a grid have one output, but other losses: give all the same labels "
                "and weights of the loss, and seed what draws random numbers after the last "
                f"operation on a split image, such as dropout, alike{_accelerate()}",
            )

    def weights(self, parameters: Iterable[nn.Parameter]) -> None:
        """Where gradients are averaged.

        Raises:
            ValueError: if ranks have other weights.
        """
        self._averages += 1
        if not is_due(self._averages):
            return
        named = {f"parameter {number}": one for number, one in enumerate(parameters)}
        difference = first_difference(self._comm, named, OF_WEIGHTS)
        if difference:
            raise ValueError(
                f"ranks have different weights: {difference}; seed all ranks alike before the "
                "network is built, or wrap it in SpatialParallel, which gives all the weights of "
                f"rank 0; load and change weights on every rank ({HOW_TO_SWITCH_OFF})"
            )

    def _begins(self) -> bool:
        """Whether this step is compared; other threads, which may be ahead, are left alone."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._images += 1
        self.compares = Agreement.any_compares = is_due(self._images)
        if not self.compares or self._grid_comm.size == 1:
            return False
        done = dict(enumerate(self._grid_comm.allgather(check.done_last())))
        parted = check.where_they_parted(done)
        if parted:
            raise CommMismatch(f"{parted}; {check.how_to_switch_on()}")
        return True

    def _compare(
        self, named: dict[str, Tensor], advice: str, comm: Communicator | None = None
    ) -> None:
        difference = first_difference(comm or self._grid_comm, named)
        if difference:
            raise ValueError(f"{difference}: {advice} ({HOW_TO_SWITCH_OFF})")
