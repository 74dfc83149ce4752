"""Recorded operations, in shapes whose bytes are counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spatialdl.comm.mesh import dry_mesh
from spatialdl.layout.layout import Layout
from spatialdl.spatial.streaming.ledger import PAGE, Ledger
from spatialdl.spatial.tensor import SpatialTensor

X = 4 * 2 * 16 * 6 * 8
"""Bytes of 2 images of 16 channels, 6 x 8."""


def images(channels=16, learns=False):
    return torch.empty(2, channels, 6, 8, device="meta", requires_grad=learns)


def seen(run, *given):
    """The ledger of ``run(*given)``."""
    ledger = Ledger()
    with ledger.watch(), torch.device("meta"):
        run(*given)
    return ledger


def backward_of(layer, x):
    """What the backward of a layer does to a gradient that is there."""
    layer = layer.to("meta")
    output = layer(x)
    return seen(output.backward, torch.empty_like(output))


def works(ledger):
    return [work for listed in ledger.work.values() for work in listed]


def kinds(ledger):
    return {work.kind for work in works(ledger)} - {"pointwise"}


def rooms(ledger):
    return max(moment.workspace for moment in ledger.moments)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (nn.Conv2d(16, 3, 3), "conv"),
        (nn.Linear(8, 3), "matmul"),
        (nn.BatchNorm2d(16), "norm"),
        (nn.BatchNorm2d(16).eval(), "normalise"),
        (nn.GroupNorm(4, 16), "norm"),
        (nn.LayerNorm(8), "norm"),
        (lambda x: torch.var_mean(x, dim=(0, 2, 3)), "statistics"),
        (lambda x: F.max_pool2d(x, 2), "pool"),
        (lambda x: F.avg_pool2d(x, 2), "pool"),
        (lambda x: x.add_(1), "in_place"),
    ],
)
def test_operations_are_told_apart(run, kind):
    if isinstance(run, nn.Module):
        run.to("meta")
    found = kinds(seen(run, images()))
    assert kind in found
    assert found <= {kind, "in_place"}  # BatchNorm counts its batches


@pytest.mark.parametrize(
    ("layer", "learns", "expected"),
    [
        (nn.Conv2d(16, 3, 3), True, {"conv_input", "conv_weight"}),
        (nn.Conv2d(16, 3, 3, stride=(1, 2)), True, {"conv_strided_input", "conv_weight"}),
        (nn.Conv2d(16, 3, 3, stride=2), False, {"conv_weight"}),
        (nn.BatchNorm2d(16), True, {"norm_backward"}),
        (nn.BatchNorm2d(16), False, {"norm_sums"}),
        (nn.GroupNorm(4, 16), True, {"norm_backward"}),
        (nn.LayerNorm(8), True, {"norm_backward"}),
        (nn.MaxPool2d(2), True, {"pool_backward"}),
        (nn.AvgPool2d(2), True, {"pool_backward"}),
        (nn.Tanh(), True, set()),
    ],
)
def test_so_are_their_gradients(layer, learns, expected):
    assert kinds(backward_of(layer, images(learns=learns))) == expected


def test_bytes_are_those_read_and_written():
    (work,) = works(seen(torch.add, images(), images()))
    assert (work.flops, work.bytes) == (0, 3 * X)
    conv = nn.Conv2d(16, 5, 3, bias=False)
    weight, output = 4 * 16 * 5 * 9, 4 * 2 * 5 * 4 * 6
    for work in works(backward_of(conv, images(learns=True))):
        assert work.bytes == X + weight + output
        assert work.flops == 2 * (2 * 5 * 4 * 6) * (16 * 9)


def test_views_and_memory_that_nobody_fills_yet_take_no_time():
    ledger, x = Ledger(), images()
    ledger.own(x)
    with ledger.watch():
        held = x.view(2, -1), x[:, 1:], x.detach(), torch.empty_like(x)
    assert works(ledger) == []
    assert ledger.moments == []
    assert [memory.bytes for memory in ledger.memories] == [held[-1].nbytes]


@pytest.mark.parametrize(
    ("conv", "expected"),
    [
        (nn.Conv2d(16, 5, 1), 0),  # a matrix product
        (nn.Conv2d(16, 32, 1, stride=2), X),
        (nn.Conv2d(16, 5, 3), X),
        (nn.Conv2d(16, 32, 3, padding=1), 2 * X),
    ],
)
def test_room_of_convolutions_is_that_of_the_larger_side(conv, expected):
    assert rooms(seen(conv.to("meta"), images())) == expected


@pytest.mark.parametrize(
    ("conv", "learns", "expected"),
    [
        (nn.Conv2d(16, 32, 1), True, X),
        (nn.Conv2d(16, 32, 1), False, 0),
        (nn.Conv2d(16, 8, 3, padding=1), False, X / 2 + X),  # gradient and images
        (nn.Conv2d(16, 8, 3, padding=1), True, X / 2 + X),
        (nn.Conv2d(16, 8, 3, padding=1).requires_grad_(False), True, X),
        (nn.Conv2d(16, 8, 3, padding=1, stride=2), True, 2 * X),
        (nn.Conv2d(16, 8, 3, padding=1, stride=2), False, X / 8 + X),
        (nn.Conv2d(15, 16, 3, padding=1), False, X),  # few channels are read as they are
        (nn.Conv2d(15, 8, 3, padding=1), True, X * 15 / 16),
    ],
)
def test_room_of_their_gradients(conv, learns, expected):
    found = backward_of(conv, images(conv.in_channels, learns))
    assert rooms(found) == expected


def test_the_memory_of_a_split_tensor_is_that_of_its_tile():
    layout = Layout.even(2, (12, 8), (2, 1))
    ledger = Ledger()
    with ledger.watch():
        halved = SpatialTensor(images(), layout, dry_mesh((2, 1), 0)) + 1
    found = ledger.memory_of(halved)
    assert found is not None
    assert found.bytes == X


def test_weights_are_left_out():
    layer = nn.Linear(8, 3).to("meta")
    ledger = Ledger()
    ledger.own(layer.weight)
    with ledger.watch():
        layer.weight.detach().mul_(2)
        layer.bias.detach().mul_(2)
    assert [memory.bytes for memory in ledger.memories] == [4 * 3]
    assert [work.kind for work in works(ledger)] == ["in_place"] * 2


@pytest.mark.parametrize(("whole", "taken"), [(False, PAGE + 4), (True, 2 * PAGE)])
def test_large_tensors_take_whole_pages_where_they_are_said_to(whole, taken):
    ledger = Ledger(whole_pages=whole)
    with ledger.watch():
        held = torch.empty(PAGE // 4 + 1, device="meta"), torch.empty(7, device="meta")
    assert [memory.taken for memory in ledger.memories] == [taken, 28]
    del held
