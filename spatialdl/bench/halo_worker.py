"""Ranks of the halo benchmark: exchanges of spatialdl and hand-written variants.

All variants move the same pieces of a tile, except the two-phase variant, which needs a padded
tile and sends corners with the rows. Prints one line of JSON: seconds of an exchange on the slowest
rank, by variant and round.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

import spatialdl
from spatialdl.bench.device import Stopwatch, describe, take_device, worker_options
from spatialdl.bench.halo_device import DevicePieces, variants_on_device
from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.boxed import BoxedTensor, Exchange, views_of
from spatialdl.comm.datatypes import buffer, mpi_type
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import view_of
from spatialdl.comm.single_process import Completed, SingleProcess
from spatialdl.parallel.layout import Layout, Window, needed_boxes
from spatialdl.spatial.conv import TileGeometry, tile_geometry

Variant = Callable[[], None]
HALO = Window(kernel=3, padding=1)


def main() -> None:
    install_abort_hook()
    options = worker_options()
    device = take_device(options.device)
    mesh = spatialdl.init_mesh(tuple(options.grid), check=False)
    halo = Halo(mesh, options.channels, options.side, device)
    seconds = measure(halo, options.rounds, options.exchanges)
    if mesh.comm.rank == 0:
        result = {
            "seconds": seconds,
            "bytes": halo.bytes,
            "way": getattr(mesh.grid_comm, "way", None),
            "device": describe(device),
            "mpi": MPI.Get_library_version(),
        }
        print(json.dumps(result))


def measure(halo: Halo, rounds: int, exchanges: int) -> dict[str, list[float]]:
    """Seconds of an exchange by variant and round.

    Variants run in a random order each round, so that none profits from the caches of another.
    """
    variants = halo.variants()
    for exchange in variants.values():
        exchange()
    halo.check()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    rng = random.Random(0)  # the same order on all ranks
    watch = Stopwatch(halo.tile.device)
    for _ in range(rounds):
        for name, exchange in rng.sample(list(variants.items()), len(variants)):
            halo.comm.Barrier()
            watch.start()
            for _ in range(exchanges):
                exchange()
            own = watch.stop() / exchanges
            seconds[name].append(halo.comm.allreduce(own, op=MPI.MAX))
    return seconds


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
        self.plan: Plan = plan_for(layout.boxes, needed_boxes(layout, (HALO, HALO)), mesh.part)
        geometry = tile_geometry(layout, layout, (HALO, HALO), mesh.part)
        if geometry is None:
            raise ValueError(f"tiles of {side}x{side} pixels have no halo")
        self.geometry: TileGeometry = geometry
        picture = torch.arange(rows * side).view(-1, 1) * 1000.0 + torch.arange(cols * side)
        self._image = picture.expand(1, channels, -1, -1)
        self.tile = view_of(self._image, layout.whole, self.plan.own).to(device, copy=True)
        self.strips = geometry.strips(self.tile)
        self.sends = views_of(self.plan.sends, [BoxedTensor(self.tile, self.plan.own)])
        self.receives = views_of(self.plan.receives, geometry.held(self.strips))
        self.targets = [piece.peer for piece in self.plan.sends]
        self.sources = [piece.peer for piece in self.plan.receives]
        self.bytes = sum(view.numel() for view in self.sends) * self.tile.element_size()
        self._layout = layout

    def variants(self) -> dict[str, Variant]:
        """Order: ours, hand-written with all set up beforehand, lower bounds."""
        return {
            "spatialdl": self._ours(),
            "spatialdl, new strips": self._ours(new_strips=True),
            **(self._by_hand() if self.tile.is_cpu else self._by_hand_on_device()),
            "no communication": self._nothing(),
            "memcpy": self._memcpy(),
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
        pieces = DevicePieces(self.sends, self.receives, self.targets, self.sources)
        return variants_on_device(pieces, self.comm)

    def check(self) -> None:
        """Check that the strips hold the neighbours' pixels."""
        for piece, view in zip(self.plan.receives, self.receives, strict=True):
            if not torch.equal(view.cpu(), view_of(self._image, self._layout.whole, piece.box)):
                raise RuntimeError(f"wrong pixels in {piece.box}")

    def _ours(self, new_strips: bool = False) -> Variant:
        """Exchange as in a convolution, which allocates new strips each time."""
        comm, plan, geometry, tile = self.mesh.grid_comm, self.plan, self.geometry, self.tile

        def exchange() -> None:
            strips = geometry.strips(tile) if new_strips else self.strips
            halo = Exchange(plan, [BoxedTensor(tile, plan.own)], geometry.held(strips), tile.device)
            start_exchange(comm, halo, "halo").wait()

        return exchange

    def _nothing(self) -> Variant:
        """Exchange of spatialdl with a communicator that moves nothing."""
        silent, plan, geometry, tile = SilentExchange(), self.plan, self.geometry, self.tile

        def exchange() -> None:
            halo = Exchange(
                plan, [BoxedTensor(tile, plan.own)], geometry.held(self.strips), tile.device
            )
            start_exchange(silent, halo, "halo").wait()

        return exchange

    def _packed(self) -> Variant:
        outgoing = [torch.empty(view.shape) for view in self.sends]
        incoming = [torch.empty(view.shape) for view in self.receives]
        outgoing_memory, incoming_memory = (list(map(buffer, x)) for x in (outgoing, incoming))

        def exchange() -> None:
            requests = [
                self.comm.Irecv(memory, source)
                for memory, source in zip(incoming_memory, self.sources, strict=True)
            ]
            for view, packed, memory, target in zip(
                self.sends, outgoing, outgoing_memory, self.targets, strict=True
            ):
                packed.copy_(view)
                requests.append(self.comm.Isend(memory, target))
            MPI.Request.Waitall(requests)
            for view, packed in zip(self.receives, incoming, strict=True):
                view.copy_(packed)

        return exchange

    def _typed(self) -> Variant:
        outgoing, incoming = map(_typed, (self.sends, self.receives))

        def exchange() -> None:
            requests = [
                self.comm.Irecv(message, source)
                for message, source in zip(incoming, self.sources, strict=True)
            ]
            requests += [
                self.comm.Isend(message, target)
                for message, target in zip(outgoing, self.targets, strict=True)
            ]
            MPI.Request.Waitall(requests)

        return exchange

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

        def exchange() -> None:
            graph.Neighbor_alltoallw(outgoing, incoming)

        return exchange

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

        def exchange() -> None:
            target.copy_(source)

        return exchange


def _typed(views: Sequence[Tensor]) -> list[list[object]]:
    """Views as messages of one derived datatype each."""
    return [
        [MPI.buffer.fromaddress(view.data_ptr(), mpi_type(view).extent), 1, mpi_type(view)]
        for view in views
    ]


def _absolute(views: Sequence[Tensor]) -> list[object]:
    addresses = [view.data_ptr() for view in views]
    return [MPI.BOTTOM, [1] * len(views), addresses, [mpi_type(view) for view in views]]


if __name__ == "__main__":
    main()
