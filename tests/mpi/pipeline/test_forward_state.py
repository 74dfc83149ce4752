"""State that a forward changes, and that replicas cannot follow, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils.checkpoint import checkpoint

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch

pytestmark = [pytest.mark.usefixtures("ends_process_group"), pytest.mark.world(2, 3)]


class Data(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class Clamped(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


class Shrinking(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


class Swapped(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.detach() * 0.99
        return super().forward(x)


class Unseen(nn.Conv2d):
    """By what PyTorch knows nothing about."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach().numpy()[:] *= 0.99
        return super().forward(x)


class Late(nn.Conv2d):
    """Not in the first step."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().mean() > 0.5:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
        return super().forward(x)


class Hooked(nn.Conv2d):
    """Changes it in a hook."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.register_forward_pre_hook(shrink)


class Larger(nn.Conv2d):
    """Has a buffer that grows."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.cat([self.mean, x.detach().mean()[None].to(self.mean)])
        return super().forward(x)


class Rerun(nn.Conv2d):
    """Updates a buffer, which PyTorch's counter does not see, again in backward."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.normalised, x, use_reentrant=False)

    def normalised(self, x: Tensor) -> Tensor:
        statistics = self.mean, torch.ones_like(self.mean)
        return super().forward(F.batch_norm(x, *statistics, training=True))


def shrink(module: nn.Module, args: object) -> None:
    module.weight.data.mul_(0.99)  # type: ignore[union-attr, operator]


def network(kind: type[nn.Conv2d]) -> nn.Module:
    layers = nn.Conv2d(3, 4, 3), nn.Tanh(), kind(4, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)
    return nn.Sequential(*layers).double()


def train(model: nn.Module, world: Communicator, layout: str, steps: int = 3) -> None:
    """Two micro-batches a step; from the third step on images are other ones."""
    row, column = ((1, 1),) * world.size, (world.size, 1)
    placement = {
        "gems": Placement(1, row, mirrored=True),
        "local_dp": Placement(1, ((1, 1), (1, 1)), batch=(1, max(1, world.size - 1))),
        "sp": Placement(1, (column,)),
        "pp": Placement(1, row),
    }.get(layout, Placement(world.size, ((1, 1),)))
    pipeline = PipelineRuntime(
        model,
        placement,
        make_schedule("mast" if layout == "gems" else "gpipe", placement, 2),
        world,
        F.cross_entropy,
        (3, 8, 8),
        PipelineOptions(
            cut=["2"] if layout == "local_dp" else None,
            gather_before="3" if layout == "sp" else (),
            shard_state=layout == "shard",
        ),
    )
    trained = [*pipeline.parameters()] or [nn.Parameter(torch.empty(0))]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    samples = 0 if layout == "uneven" and pipeline.replica > 0 else 2
    for step in range(steps):
        images = torch.full((samples, 3, 8, 8), 100.0 * (step > 1)).double()
        batch = []
        for number in range(2):
            first, last = pipeline.first(number), pipeline.last(number)
            r0, r1, c0, c1 = first.box((8, 8)) if first else (0, 0, 0, 0)
            tile = images[..., r0:r1, c0:c1] if first else None
            target = torch.zeros(samples, dtype=torch.long) if last else None
            batch.append(Microbatch(samples, 0.5 / placement.data, tile, target))
        pipeline.train_step(batch, step)
        optimizer.step()


REFUSED = r"the forward changes the parameter '2\.weight'"
WRITING = [
    ("uneven", Unseen),  # in other layouts PyTorch refuses it, or the network is not cut
    *product(("uneven",), (Data, Clamped, Swapped, Hooked)),
    # on three ranks the middle one has this stage in both copies, once, as a single process has
    *product(["gems"] * (MPI.COMM_WORLD.size % 2 == 0), (Clamped, Swapped)),
    *product(("shard",), (Data, Hooked)),
    # others are refused before training, as samples that depend on each other
    *product(["local_dp"] * (MPI.COMM_WORLD.size > 2), (Data,)),
]


@pytest.mark.parametrize(("layout", "kind"), WRITING)
def test_a_forward_that_changes_a_parameter_is_refused_on_all_ranks_that_hold_it(
    layout: str, kind: type[nn.Conv2d], world: Communicator
) -> None:
    holds = layout != "local_dp" or world.rank > 0
    with pytest.raises(UnsupportedSpatialOp, match=REFUSED) if holds else nullcontext():
        # with local_dp a try before the first step has clamped them already
        train(network(kind), world, layout, steps=2 if layout == "local_dp" else 1)


@pytest.mark.parametrize("layout", ["dp", "shard"])
def test_one_that_begins_later_is_refused_by_its_version(layout: str, world: Communicator) -> None:
    train(network(Late), world, layout, steps=2)
    with pytest.raises(UnsupportedSpatialOp, match=REFUSED):
        train(network(Late), world, layout)


@pytest.mark.parametrize(
    ("layout", "kind", "what"),
    [
        ("dp", Larger, r"Larger changes the shape of its buffer '2\.mean'"),
        *((one, Rerun, r"Rerun updates its buffer '2\.mean' again") for one in ("dp", "alone")),
    ],
)
def test_buffers_that_no_replica_can_take_over_are_refused(
    layout: str, kind: type[nn.Conv2d], what: str, world: Communicator
) -> None:
    with pytest.raises(UnsupportedSpatialOp, match=what):
        train(network(kind), SingleProcess() if layout == "alone" else world, layout, steps=1)


@pytest.mark.parametrize("layout", ["sp", "pp"])
def test_ranks_without_samples_of_their_own_may(layout: str, world: Communicator) -> None:
    train(network(Shrinking), world, layout)


Changes = Callable[[nn.Module], object]
PARAMETRIZED = parametrizations.spectral_norm, parametrizations.weight_norm


@pytest.mark.parametrize(
    ("layout", "first", "second"),
    [
        *((one, *PARAMETRIZED) for one in ("uneven", "shard")),
        ("uneven", weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
    ],
)
def test_weights_that_are_computed_in_forward_are_no_change(
    layout: str, first: Changes, second: Changes, world: Communicator
) -> None:
    model = network(nn.Conv2d)
    first(model[0])
    second(model[2])
    train(model, world, layout)
