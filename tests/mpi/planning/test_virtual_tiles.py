"""The counts of one virtual tile equal what ranks with virtual tiles send."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.dry import Talk
from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import stage_mesh
from spatialdl.comm.world import world
from spatialdl.models import resnet18, unet, vit
from spatialdl.parallel.layout import Layout
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.own_tile import TileRegion
from spatialdl.pipeline.steps import IMAGE
from spatialdl.pipeline.virtual_tiles import VirtualTiles
from spatialdl.planning.costs import NetworkCosts
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.tile import largest_part
from spatialdl.random import keyed
from spatialdl.streaming.memory import Memory

WORLD = world()
RANKS = WORLD.size
SAMPLES = 2
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "resnet": (lambda: resnet18(num_classes=10, width=8), (3, 103, 97)),
    "vit": (lambda: vit(num_classes=10, patch=4, width=48, depth=2, heads=4), (3, 48, 48)),
    "unet": (lambda: unet(num_classes=5, width=8, depth=2), (3, 90, 101)),
}


@contextmanager
def overheard(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Talk]]:
    """What this process sends, or brings to sums."""
    heard: list[Talk] = []
    start = comm.start_exchange

    def starting(one: Any) -> Any:
        peers = {piece.peer for piece in (*one.outgoing, *one.incoming)}
        heard.append(Talk("exchange", len(peers), sum(view.nbytes for view in one.leaving())))
        return start(one)

    def collective(kind: Any, name: str) -> None:
        function = getattr(comm, name)

        def noted(values: Tensor) -> Tensor:
            heard.append(Talk(kind, comm.size, values.nbytes))
            return function(values)

        patch.setattr(comm, name, noted)

    with monkeypatch.context() as patch:
        patch.setattr(check, "agree", lambda *about: None)
        patch.setattr(comm, "start_exchange", starting)
        collective("sum", "all_reduce")
        collective("gather", "all_gather")
        yield heard


def told(costs: NetworkCosts) -> list[Talk]:
    parts = costs.layers
    assert costs.loss is not None
    own = [talk for part in parts for talk in part.forward_messages] + costs.loss.forward_messages
    back = [talk for part in reversed(parts) for talk in part.backward_messages]
    return own + costs.loss.backward_messages + back


@pytest.mark.parametrize("stream", [(2, 2), (1, 3), (1, 1)])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.world(1, 2, 3)
def test_ranks_send_what_is_counted(name, stream, monkeypatch):
    torch.manual_seed(0)
    make, image = NETWORKS[name]
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    job = PlannedJob(make(), image, SAMPLES, optimizer, segments=name == "unet", on_cpu=False)
    placement = Placement(1, ((RANKS, 1),), stream=stream)
    costs = job.costs(SAMPLES, placement.grids[0], False, True, stream=stream)
    mesh = stage_mesh(placement, placement.positions(WORLD.rank)[0], WORLD)
    tiles = VirtualTiles(job.model.train(), mesh, False, None, Memory())
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
            made = tiles.forward({IMAGE: region(whole)}, shapes, SAMPLES, torch.device("cpu"))
        labels = region(masks) if job.segments else torch.zeros(SAMPLES, dtype=torch.int64)
        criterion = functools.partial(F.cross_entropy, reduction="sum" if job.segments else "mean")
        made.backward_of_loss(criterion, labels, 1.0)

    if tiles.across is None:
        step()
        assert told(costs) == []
        return
    with overheard(tiles.across._comm, monkeypatch) as heard:
        step()
    if WORLD.rank == largest_part(mesh.layout(SAMPLES, image[1:])):
        assert heard == told(costs)
