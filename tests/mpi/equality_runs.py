"""Training steps of a layout, and the same ones on one process.

The reference is plain PyTorch in a loop, without a line of ours: it accumulates over the same
slices of the batch, micro-batch by micro-batch, within it replica by replica. Buffers that are not
BatchNorm's are each replica's own, and the first one's at the end of a step. Only where a network
draws random numbers it does so by the same keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import from_local
from spatialdl.comm.mesh import Mesh
from spatialdl.data.format import UNLABELLED
from spatialdl.layout.layout import even_bounds
from spatialdl.models import VisionTransformer
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.own_tile import TileRegion
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.spatial.random import keyed, scope
from spatialdl.spatial.streaming.memory import memory_within
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.tasks.losses import segmentation_loss
from spatialdl.training.tasks.task import Task
from tests.mpi.device import DEVICE, REFERENCE
from tests.mpi.equality_cases import Case
from tests.mpi.equality_networks import NETWORKS, Plain, Transformer
from tests.mpi.sample_networks import TimmNorm

LIMIT_GB = 5e-4
"""Of memory for virtual tiles: a few of their activations."""

STEPS = 3
SEED = 11
TOLERANCE = 1e-10


class Outcome(NamedTuple):
    """`outputs` of an evaluation after training, on each rank by the first sample."""

    losses: list[float]
    state: dict[str, Tensor]
    outputs: dict[int, Tensor]


def images_and_labels(case: Case, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(case.batch, 3, *case.size, dtype=torch.float64, generator=draw)
    images = images.to(dtype)
    if not case.segments:
        return images, torch.randint(5, (case.batch,), generator=draw)
    masks = torch.randint(5, (case.batch, *case.size), generator=draw)
    masks[torch.rand(masks.shape, generator=draw) < 0.2] = UNLABELLED
    return images, masks


def network(case: Case, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return NETWORKS[case.network]().to(dtype)


def optimiser(parameters: object) -> torch.optim.Optimizer:
    trained = list(parameters) or [nn.Parameter(torch.empty(0))]  # type: ignore[call-overload]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


def slices(case: Case) -> list[list[tuple[int, int]]]:
    """Per micro-batch, per replica: the samples [start, stop) of the batch."""
    result = []
    for start, stop in pairwise(even_bounds(case.batch, case.microbatches)):
        cuts = even_bounds(stop - start, case.data)
        result.append([(start + a, start + b) for a, b in pairwise(cuts)])
    return result


def forward(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, Plain | Transformer):
        model.scoped = True
    if isinstance(model, VisionTransformer):
        with drawing_by_name(model):
            return model(x)
    if not isinstance(model, nn.Sequential):
        return model(x)
    for name, layer in model.named_children():
        with scope(name):
            x = layer(x)
    return x


@contextmanager
def drawing_by_name(model: VisionTransformer) -> Iterator[None]:
    """Modules draw random numbers by the names of the steps of a pipeline."""
    names = ["pos_drop", *(f"blocks.{number}" for number in range(len(model.blocks)))]
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.enter_context(patch.object(module, "forward", scope(name)(module.forward)))
        yield


def autocast(mixed: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if mixed is None else torch.autocast(REFERENCE.type, mixed)


@cache
def reference(
    case: Case, dtype: torch.dtype = torch.float64, mixed: torch.dtype | None = None
) -> Outcome:
    """On rank 0, of which all ranks, that must call it, get it: ranks here share few cores."""
    own = alone(case, dtype, mixed) if MPI.COMM_WORLD.rank == 0 else None
    return MPI.COMM_WORLD.bcast(own)


def alone(case: Case, dtype: torch.dtype, mixed: torch.dtype | None) -> Outcome:
    device = torch.device("cpu") if mixed is None else REFERENCE
    model = network(case, dtype).to(device)
    optimizer = optimiser(model.parameters())
    losses = []
    for step in range(STEPS):
        images, labels = (one.to(device) for one in images_and_labels(case, step, dtype))
        model.train()
        optimizer.zero_grad()
        total = 0.0
        pieces = [piece for row in slices(case) for piece in row]
        own = OwnBuffers(case, model)
        for number, (start, stop) in enumerate(pieces):
            if stop > start:
                own.take(number)
                share = (stop - start) / case.batch
                with keyed(SEED, step, number), autocast(mixed):
                    output = forward(model, images[start:stop])
                    if case.segments and mixed:  # as `segmentation_loss`; on CUDA PyTorch's loss
                        output = output.float()  # rounds logarithms of half precision once more
                    loss = F.cross_entropy(output, labels[start:stop], ignore_index=255) * share
                loss.backward()
                total += loss.item()
        own.settle()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        losses.append(total)
    outputs = evaluated_alone(case, model, dtype, mixed)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    return Outcome(losses, state, {0: outputs})


@torch.no_grad()
def evaluated_alone(
    case: Case, model: nn.Module, dtype: torch.dtype, mixed: torch.dtype | None
) -> Tensor:
    images, _ = images_and_labels(case, STEPS, dtype)
    images, own, outputs = images.to(next(model.parameters()).device), OwnBuffers(case, model), []
    model.eval()
    for number, (start, stop) in enumerate(piece for row in slices(case) for piece in row):
        if stop > start:
            own.take(number)
            with keyed(SEED, -1, number), autocast(mixed):
                outputs.append(forward(model, images[start:stop]))
    own.settle()
    return torch.cat(outputs).cpu()


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class OwnBuffers:
    """Buffers of each replica and copy of the network in a step, other than BatchNorm's."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        placement = case._replace(order=()).placement
        made = make_schedule(case.schedule, placement, case.microbatches, case.times)
        self._copies = {one.microbatch: one.copy for actions in made.evaluate for one in actions}
        norms = {n for n, m in model.named_modules() if type(m) in (*BATCH_NORMS, TimmNorm)}
        self._model, self._data = model, case.data
        self._names = [n for n, _ in model.named_buffers() if n.rpartition(".")[0] not in norms]
        self._start, self._now = self._kept(), (-1, -1)
        self._of: dict[tuple[int, int], list[Tensor]] = {}
        self._slices: Counter[tuple[int, int]] = Counter()

    def take(self, number: int) -> None:
        """Before a slice: the buffers of the replica that has it."""
        self._of[self._now] = self._kept()
        self._now = self._copies[number // self._data], number % self._data
        self._slices[self._now] += 1
        self._set(self._of.get(self._now, self._start))

    def settle(self) -> None:
        """Those of the first of the replicas with most slices."""
        self._of[self._now] = self._kept()
        self._set(self._of[max(self._slices, key=self._slices.__getitem__)])

    def _kept(self) -> list[Tensor]:
        return [self._model.get_buffer(name).clone() for name in self._names]

    def _set(self, values: list[Tensor]) -> None:
        for name, value in zip(self._names, values, strict=True):
            self._model.get_buffer(name).copy_(value)


def parallel(
    case: Case,
    world: MPI.Intracomm,
    dtype: torch.dtype = torch.float64,
    mixed: torch.dtype | None = None,
    task: Task | None = None,
) -> Outcome:
    """Train with the loss of a task, or with cross entropy."""
    criterion = partial(segmentation_loss, classes=5) if case.segments else F.cross_entropy
    pipeline = PipelineRuntime(
        network(case, dtype),
        case.placement,
        make_schedule(case.schedule, case.placement, case.microbatches, case.times),
        world,
        task.loss if task else criterion,
        (3, *case.size),
        PipelineOptions(
            cut=case.cut or None,
            gather_before=case.gather_before or (),
            recompute={True: "block", False: "none"}.get(case.recompute, case.recompute),
            sync_batchnorm=case.sync,
            seed=SEED,
            shard_state=case.shard,
            mixed=mixed,
            device=DEVICE,
            sample_weights=task.weights if task else None,
            memory=memory_within(LIMIT_GB, None, DEVICE) if case.placement.stream else None,
        ),
    )
    optimizer = optimiser(pipeline.parameters())
    losses = []
    for step in range(STEPS):
        parts = microbatches(case, pipeline, step, dtype)
        losses.append(world.allreduce(float(pipeline.train_step(parts, step))))
        if case.clip:
            pipeline.gradients.clip(case.clip)
        optimizer.step()
    outputs = {}
    parts = microbatches(case, pipeline, STEPS, dtype)
    for number, output in pipeline.evaluate(parts).items():
        start, stop = slices(case)[number][pipeline.replica]
        first = start + pipeline.own_outputs(number, stop - start).start
        whole = output.full_tensor() if isinstance(output, SpatialTensor) else output
        outputs[first] = whole.cpu()
    state = {name: value.cpu() for name, value in pipeline.state_dict().items()}
    return Outcome(losses, state, outputs)


def microbatches(
    case: Case, pipeline: PipelineRuntime, step: int, dtype: torch.dtype
) -> list[Microbatch]:
    images, labels = images_and_labels(case, step, dtype)
    parts = []
    for number, row in enumerate(slices(case)):
        start, stop = row[pipeline.replica]
        first, last = pipeline.first(number), pipeline.last(number)
        one = Microbatch(
            stop - start,
            (stop - start) / case.batch,
            own_tile(case, first, images[start:stop]) if first else None,
            own_target(case, last, labels[start:stop]) if last else None,
        )
        if case.placement.stream and case.segments and last:
            masks = own_tile(case, last, labels[start:stop])
            one.target = None
            one.masks = TileRegion(tuple(masks.shape), masks.dtype, case.size, masks.__getitem__)
        parts.append(one)
    return parts


def own_tile(case: Case, mesh: Mesh, images: Tensor) -> Tensor:
    bounds = mesh.box(case.size)
    own = [slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
    return images[(..., *own)].to(DEVICE, copy=True)


def own_target(case: Case, mesh: Mesh, target: Tensor) -> Tensor:
    if not case.segments or mesh.parts == 1:
        return target.to(DEVICE)
    return from_local(own_tile(case, mesh, target), mesh, case.size)


def check_equality(case: Case, world: MPI.Intracomm) -> None:
    if case.placement.world_size != world.size:
        pytest.skip(f"needs {case.placement.describe()}")
    ours = parallel(case, world)
    # statistics over all replicas are those of one process that does not cut micro-batches
    plain = reference(case._replace(data=1) if case.sync else case)
    assert ours.losses == pytest.approx(plain.losses, abs=TOLERANCE)
    for name, value in ours.state.items():
        difference = (value.double() - plain.state[name].double()).abs().max()
        assert difference <= TOLERANCE, f"{name} differs by {difference}"
    for first, output in ours.outputs.items():
        expected = plain.outputs[0][first : first + len(output)]
        torch.testing.assert_close(output.double(), expected.double(), rtol=0, atol=TOLERANCE)
    names = set().union(*world.allgather(list(ours.state)))
    assert names == set(plain.state), "the stages together must hold the whole state dict"
