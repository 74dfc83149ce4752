"""All refusals of a network with their lines, of stages as they are cut, and nothing else."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import gather_before, init_mesh
from spatialdl.comm.mesh import Mesh
from spatialdl.layout.placement import Placement
from spatialdl.models import resnet18, resnet50, unet
from spatialdl.planning.costs import count
from spatialdl.planning.preflight import dry_loss, preflight
from spatialdl.planning.program import Program
from spatialdl.training.tasks.losses import classification_loss, segmentation_loss
from tests.planning.conftest import Writing

TWO = Placement(1, ((2, 1),))
THREE = Placement(1, ((2, 1), (1, 1)))
SHAPE = (2, 3, 33, 18)


class Cumulated(nn.Module):
    def forward(self, x):
        return x.cumsum(2)  # in a module


class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.inner = nn.Sequential(nn.ReLU(), Cumulated())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        x = x.sort(2)[0]  # one
        x = self.inner(x)
        x = x.sort(3)[0]  # two
        x.cumsum_(3)  # in place
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def line(text: str) -> str:
    """``file:line`` of a comment above."""
    source = inspect.getsource(inspect.getmodule(Refused)).splitlines()
    return f"{__file__}:{next(n for n, one in enumerate(source, 1) if one.endswith(f'# {text}'))}"


def places(found) -> list[tuple[str, str, str]]:
    return [(one.operation.rpartition(".")[2], one.where, one.module) for one in found.refusals]


EXPECTED = [
    ("sort", line("one"), "the network (Refused)"),
    ("cumsum", line("in a module"), "inner.1 (Cumulated)"),
    ("sort", line("two"), "the network (Refused)"),
    ("cumsum_", line("in place"), "the network (Refused)"),
]


def test_every_refusal_is_found_with_its_line_and_its_module():
    found = preflight(Refused(), TWO, SHAPE)
    assert places(found) == EXPECTED
    assert found.errors == []
    assert all("split 2x1 over 33x18" in one.reason for one in found.refusals)


def test_in_stages_only_what_is_done_on_tiles_is_refused():
    found = preflight(Refused(), THREE, SHAPE, names=["inner"])
    assert [(name, where) for name, where, _ in places(found)] == [EXPECTED[0][:2]]
    found = preflight(Refused(), Placement(1, ((2, 1), (2, 1))), SHAPE, names=["inner"])
    assert [(name, where) for name, where, _ in places(found)] == [one[:2] for one in EXPECTED]


@pytest.mark.parametrize(
    ("network", "placement"),
    [
        (lambda: resnet18(num_classes=3, width=4), Placement(1, ((2, 2), (2, 1), (1, 1)))),
        (lambda: unet(num_classes=3, width=4), Placement(1, ((2, 1), (2, 1)))),
    ],
)
def test_networks_that_work_pass(network, placement):
    found = preflight(network(), placement, (2, 3, 65, 48))
    assert found.is_clear, (found.refusals, found.errors)
    assert len(found.stages) == placement.stages
    assert found.entering[0] == (65, 48)


def test_images_of_any_size_and_hundreds_of_ranks_take_no_memory():
    found = preflight(resnet50(num_classes=3), Placement(1, ((16, 16),)), (2, 3, 100_000, 100_000))
    assert found.is_clear
    assert all(p.device.type == "meta" for one in found.stages for p in one.parameters())


class Branching(Refused):
    def forward(self, x):
        if x.mean() > 0:
            x = x + 1
        return super().forward(x)


class Wrong(Refused):
    def forward(self, x):
        return self.head(self.first(x).mean((2, 3)).view(7, 4))  # wrong


def test_a_network_that_cannot_be_cut_is_an_error_and_its_operations_are_told():
    found = preflight(Branching(), THREE, SHAPE)
    assert [name for name, _, _ in places(found)] == ["sort", "cumsum", "sort", "cumsum_"]
    assert found.errors[0].startswith("Branching cannot be cut into 2 stages")
    assert len(found.guesses) == 1
    alone = preflight(Branching(), TWO, SHAPE)
    assert alone.errors == []
    assert alone.guesses[0].startswith(__file__)


def test_other_errors_name_the_line():
    found = preflight(Wrong(), TWO, SHAPE)
    assert found.refusals == []
    assert len(found.errors) == 1
    assert line("wrong") in found.errors[0]


def test_a_border_that_cannot_be_passed_is_an_error():
    found = preflight(
        resnet18(num_classes=3, width=4),
        Placement(1, ((2, 2), (8, 8), (1, 1))),
        (2, 3, 64, 50),
        names=["layer4", "fc"],
    )
    assert len(found.errors) == 1
    assert "stage 1 would cut images of 4x4 into 8x8 tiles" in found.errors[0]


def test_a_head_over_a_flattened_map_is_not_refused():
    head = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(2 * 16, 3), nn.BatchNorm1d(3))
    assert preflight(nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), head), TWO, (2, 3, 4, 4)).is_clear
    normed = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.BatchNorm1d(2 * 16))
    found = preflight(normed, TWO, (2, 3, 4, 4))
    assert not found.is_clear
    assert "move it before the flattening" in str(found)


def test_a_gathered_head_is_not_refused():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3, padding=1)
            self.fc = nn.Linear(2 * 16, 3)

        def forward(self, x):
            return self.fc(self.flat(self.conv(x)))

        def flat(self, x):
            return x.flatten(1).sort(1)[0]

    class Gathering(Flat):
        def __init__(self):
            super().__init__()
            self.sorted = nn.Module()
            self.sorted.forward = self.flat

        def forward(self, x):
            return self.fc(self.sorted(self.conv(x)))

    assert not preflight(Flat(), TWO, (2, 3, 4, 4)).is_clear
    assert preflight(Gathering(), TWO, (2, 3, 4, 4), gather_before="sorted").is_clear
    missing = preflight(Gathering(), TWO, (2, 3, 4, 4), gather_before="sortet")
    assert "has no module 'sortet'" in missing.errors[0]


def test_the_network_stays_as_it_is():
    model = Refused()
    before = {name: p.clone() for name, p in model.named_parameters()}
    preflight(model, THREE, SHAPE, names=["inner"])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())
    assert next(model.parameters()).grad is None


SMALL = 50
"""Elements that do not count: sums, and weights of classes."""


@pytest.fixture(scope="module")
def alone() -> Mesh:
    return init_mesh((1, 1))


def kept(loss_of: Callable[[Tensor], Tensor | None], output: Tensor) -> Counter[object]:
    """Shapes and types of what autograd keeps of a loss."""
    found: Counter[object] = Counter()

    def pack(value: Tensor) -> Tensor:
        if value.numel() > SMALL:
            found[tuple(value.shape), value.dtype] += 1
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = loss_of(output * 1)
    assert loss is not None
    assert loss.shape == ()
    loss.backward()
    assert output.grad is not None
    return found


@pytest.mark.parametrize(
    ("segments", "shape", "real"),
    [
        (True, (2, 5, 16, 12), segmentation_loss),
        (False, (60, 5), classification_loss),
        (True, (60, 5), classification_loss),  # which is no map of the images
    ],
)
def test_what_is_kept_is_what_the_real_loss_keeps(segments, shape, real, alone):
    target = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    expected = kept(lambda output: real(output, target), torch.rand(shape, requires_grad=True))
    images = (shape[0], 3, 16, 12)
    with torch.device("meta"):
        output = torch.rand(shape, requires_grad=True)
        found = kept(lambda x: dry_loss(x, segments, images, alone), output)
    assert found == expected


def test_other_outputs_have_a_gradient_too_or_no_loss(alone):
    output = torch.rand(2, 5, 7, device="meta", requires_grad=True)
    assert kept(lambda x: dry_loss(x, False, (2, 3, 16, 12), alone), output) == {}
    assert dry_loss({"logits": 3}, False, (2, 3, 16, 12), alone) is None


def test_on_a_grid_the_numerators_are_added_up():
    network = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU())
    program = Program(network, (3, 16, 12))
    whole, tiles = (
        count(program, (2, 3, 16, 12), grid, segments=True) for grid in ((1, 1), (2, 1))
    )
    assert whole.loss.forward_messages == []
    assert {talk.kind for talk in tiles.loss.forward_messages} == {"sum"}
    kept = [one.lives.held(2, 3, ()) for one in (tiles, whole)]
    assert 0 < kept[0] <= kept[1] / 2 + 2 * SMALL
    gather_before(network, "1")  # each rank counts its own box of the full output
    full = count(Program(network, (3, 16, 12)), (2, 3, 16, 12), (2, 1), segments=True)
    assert {talk.kind for talk in full.loss.forward_messages} == {"sum"}


def test_stages_that_divide_channels_run_with_those_of_a_rank():
    model, shape = resnet18(num_classes=10, width=8), (2, 3, 65, 48)
    whole = preflight(model, Placement(1, ((1, 1),)), shape)
    found = preflight(model, Placement(1, ((2, 1),), tensor=(2,)), shape)
    assert whole.is_clear
    assert found.is_clear
    own, every = (sum(p.numel() for p in one.stages[0].parameters()) for one in (found, whole))
    assert 0.4 * every < own < 0.7 * every


def test_what_cannot_be_done_on_some_channels_is_an_error():
    found = preflight(Writing(), Placement(1, ((1, 1),), tensor=(2,)), (2, 3, 16, 16))
    (error,) = found.errors
    assert "it would modify a copy" in error
