from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.axes import Axes
from spatialdl.parallel.layout import Layout
from spatialdl.pipeline.own_tile import OwnTile, TileRegion, enter
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.stage import OUTPUT
from spatialdl.pipeline.steps import IMAGE, Value

ONE = Mesh(Axes(spatial=(1, 1)), 0, 0, SingleProcess(), SingleProcess())
CPU = torch.device("cpu")
LABELS = torch.tensor([0, 2])


def whole(shape: tuple[int, ...]) -> HandoverShape:
    layout = Layout.even(shape[0], shape[2:], (1, 1))
    return HandoverShape(shape, torch.float64, layout, layout)


def image() -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(2, 3, 9, 7, dtype=torch.float64, generator=draw)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.Conv2d(4, 4, 3), head).double()


def grads(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert list(ours) == list(plain)
    for name, one in plain.items():
        torch.testing.assert_close(ours[name], one, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_whole_network_runs_as_it_is(recompute, model):
    x, plain = image().requires_grad_(), image().requires_grad_()
    calls: list[int] = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    expected = model(plain)
    loss = F.cross_entropy(expected, LABELS)
    (loss * 0.3).backward()
    wanted = grads(model)
    calls.clear()
    shapes = {IMAGE: whole((2, 3, 9, 7))}
    made = OwnTile(model, ONE, recompute, None).forward({IMAGE: x}, shapes, 2, CPU)
    assert torch.equal(made.output, expected)
    value = made.backward_of_loss(F.cross_entropy, LABELS, 0.3)
    assert (value.dtype, value.requires_grad) == (torch.float64, False)
    assert value == pytest.approx(loss.item(), rel=1e-14)
    assert_same(grads(model), wanted)
    torch.testing.assert_close(made.gradient(IMAGE, shapes[IMAGE]), plain.grad)
    assert len(calls) == 1 + recompute


def test_a_mean_loss_counts_with_a_weight_that_may_be_a_tensor(model):
    x = image()
    F.cross_entropy(model(x), LABELS).backward()
    wanted = {name: grad * 0.25 for name, grad in grads(model).items()}
    made = OwnTile(model, ONE, False, None).forward({IMAGE: x}, {IMAGE: whole(x.shape)}, 2, CPU)
    made.backward_of_loss(F.cross_entropy, LABELS, torch.tensor(0.25))
    assert_same(grads(model), wanted)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_was_handed_over_goes_backward(recompute, model):
    """The second stage begins with an operation in place."""
    first, second = cut(model, [1, 1], ["1"], (3, 9, 7))
    plain = image().requires_grad_()
    F.cross_entropy(model(plain), LABELS).backward()
    wanted = grads(model)
    x = image().requires_grad_()
    entering, (value,) = {IMAGE: whole((2, 3, 9, 7))}, first.gives
    assert value == Value(0)
    passing = {value: whole((2, 4, 7, 5))}
    made = OwnTile(first, ONE, recompute, None).forward({IMAGE: x}, entering, 2, CPU)
    assert made.output is None
    leaving = made.leaving(value, passing[value]).detach()
    kept, leaf = leaving.clone(), leaving.requires_grad_()
    last = OwnTile(second, ONE, recompute, None).forward({value: leaf}, passing, 2, CPU)
    last.backward_of_loss(F.cross_entropy, LABELS, 1.0)
    made.backward_of({value: last.gradient(value, passing[value])}, passing)
    assert_same(grads(model), wanted)
    torch.testing.assert_close(made.gradient(IMAGE, entering[IMAGE]), plain.grad)
    assert recompute <= torch.equal(leaf, kept)  # what is run again finds what it was given


def test_an_image_that_a_later_stage_wants_is_handed_on(model):
    made = OwnTile(model[0], ONE, False, None).forward(
        {IMAGE: image()}, {IMAGE: whole((2, 3, 9, 7))}, 2, CPU
    )
    assert torch.equal(made.leaving(IMAGE, whole((2, 3, 9, 7))), image())
    assert made.output.shape == (2, 4, 7, 5)


def test_values_need_not_depend_on_anything_that_learns(model):
    model.requires_grad_(False)
    shapes = {IMAGE: whole((2, 3, 9, 7)), OUTPUT: whole((2, 4, 7, 5))}
    made = OwnTile(model[0], ONE, False, None).forward({IMAGE: image()}, shapes, 2, CPU)
    made.backward_of({OUTPUT: torch.ones(2, 4, 7, 5)}, shapes)
    assert torch.equal(made.gradient(IMAGE, shapes[IMAGE]), torch.zeros_like(image()))
    made = OwnTile(model, ONE, False, None).forward({IMAGE: image()}, shapes, 2, CPU)
    assert made.backward_of_loss(F.cross_entropy, LABELS, 1.0) > 0
    assert grads(model) == {}


def test_layers_and_losses_are_cast_alike(model):
    given = image().float()
    made = OwnTile(model.float(), ONE, False, torch.bfloat16).forward(
        {IMAGE: given}, {IMAGE: whole(given.shape)}, 2, CPU
    )
    assert made.output.dtype == torch.bfloat16
    seen = []

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        seen.append(torch.mm(output.float().T, output.float()).dtype)
        return F.cross_entropy(output.float(), target)

    made.backward_of_loss(criterion, LABELS, 1.0)
    assert seen == [torch.bfloat16]


def test_the_first_operation_may_write_into_a_leaf():
    leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
    F.relu_(enter(leaf)).sum().backward()
    assert leaf.grad.tolist() == [0, 1]
    assert leaf.tolist() == [0, 2]  # the same memory


def test_parts_are_made_when_they_are_asked_for():
    whole = torch.arange(2 * 3 * 5 * 4).view(2, 3, 5, 4)
    asked = []

    def read(part):
        asked.append(part)
        return whole[part]

    region = TileRegion((2, 3, 5, 4), torch.int64, (10, 4), read)
    assert asked == []
    part = (..., slice(1, 3), slice(0, 2))
    assert torch.equal(region[part], whole[:, :, 1:3, :2])
    assert asked == [part]


def test_a_region_stays_as_it_is():
    region = TileRegion((1, 2, 2), torch.int64, (2, 2), torch.zeros(1, 2, 2).__getitem__)
    with pytest.raises(AttributeError, match="cannot assign"):
        region.shape = (2, 2, 2)
    assert region  # which tells it from none
