"""Ranks of the `late` benchmark: steps of one network, divided in several ways.

Rank 0 prints one line of JSON: by variant, seconds of each step on the slowest rank, CPU seconds of
all ranks, and MB that a rank holds and sends.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import spatialdl
from spatialdl.bench.device import Stopwatch, describe, take_device, worker_options
from spatialdl.bench.late import ALONE, CLASSES, SIDES, network_of
from spatialdl.channels.uses import uses_of, without_data
from spatialdl.channels.weights import divide, whole_outputs
from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.dry import Dry, record_talks
from spatialdl.comm.mesh import Mesh, dry_mesh
from spatialdl.parallel.layout import nearly_cubic
from spatialdl.spatial.meta import meta_copy
from spatialdl.spatial.replicas import BatchNormOver
from spatialdl.spatial.tensor import SpatialTensor

MB = 1e6


def main() -> None:
    install_abort_hook()
    options = worker_options()
    device = take_device(options.device)
    sides = [LateVariant(name, options, device) for name in _names(options)]
    world = sides[0].world
    with tqdm(
        total=len(sides) * (1 + options.rounds), desc="steps", unit="step", disable=world.rank != 0
    ) as progress:
        for side in sides:  # the first step allocates memory, and its loss is compared
            side.start()
            progress.update()
        check_alike({side.name: side.loss for side in sides}, world)
        draw = random.Random(0)  # the same order on all ranks
        for _ in range(options.rounds):
            for side in draw.sample(sides, len(sides)):
                side.measure()
                progress.update()
    if world.rank == 0:
        found = {side.name: side.found for side in sides}
        print(json.dumps({"device": describe(device), "sides": found}))


def _names(options: argparse.Namespace) -> list[str]:
    return [*SIDES, ALONE] if options.alone else list(SIDES)


def check_alike(losses: dict[str, float], world: Communicator) -> None:
    """Check that the losses of all variants agree, as seen by rank 0.

    Raises:
        RuntimeError: on all ranks: the losses differ.
    """
    losses = world.bcast(losses)
    expected = losses[SIDES[0]]
    for name, loss in losses.items():
        if abs(loss - expected) > 1e-3 * abs(expected):
            raise RuntimeError(f"loss of {name} is {loss}, but {expected} with {SIDES[0]} divided")


class LateVariant:
    """The layers divided in one way, on all ranks."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        self.name, self._device, self._ranks = name, device, options.ranks
        grid = nearly_cubic(options.ranks) if name == SIDES[0] else (1, 1)
        data = options.ranks if name == SIDES[1] else 1
        tensor = options.ranks if name == SIDES[2] else 1
        if name == ALONE:
            data = options.ranks  # only the first rank computes
        self.mesh = spatialdl.init_mesh(grid, data, check=False, tensor=tensor)
        self.world = self.mesh.tensor_comm if tensor > 1 else self.mesh.comm
        model, shape = network_of(options)
        self._without_data = meta_copy(model).train()
        self._works = name != ALONE or self.mesh.comm.rank == 0
        if not self._works:
            model = nn.Identity()
        self._model = model.to(device)
        if name != ALONE:
            self._model = spatialdl.SpatialParallel(model, self.mesh)
        draw = torch.Generator().manual_seed(0)
        self._images = torch.randn(options.batch, *shape, generator=draw).to(device)
        self._labels = torch.arange(options.batch, device=device) % CLASSES
        if name == SIDES[1]:
            own = options.batch // options.ranks
            rows = slice(self.mesh.replica * own, (self.mesh.replica + 1) * own)
            self._images, self._labels = self._images[rows].clone(), self._labels[rows]
        self._watch = Stopwatch(device)
        self.found: dict[str, Any] = {"seconds": [], "cpu_seconds": 0.0}
        self.loss = 0.0

    def start(self) -> None:
        """Run the first step, and measure what a rank holds and sends."""
        held: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            tile = x._tile if type(x) is SpatialTensor else x
            held[tile.untyped_storage().data_ptr()] = tile.untyped_storage().nbytes()
            return x

        if self._works:
            parameters = self._model.parameters()
            self._optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                loss = self._forward()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.loss = loss.item()
        if self.name == SIDES[1]:
            self.loss = self.mesh.comm.allreduce(self.loss) / self._ranks
        weights = {one.untyped_storage().data_ptr(): one.nbytes for one in self._model.parameters()}
        kept = sum(size for place, size in held.items() if place not in weights)
        self.found["held_mb"] = kept / MB
        self.found["weights_mb"] = 3 * sum(weights.values()) / MB
        self.found["sent_mb"] = self._sent() / MB

    def measure(self) -> None:
        """Measure one step on the slowest rank."""
        own = spent = 0.0
        self.world.barrier()
        if self._works:
            cpu = time.process_time()
            self._watch.start()
            self._optimizer.zero_grad()
            self._forward().backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            own, spent = self._watch.stop(), time.process_time() - cpu
        of_ranks = self.world.allgather((own, spent))
        self.found["seconds"].append(max(seconds for seconds, _ in of_ranks))
        total = sum(seconds for _, seconds in of_ranks)
        count = len(self.found["seconds"])
        self.found["cpu_seconds"] += (total - self.found["cpu_seconds"]) / count

    def _forward(self) -> Tensor:
        images = self._images.requires_grad_()  # earlier layers would need it
        x = spatialdl.shard(images, self.mesh) if self.name == SIDES[0] else images
        with self._statistics(self.mesh.comm):
            return F.cross_entropy(self._model(x), self._labels)

    def _statistics(self, comm: Communicator) -> AbstractContextManager[object]:
        """BatchNorm statistics over the samples of all ranks."""
        return BatchNormOver(comm) if self.name == SIDES[1] else nullcontext()

    def _sent(self) -> int:
        """Bytes that a rank sends or all-reduces in a step, from a dry run."""
        if self.name == ALONE:
            return 0
        model, comm = self._without_data, Dry(0, self._ranks)
        mesh = dry_mesh(self.mesh.grid)
        with record_talks() as talks, torch.device("meta"):
            x = _input(self, mesh)
            if self.name == SIDES[2]:
                divide(model, uses_of(model, comm, lambda shadow: shadow(without_data(x))), comm)
                talks.clear()
            with self._statistics(comm):
                y = whole_outputs(model(x))
                y.sum().backward()
        sent = sum(one.bytes for one in talks)
        averaged = 0 if self.name == SIDES[2] else sum(one.nbytes for one in model.parameters())
        return sent + averaged


def _input(side: LateVariant, mesh: Mesh) -> Tensor:
    """This rank's part of the images, for the dry run."""
    shape = list(side._images.shape)
    if side.name != SIDES[0]:
        return torch.empty(shape, requires_grad=True)
    layout = mesh.layout(shape[0], shape[2:])
    tile = torch.empty(*shape[:2], *mesh.own_box(layout).shape[1:])
    return SpatialTensor(tile, layout, mesh, requires_grad=True)


if __name__ == "__main__":
    main()
