"""Compares state that must match across ranks: arguments, images, labels, weights; broadcasts it.

Text is compared by a hash, and sent only if it differs; tensors by one number each. Images, labels
and weights are compared in the first steps, then at growing intervals, over separate
communicators: most steps have no cost and no device synchronisation.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import shard_of
from spatialdl.common.text import fitted
from spatialdl.errors import CommMismatch
from spatialdl.torch_internals import current_graph_task_id

FIRST, WINDOW, LONGEST = 8, 4, 1024
OF_WEIGHTS = 2**16
"""Maximum number of compared elements of a parameter."""

HOW_TO_SWITCH_OFF = "init_mesh(check=False) disables this comparison"

_MOST_ITEMS, _WIDEST = 5, 80
PORTION_BYTES = 64 * 2**20

MOST = 2**22
"""Maximum number of compared elements, evenly spaced in larger tensors."""

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Relative to the largest value: processor models round differently."""

_HALF_TOLERANCE = 2e-2
_CHUNK = 2**20
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# --- text


def difference(comm: Communicator, own: Mapping[str, object]) -> str:
    """Where ranks have different values, as text; empty if all are equal.

    Collective; the result is the same on all ranks.

    Args:
        own: this rank's values by name; names may differ between ranks.
    """
    if comm.size == 1:
        return ""
    items = {name: str(value) for name, value in own.items()}
    number = hashlib.sha256(repr(sorted(items.items())).encode()).hexdigest()
    if len(set(comm.allgather(number))) == 1:
        return ""
    contents = comm.allgather((socket.gethostname(), items))
    texts = []
    for name in dict.fromkeys(name for _, some in contents for name in some):
        ranks: dict[str, list[int]] = {}
        for rank, (_, some) in enumerate(contents):
            ranks.setdefault(some.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            hosts = [host for host, _ in contents]
            values = (
                f"{fitted(value, _WIDEST)} on {_ranks_text(comm, some, hosts)}"
                for value, some in ranks.items()
            )
            texts.append(f"{name} is {', '.join(values)}")
    if len(texts) > _MOST_ITEMS:
        texts[_MOST_ITEMS:] = [f"and {len(texts) - _MOST_ITEMS} more"]
    return ", ".join(texts)


def _ranks_text(comm: Communicator, ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """ "rank 0", "ranks 0, 1, 2"; with several hosts "ranks 0, 1 (node1), 2 (node2)"."""
    names = getattr(comm, "world_ranks", range(comm.size))
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(names[rank]))
    texts = [
        ", ".join(some) + (f" ({host})" if len(set(hosts)) > 1 else "")
        for host, some in by_host.items()
    ]
    return fitted(f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}", _WIDEST)


def check_same(comm: Communicator, what: str, own: Mapping[str, object], advice: str) -> None:
    """Check that all ranks have the same values; collective.

    Raises:
        ValueError: on all ranks, if values differ, naming them and their ranks.
    """
    found = difference(comm, own)
    if found:
        raise ValueError(f"{what}: {found}: {advice}")


# --- tensors


@torch.no_grad()
def digest(tensor: Tensor, most: int = MOST) -> Tensor:
    """A number, on the device, that depends on each sampled element and its position."""
    values = sample(tensor, most)
    integers = values.view(_AS_INTEGERS[values.element_size()])
    weights = _weights(min(len(integers), _CHUNK), integers.device)
    total = torch.zeros((), dtype=torch.int64, device=integers.device)
    for part in torch.split(integers, _CHUNK):
        total = total * 0x5851F42D4C957F2D + (part.to(torch.int64) * weights[: len(part)]).sum()
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers: steps of splitmix64."""
    state = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    state = (state ^ (state >> 30)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27)) * -0x6B2FB644ECCEEE15
    return (state ^ (state >> 31)) | 1


def sample(tensor: Tensor, most: int) -> Tensor:
    """Up to about `most` elements of a tensor, evenly spaced over its two largest dims."""
    values = shard_of(tensor.detach())
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.numel() > most:
        step = int((values.numel() / most) ** 0.5) + 1
        largest = sorted(range(values.dim()), key=lambda dim: values.shape[dim])[-2:]
        for dim in largest if len(largest) == 2 else largest * 2:
            values = values[(slice(None),) * dim + (slice(None, None, step),)]
    return values.contiguous().view(-1)


def first_difference(comm: Communicator, named: Mapping[str, Tensor], most: int = MOST) -> str:
    """Describe tensors that differ between ranks of `comm`; empty if all are equal.

    Collective; the result is the same on all ranks. Floats may differ by `TOLERANCE`.
    """
    own = {name: f"{t.dtype} {tuple(t.shape)}".removeprefix("torch.") for name, t in named.items()}
    if found := difference(comm, own):
        return found
    numbers = comm.allgather([int(digest(tensor, most)) for tensor in named.values()])
    for index, (name, tensor) in enumerate(named.items()):
        others = (rank for rank, some in enumerate(numbers) if some[index] != numbers[0][index])
        rank = next(others, None)
        if rank is not None and not _is_close(comm, tensor, most):
            ranks = comm.world_ranks
            return (
                f"{name} ({own[name]}) has different values on rank {ranks[rank]} than on rank "
                f"{ranks[0]}"
            )
    return ""


def _is_close(comm: Communicator, tensor: Tensor, most: int) -> bool:
    """Whether values differ by rounding only."""
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return False
    values = sample(tensor, most).to("cpu", torch.float64).nan_to_num()
    mean = comm.all_reduce(values) / comm.size
    furthest = comm.allgather((float((values - mean).abs().max()), float(values.abs().max())))
    off, largest = (max(one) for one in zip(*furthest, strict=True))
    return bool(off <= TOLERANCE.get(tensor.dtype, _HALF_TOLERANCE) * largest)


# --- images, labels and weights of a user's program

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
        self._images = self._averages = self._steps = 0
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
        what = "ranks have tiles of different images"
        name = "dtype, samples and channels x size of the whole image"
        check_same(self._grid_comm, what, {name: own}, "pass tiles of the same image")
        if self._tensor_comm.size > 1:
            found = first_difference(self._tensor_comm, {"tile": tile})
            if found:
                raise ValueError(
                    f"{found}: ranks of the tensor axis divide channels, and share one tile: "
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
        found = first_difference(self._comm, named, OF_WEIGHTS)
        if found:
            raise ValueError(
                f"ranks have different weights: {found}; use the same seed on all ranks to "
                "build the network, or wrap it in SpatialParallel, which broadcasts the weights "
                f"of rank 0; load and change weights on every rank ({HOW_TO_SWITCH_OFF})"
            )

    def gradients(self, parameters: Iterable[nn.Parameter]) -> str:
        """Which of these gradients differs between ranks, as text, where a step is compared."""
        self._steps += 1
        named = {
            f"that of parameter {number}": one.grad
            for number, one in enumerate(parameters)
            if one.grad is not None
        }
        return first_difference(self._comm, named, OF_WEIGHTS) if is_due(self._steps) else ""

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
        found = first_difference(comm or self._grid_comm, named)
        if found:
            raise ValueError(f"{found}: {advice} ({HOW_TO_SWITCH_OFF})")


# --- the same weights everywhere


@torch.no_grad()
def broadcast_state(module: nn.Module, comm: Communicator) -> None:
    """Overwrite all parameters and buffers with those of rank 0; collective.

    Raises:
        ValueError: on all ranks, if networks differ in names, shapes or dtypes, or a parameter is
            not initialised.
    """
    named = dict([*module.named_parameters(), *module.named_buffers()])
    for name, tensor in named.items():
        if is_lazy(tensor):
            raise ValueError(
                f"{name} of {type(module).__name__} is not initialised: run the network once on an "
                "image on every rank before wrapping it"
            )
    if comm.size == 1:
        return
    own = {name: f"{t.dtype} {tuple(t.shape)}" for name, t in named.items()}
    check_same(comm, "networks differ between ranks", own, "build the same network on every rank")
    for tensor in named.values():
        _broadcast(shard_of(tensor), comm)


def _broadcast(tensor: Tensor, comm: Communicator) -> None:
    flat = tensor.detach().reshape(-1)
    portion = max(1, PORTION_BYTES // tensor.element_size())
    parts = [
        comm.bcast(part.cpu().clone() if comm.rank == 0 else None)
        for part in torch.split(flat, portion)
    ]
    if comm.rank != 0 and parts:
        tensor.copy_(torch.cat(parts).view(tensor.shape))
