"""The counts of a divided stage equal what its ranks send, hold and keep."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl.comm import check
from spatialdl.comm.dry import Talk
from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh, stage_mesh
from spatialdl.comm.world import world
from spatialdl.layout.layout import Layout
from spatialdl.layout.placement import Placement
from spatialdl.models import resnet18, resnet50, unet, vit
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.own_tile import TileRegion, enter
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.stage import OUTPUT, run_stage
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.pipeline.virtual_tiles import VirtualTiles
from spatialdl.planning.costs import NetworkCosts
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.program import DividedStage, largest_part
from spatialdl.spatial.channels.weights import divide, full_outputs, uses_of, without_data
from spatialdl.spatial.random import keyed
from spatialdl.spatial.streaming.memory import Memory

WORLD = world()
RANKS = WORLD.size
SAMPLES = 2


def vgg_head() -> nn.Sequential:
    """Its last convolution, on which the dense layers lie."""
    maps = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    dense = (nn.Linear(8 * 8 * 6, 32), nn.ReLU(inplace=True), nn.Linear(32, 24), nn.Linear(24, 10))
    return nn.Sequential(*maps, nn.Flatten(), *dense)


Networks = dict[str, tuple[Any, tuple[int, ...]]]
NETWORKS: Networks = {
    "resnet": (lambda: resnet50(num_classes=10, width=8), (3, 64, 48)),
    "vgg head": (vgg_head, (3, 16, 12)),
    "vit": (lambda: vit(num_classes=10, patch=8, width=48, depth=2, heads=4), (3, 32, 24)),
    "unet": (lambda: unet(num_classes=5, width=8, depth=2), (3, 32, 24)),
}


def job_of(name: str, networks: Networks = NETWORKS) -> PlannedJob:
    torch.manual_seed(0)
    make, image = networks[name]
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return PlannedJob(make(), image, SAMPLES, optimizer, segments=name == "unet", on_cpu=False)


def exchanged(one: Any, axis: Any) -> Talk:
    """What this rank sends in an exchange, and to how many."""
    peers = {piece.peer for piece in (*one.outgoing, *one.incoming)}
    return Talk("exchange", len(peers), sum(view.nbytes for view in one.leaving()), axis)


def note_messages(comm: Any, heard: list[Talk], patch: pytest.MonkeyPatch, axis: Any) -> None:
    def note(kind: Any, name: str) -> None:
        function = getattr(comm, name)

        def noted(values: Tensor) -> Tensor:
            heard.append(Talk(kind, comm.size, values.nbytes, axis))
            return function(values)

        patch.setattr(comm, name, noted)

    note("sum", "all_reduce")
    note("gather", "all_gather")
    start = comm.start_exchange

    def starting(one: Any) -> Any:
        heard.append(exchanged(one, axis))
        return start(one)

    patch.setattr(comm, "start_exchange", starting)


@contextmanager
def overheard(comms: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Talk]]:
    """What this rank sends, or brings to sums, to ranks of these axes."""
    heard: list[Talk] = []
    with monkeypatch.context() as patch:
        patch.setattr(check, "agree", lambda *about: None)
        for axis, comm in comms.items():
            note_messages(comm, heard, patch, axis)
        yield heard


def axes_of(mesh: Mesh) -> dict[str, Any]:
    """One where both are the same."""
    axes = {"grid": mesh.grid_comm, "tensor": mesh.tensor_comm}
    return axes if mesh.tensor_comm is not mesh.grid_comm else {"tensor": mesh.tensor_comm}


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd saves, by address."""
    found: dict[int, int] = {}
    held = []  # so that no address comes twice

    def pack(x: Tensor) -> Tensor:
        own = x._tile if isinstance(x, spatialdl.SpatialTensor) else x
        held.append(own)
        found[own.untyped_storage().data_ptr()] = own.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found


def loss_of(output: Tensor, mesh: Mesh) -> Tensor:
    """As the dry run takes it."""
    target = torch.zeros(SAMPLES, *output.shape[2:], dtype=torch.int64)
    if mesh.parts > 1 and output.dim() > 2:
        target = spatialdl.shard(target, mesh)
    return F.cross_entropy(output, target, reduction="sum" if output.dim() > 2 else "mean")


def told(costs: NetworkCosts, which: DividedStage) -> list[Talk]:
    parts = costs.layers[which.first : which.after]
    own = [talk for part in parts for talk in part.forward_messages]
    back = [talk for part in reversed(parts) for talk in part.backward_messages]
    loss = costs.loss
    if loss is not None and which.after == len(costs.layers):
        own, back = own + loss.forward_messages, loss.backward_messages + back
    return own + back


def assert_counted(
    heard: list[Talk], costs: NetworkCosts, which: DividedStage, module: nn.Module, is_counted: bool
) -> None:
    """Of the rank of the dry run, which has the largest part."""
    if is_counted:
        assert heard == told(costs, which)
        own = sum(one.nbytes for one in module.parameters())
        assert own == sum(one.weights for one in costs.layers[which.first : which.after])
    has_weights = next(module.parameters(), None) is not None
    assert any(talk.axis == "tensor" for talk in heard) is has_weights


def assert_network(
    name: str,
    placement: Placement,
    monkeypatch: pytest.MonkeyPatch,
    plan: tuple[tuple[str, str], ...] = (),
) -> None:
    job, grid, tensor = job_of(name), placement.grids[0], placement.tensor_parts(0)
    (position,) = placement.positions(WORLD.rank)
    mesh = stage_mesh(placement, position, WORLD)
    program = job.program()
    which = DividedStage(tensor, 0, len(program.parts(not program.is_chain).pieces), plan)
    costs = job.costs(SAMPLES, grid, False, True, which)
    model = job.model.train()
    image = torch.randn(SAMPLES, *job.image)
    tiles = image if mesh.parts == 1 else spatialdl.shard(image, mesh)
    run = lambda shadow: shadow(without_data(tiles))  # noqa: E731
    divide(model, uses_of(model, mesh.tensor_comm, run, dict(plan)), mesh.tensor_comm)
    with overheard(axes_of(mesh), monkeypatch) as heard, keyed(0, 0, 0):
        with kept() as saved:
            output = full_outputs(model(tiles))
        loss_of(output, mesh).backward()
    largest = largest_part(mesh.layout(SAMPLES, job.image[1:]))
    is_counted = (position.tensor, position.part) == (tensor - 1, largest)
    assert_counted(heard, costs, which, model, is_counted)
    if is_counted and mesh.parts == 1:
        known = {one.untyped_storage().data_ptr() for one in (*model.state_dict().values(), image)}
        held = sum(size for place, size in saved.items() if place not in known)
        assert costs.lives.held(0, which.after, ()) == held


@pytest.mark.parametrize("name", ["resnet", "unet"])
@pytest.mark.world(2, 3)
def test_a_divided_network_sends_and_holds_what_is_counted(name, monkeypatch):
    assert_network(name, Placement(1, ((1, 1),), tensor=(RANKS,)), monkeypatch)


PLANS = {
    "vgg head": (("0", "input"), ("4", "output"), ("6", "output")),
    "vit": (("*", "output"),),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.world(2, 3)
def test_a_plan_of_what_is_divided_is_counted(name, monkeypatch):
    """The planner counted what it would have found out itself."""
    job, grid = job_of(name), (1, 1)
    after = len(job.program().parts(not job.program().is_chain).pieces)
    own, planned = (
        told(job.costs(SAMPLES, grid, False, True, which), which)
        for which in (DividedStage(RANKS, 0, after), DividedStage(RANKS, 0, after, PLANS[name]))
    )
    assert own != planned
    assert_network(name, Placement(1, (grid,), tensor=(RANKS,)), monkeypatch, PLANS[name])


@pytest.mark.world(4)
def test_so_does_one_on_tiles(monkeypatch):
    assert_network("unet", Placement(1, ((2, 1),), tensor=(2,)), monkeypatch)


STAGES = [("vgg head", False, 1), ("vit", True, 0), ("unet", False, 2), ("resnet", False, 1)]


@pytest.mark.parametrize(("name", "again", "stage"), STAGES)
@pytest.mark.world(2, 3)
def test_a_divided_stage_sends_and_holds_what_is_counted(name, again, stage, monkeypatch):
    """Of three stages one is divided; what it takes and gives is whole."""
    job = job_of(name)
    widths = tuple(RANKS if number == stage else 1 for number in range(3))
    placement = Placement(1, ((1, 1),), tensor=(RANKS,))
    mesh = stage_mesh(placement, placement.positions(WORLD.rank)[0], WORLD)
    bounds = job.bounds(widths, again)
    first, after = job.parts(bounds, again)[stage]
    which = DividedStage(RANKS, first, after)
    costs = job.costs(SAMPLES, (1, 1), again, divided=which)
    stages = cut(job.model, widths, None, job.image, again)
    values: dict[Value, Tensor] = {IMAGE: torch.randn(SAMPLES, *job.image)}
    for one in stages[:stage]:
        values |= run_stage(one.train(), values, SAMPLES)
    taken: dict[Value, Tensor] = {v: values[v].detach() for v in stages[stage].takes}
    for value, one in taken.items():
        one.requires_grad_(value != IMAGE)
    own, entered = stages[stage].train(), {value: enter(one) for value, one in taken.items()}
    given = without_data(taken)
    uses = uses_of(own, mesh.tensor_comm, lambda shadow: run_stage(shadow, given, SAMPLES))
    divide(own, uses, mesh.tensor_comm)
    with overheard(axes_of(mesh), monkeypatch) as heard, keyed(0, 0, 0):
        outputs = full_outputs(run_stage(own, entered, SAMPLES))
        roots = [one for one in outputs.values() if one.requires_grad]
        if OUTPUT in outputs:
            roots = [loss_of(outputs[OUTPUT], mesh)]
        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
    assert_counted(heard, costs, which, own, WORLD.rank == RANKS - 1)


# --- virtual tiles


ODD_SIZES: Networks = {
    "resnet": (lambda: resnet18(num_classes=10, width=8), (3, 103, 97)),
    "vit": (lambda: vit(num_classes=10, patch=4, width=48, depth=2, heads=4), (3, 48, 48)),
    "unet": (lambda: unet(num_classes=5, width=8, depth=2), (3, 90, 101)),
}


def told_of(costs: NetworkCosts) -> list[Talk]:
    assert costs.loss is not None
    return told(costs, DividedStage(1, 0, len(costs.layers)))


@pytest.mark.parametrize(
    ("name", "stream"),
    [("resnet", (2, 2)), ("resnet", (1, 1)), ("vit", (1, 3)), ("unet", (2, 2))],
)
@pytest.mark.world(1, 2, 3)
def test_ranks_send_what_is_counted(name, stream, monkeypatch):
    job = job_of(name, ODD_SIZES)
    image = job.image
    placement = Placement(1, ((RANKS, 1),), stream=stream)
    costs = job.costs(SAMPLES, placement.grids[0], False, True, stream=stream)
    mesh = stage_mesh(placement, placement.positions(WORLD.rank)[0], WORLD)
    tiles = VirtualTiles(job.model.train(), mesh, PipelineOptions(), Memory())
    whole = torch.randn(SAMPLES, *image)
    masks = torch.zeros(SAMPLES, *image[1:], dtype=torch.int64)
    own = mesh.own_box(mesh.layout(SAMPLES, image[1:]))

    def region(full: Tensor) -> TileRegion:
        of_rank = full[(..., *own.slices_in(mesh.layout(SAMPLES, image[1:]).whole)[1:])]
        return TileRegion(tuple(of_rank.shape), full.dtype, image[1:], of_rank.__getitem__)

    layout = Layout.even(SAMPLES, image[1:], mesh.tile_grid)
    shapes = {IMAGE: HandoverShape(tuple(whole.shape), whole.dtype, layout, layout)}

    def step() -> None:
        with keyed(0, 0, 0):
            made = tiles.forward({IMAGE: region(whole)}, shapes, SAMPLES)
        labels = region(masks) if job.segments else torch.zeros(SAMPLES, dtype=torch.int64)
        criterion = functools.partial(F.cross_entropy, reduction="sum" if job.segments else "mean")
        made.backward_of_loss(criterion, labels, 1.0)

    if tiles.across is None:
        step()
        assert told_of(costs) == []
        return
    with overheard({"grid": tiles.across._comm}, monkeypatch) as heard:
        step()
    if WORLD.rank == largest_part(mesh.layout(SAMPLES, image[1:])):
        assert heard == told_of(costs)
