"""Ranks of the benchmark `communication`: halo exchanges and all-reduces.

All variants of the exchange move the same pieces of a tile, except the two-phase variant, which
needs a padded tile and sends corners with the rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

import spatialdl
import spatialdl.comm.backend  # registers it
from benchmarks.communication import CALL, HALO, MEMCPY, NEW_STRIPS, NOTHING, OURS, RAW
from benchmarks.harness import describe, time_calls
from spatialdl.comm.backend.communication_thread import FINISHED
from spatialdl.comm.boxed import BoxedTensor, Exchange, views_of
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import (
    backend_for,
    choose_device_path,
    device_group,
    device_of,
    device_path,
)
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.exchange_strategies import buffer, mpi_type
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import view_of
from spatialdl.comm.single_process import Completed, SingleProcess
from spatialdl.comm.world import start_world
from spatialdl.layout.layout import Layout, Window, needed_boxes
from spatialdl.spatial.halo_geometry import TileGeometry, tile_geometry
from spatialdl.torch_internals import ProcessGroup, Work

Variant = Callable[[], object]
WINDOW = Window(kernel=3, padding=1)
BYTES_A_ROUND = 2**22
"""Bytes per round: small all-reduces are repeated to move this much, at most 200 times."""


def work(options: argparse.Namespace) -> dict[str, Any] | None:
    """Seconds on the slowest rank by variant and round, of exchanges and of all-reduces by size."""
    device = device_of(options.device)
    mesh = spatialdl.init_mesh(tuple(options.grid), check=False)
    world = mesh.comm
    found: dict[str, Any] = {"mpi": MPI.Get_library_version()}
    if options.halo:
        halo = Halo(mesh, options.channels, options.side, device)
        found["halo"] = {
            "seconds": measure_halo(halo, options.rounds, options.exchanges),
            "bytes": halo.bytes,
            "way": getattr(mesh.grid_comm, "way", None),
        }
    if options.all_reduce:
        try:
            other = other_backend(device)
        except ValueError as error:
            found["other"] = str(error)
        else:
            found["other"] = other
            dist.init_process_group("mpi4py")
            group = dist.new_group(backend=other)
            sums = all_reduces(options.most, options.rounds, device, {other: group})
            found["all_reduce"] = sums
            dist.destroy_process_group()
    return {**found, "device": describe(device)} if world.rank == 0 else None


def measure_halo(halo: Halo, rounds: int, exchanges: int) -> dict[str, list[float]]:
    """Seconds of an exchange by variant and round."""
    variants = halo.variants()
    for exchange in variants.values():
        exchange()
    halo.check()
    return time_calls(variants, rounds, exchanges, halo.tile.device, halo.mesh.comm)


class SilentExchange(SingleProcess):
    """Communicator with empty exchanges, to measure the time without communication."""

    def start_exchange(self, *_: object) -> Completed:
        return Completed()


class Halo:
    """The tile of one rank, and its pieces to send and receive."""

    def __init__(
        self, mesh: spatialdl.Mesh, channels: int, side: int, device: torch.device
    ) -> None:
        rows, cols = mesh.grid
        layout = Layout.even(1, (rows * side, cols * side), mesh.grid)
        self.mesh, self.comm = mesh, MPI.Intracomm(MPI.COMM_WORLD.Dup())
        self.plan: Plan = plan_for(layout.boxes, needed_boxes(layout, (WINDOW, WINDOW)), mesh.part)
        geometry = tile_geometry(layout, layout, (WINDOW, WINDOW), mesh.part)
        if geometry is None:
            raise ValueError(f"tiles of {side}x{side} pixels have no halo")
        self.geometry: TileGeometry = geometry
        picture = torch.arange(rows * side).view(-1, 1) * 1000.0 + torch.arange(cols * side)
        self._image = picture.expand(1, channels, -1, -1)
        self.tile = view_of(self._image, layout.whole, self.plan.own).to(device, copy=True)
        self.strips = geometry.strips(self.tile)
        self.sends = views_of(self.plan.sends, [BoxedTensor(self.tile, self.plan.own)])
        self.receives = views_of(self.plan.receives, geometry.outside_strips(self.strips))
        self.targets = [piece.peer for piece in self.plan.sends]
        self.sources = [piece.peer for piece in self.plan.receives]
        self.bytes = sum(view.numel() for view in self.sends) * self.tile.element_size()
        self._layout = layout

    def variants(self) -> dict[str, Variant]:
        """Order: ours, hand-written with all set up beforehand, lower bounds."""
        return {
            HALO: self._ours(),
            NEW_STRIPS: self._ours(new_strips=True),
            **(self._by_hand() if self.tile.is_cpu else self._by_hand_on_device()),
            NOTHING: self._ours(comm=SilentExchange()),
            MEMCPY: self._memcpy(),
        }

    def _by_hand(self) -> dict[str, Variant]:
        return {
            "pack, Isend/Irecv": self._packed(),
            "datatypes, Isend/Irecv": self._typed(),
            "persistent requests": self._persistent(),
            "neighbor_alltoallw": self._neighbours(),
            "Sendrecv in two phases": self._two_phases(),
        }

    def _by_hand_on_device(self) -> dict[str, Variant]:
        found = {"pack, pinned, Isend/Irecv": self._packed(pinned=True)}
        if device_path().name == "nccl":
            found[f"pack, {backend_for(self.tile.device)} send/recv"] = self._by_group()
        if device_path().name == "mpi":
            found["pack, Isend/Irecv"] = self._packed()
        return found

    def check(self) -> None:
        """Check that the strips hold the neighbours' pixels."""
        for piece, view in zip(self.plan.receives, self.receives, strict=True):
            if not torch.equal(view.cpu(), view_of(self._image, self._layout.whole, piece.box)):
                raise RuntimeError(f"wrong pixels in {piece.box}")

    def _ours(self, new_strips: bool = False, comm: Communicator | None = None) -> Variant:
        """Exchange as in a convolution, which allocates new strips each time."""
        plan, geometry, tile = self.plan, self.geometry, self.tile
        comm = comm or self.mesh.grid_comm

        def exchange() -> None:
            strips = geometry.strips(tile) if new_strips else self.strips
            own, outside = [BoxedTensor(tile, plan.own)], geometry.outside_strips(strips)
            halo = Exchange(plan, own, outside, tile.device)
            start_exchange(comm, halo).wait()

        return exchange

    def _packed(self, pinned: bool = False) -> Variant:
        """Pack, send and unpack; of tensors on a device also through pinned host memory."""
        packed, landed = map(_room, (self.sends, self.receives))
        outgoing, incoming = (
            [torch.empty(one.shape, pin_memory=True) for one in x] if pinned else x
            for x in (packed, landed)
        )
        messages = list(map(buffer, outgoing)), list(map(buffer, incoming))

        def exchange() -> None:
            _copy(self.sends, packed)
            if pinned:
                _copy(packed, outgoing)
            if not self.tile.is_cpu:
                torch.accelerator.current_stream(self.tile.device).synchronize()
            self._send_and_receive(*messages)
            if pinned:
                _copy(incoming, landed)
            _copy(landed, self.receives)

        return exchange

    def _by_group(self) -> Variant:
        packed, landed = map(_room, (self.sends, self.receives))
        device, store = self.tile.device, device_path().store
        assert store is not None
        ranks, limit = tuple(range(self.comm.size)), dist.default_pg_timeout
        group = device_group(store, ranks, self.comm.rank, device, limit)

        def exchange() -> None:
            _copy(self.sends, packed)
            group._start_coalescing(device)
            for tensor, source in zip(landed, self.sources, strict=True):
                group.recv([tensor], source, 0)
            for tensor, target in zip(packed, self.targets, strict=True):
                group.send([tensor], target, 0)
            group._end_coalescing(device).wait()
            _copy(landed, self.receives)

        return exchange

    def _send_and_receive(self, outgoing: Sequence[Any], incoming: Sequence[Any]) -> None:
        requests = [
            self.comm.Irecv(message, source)
            for message, source in zip(incoming, self.sources, strict=True)
        ]
        requests += [
            self.comm.Isend(message, target)
            for message, target in zip(outgoing, self.targets, strict=True)
        ]
        MPI.Request.Waitall(requests)

    def _typed(self) -> Variant:
        outgoing, incoming = map(_typed, (self.sends, self.receives))
        return lambda: self._send_and_receive(outgoing, incoming)

    def _persistent(self) -> Variant:
        requests: list[MPI.Prequest] = [
            self.comm.Recv_init(message, source)
            for message, source in zip(_typed(self.receives), self.sources, strict=True)
        ] + [
            self.comm.Send_init(message, target)
            for message, target in zip(_typed(self.sends), self.targets, strict=True)
        ]

        def exchange() -> None:
            MPI.Prequest.Startall(requests)
            MPI.Request.Waitall(requests)

        return exchange

    def _neighbours(self) -> Variant:
        graph = self.comm.Create_dist_graph_adjacent(self.sources, self.targets)
        outgoing, incoming = map(_absolute, (self.sends, self.receives))
        return lambda: graph.Neighbor_alltoallw(outgoing, incoming)

    def _two_phases(self) -> Variant:
        """Exchange columns, then rows with the received corners, in a padded tile."""
        _, channels, height, width = self.tile.shape
        self._padded = padded = self.tile.new_zeros(channels, height + 2, width + 2)
        padded[:, 1:-1, 1:-1] = self.tile[0]
        rows, cols = self.mesh.grid
        row, col = divmod(self.mesh.part, cols)
        inner = slice(1, -1)

        def peer(r: int, c: int) -> int:
            return r * cols + c if 0 <= r < rows and 0 <= c < cols else MPI.PROC_NULL

        steps = [
            (padded[:, inner, width], peer(row, col + 1), padded[:, inner, 0], peer(row, col - 1)),
            (padded[:, inner, 1], peer(row, col - 1), padded[:, inner, -1], peer(row, col + 1)),
            (padded[:, height], peer(row + 1, col), padded[:, 0], peer(row - 1, col)),
            (padded[:, 1], peer(row - 1, col), padded[:, -1], peer(row + 1, col)),
        ]
        calls = [
            (_typed([send])[0], target, _typed([receive])[0], source)
            for send, target, receive, source in steps
        ]

        def exchange() -> None:
            for outgoing, target, incoming, source in calls:
                self.comm.Sendrecv(outgoing, target, 0, incoming, source)

        return exchange

    def _memcpy(self) -> Variant:
        source = torch.ones(self.bytes // 4, device=self.tile.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def _typed(views: Sequence[Tensor]) -> list[list[object]]:
    """Views as messages of one derived datatype each."""
    return [
        [MPI.buffer.fromaddress(view.data_ptr(), mpi_type(view).extent), 1, mpi_type(view)]
        for view in views
    ]


def _absolute(views: Sequence[Tensor]) -> list[object]:
    addresses = [view.data_ptr() for view in views]
    return [MPI.BOTTOM, [1] * len(views), addresses, [mpi_type(view) for view in views]]


def _room(views: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous memory of the same shapes."""
    return [torch.empty(view.shape, device=view.device) for view in views]


def _copy(tensors: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for tensor, target in zip(tensors, into, strict=True):
        target.copy_(tensor, non_blocking=True)


# --- all-reduces


def other_backend(device: torch.device) -> str:
    """PyTorch's own backend for a device: gloo on CPUs, NCCL or its equivalent on accelerators.

    Raises:
        ValueError: ranks share a device, which NCCL does not support.
    """
    path = choose_device_path(start_world(), device)
    if path is None:
        return "gloo"
    name = backend_for(device)
    if name is None or path.name != "nccl":
        raise ValueError(f"no other backend to compare with on {device.type}: {path.reason}")
    return name


_Group: Any = ProcessGroup  # its stubs lack the constructor's parameters


class _Nothing(_Group):  # type: ignore[misc]
    """Process group in Python with an empty all-reduce, to measure PyTorch's overhead."""

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Work:
        return FINISHED


def all_reduces(
    most: int, rounds: int, device: torch.device, others: dict[str, dist.ProcessGroup]
) -> dict[str, dict[str, list[float]]]:
    """Seconds of an all-reduce by size, backend and round, on the mpi4py backend and others."""
    found, comm = {}, MPI.Intracomm(MPI.COMM_WORLD.Dup())
    nothing = _Nothing(dist.get_rank(), dist.get_world_size())
    for size in (4**power for power in range(1, 14) if 4**power <= most):
        tensor = torch.zeros(size // 4, device=device)
        variants: dict[str, Variant] = {
            name: partial(dist.all_reduce, tensor, group=group)
            for name, group in {OURS: None, **others, CALL: nothing}.items()
        }
        variants[RAW] = _raw(tensor, comm)
        calls = max(1, min(200, BYTES_A_ROUND // size))
        found[str(size)] = time_calls(variants, rounds, calls, device, start_world())
    return found


def _raw(tensor: Tensor, comm: MPI.Intracomm) -> Variant:
    """All-reduce with plain mpi4py; tensors on an accelerator are staged in pinned memory."""
    on_host = tensor if tensor.is_cpu else torch.zeros(tensor.shape, pin_memory=True)
    message = [buffer(on_host), on_host.numel(), MPI.FLOAT]

    def add() -> None:
        if not tensor.is_cpu:
            on_host.copy_(tensor, non_blocking=True)
            torch.accelerator.current_stream(tensor.device).synchronize()
        comm.Allreduce(MPI.IN_PLACE, message, MPI.SUM)
        if not tensor.is_cpu:
            tensor.copy_(on_host, non_blocking=True)

    return add
