"""Counts compared with arithmetic by hand, and with what PyTorch saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.comm.dry import Talk
from spatialdl.models import resnet18, unet
from spatialdl.pipeline.steps import Value
from spatialdl.planning.costs import between, count, with_stage
from spatialdl.planning.program import DividedStage, Program


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def program(model: nn.Module, size: tuple[int, int] = (8, 8)) -> Program:
    return Program(model, (3, *size))


def flops(work, kind):
    return sum(one.flops for one in work if one.kind == kind)


def test_operations_are_those_of_arithmetic_by_hand():
    conv, relu, _, _, linear = count(program(small()), (2, 3, 10, 7)).layers
    of_conv = 2 * (2 * 8 * 10 * 7) * (3 * 3 * 3)
    assert flops(conv.forward, "conv") == of_conv
    assert flops(conv.backward, "conv_weight") == of_conv
    assert flops(conv.backward, "conv_input") == 0  # images learn nothing
    assert flops(linear.forward, "matmul") == 2 * 2 * 8 * 5
    assert flops(linear.backward, "matmul") == 2 * 2 * 2 * 8 * 5
    values = 2 * 8 * 10 * 7
    (work,) = relu.forward
    assert (work.kind, work.bytes) == ("pointwise", 2 * 4 * values)
    (work,) = relu.backward
    assert (work.kind, work.bytes) == ("pointwise", 3 * 4 * values)


def test_memory_is_that_of_arithmetic_by_hand():
    found = count(program(small()), (2, 3, 10, 7), on_cpu=False)
    conv, relu, _, _, linear = found.layers
    values = 4 * 2 * 8 * 10 * 7
    assert found.input == 4 * 2 * 3 * 10 * 7
    # the convolution keeps its input and its weight, ReLU its output, pooling its input
    assert [found.values[Value(step)] for step in range(3)] == [values, values, 4 * 2 * 8]
    kept = [found.lives.held(part, part + 1, ()) for part in range(4)]
    assert kept == [0, values, 4 * 2 * 8, 0]
    assert found.lives.held(0, 1, {conv.outputs[0].memory}) == values
    peaks = [found.lives.forward_peak(part, part + 1) for part in range(2)]
    assert peaks == [values, values]
    assert (conv.weights, linear.weights) == (4 * 8 * 3 * 3 * 3, 4 * (8 * 5 + 5))
    # in the backward of ReLU there are its output and the gradient of its input
    assert found.lives.backward_peaks(1, 2, (), (), False) == (2 * values, 2 * values)
    assert found.lives.backward_peaks(0, 1, (), (), False) == (conv.weights, conv.weights)
    assert relu.outputs[0].summed_in == 2


def test_convolutions_on_a_cpu_take_memory_for_themselves():
    plain, with_room = (
        count(program(small()), (2, 3, 10, 7), on_cpu=on_cpu) for on_cpu in (False, True)
    )
    room = with_room.lives.forward_peak(0, 1) - plain.lives.forward_peak(0, 1)
    assert room == plain.values[Value(0)]
    assert with_room.lives.held(0, 5, ()) == plain.lives.held(0, 5, ())


def test_on_a_cpu_memory_lies_in_the_heap_or_is_mapped_in_whole_pages():
    model = nn.Sequential(nn.Tanh(), nn.AdaptiveAvgPool2d((500, 500)), nn.Tanh())
    model.insert(0, nn.Conv2d(3, 1, 1))
    side = 1500  # 9,000,000 bytes: more than 4 pages of 2 MB; and 1,000,000
    found = count(program(model), (1, 3, side, side))
    assert found.heap is not None
    assert found.mapped is not None
    kept = [
        [costs.lives.held(part, part + 1, ()) for part in range(4)]
        for costs in (found, found.heap, found.mapped)
    ]
    pages = 5 * 2 * 2**20
    assert kept[0] == [a + b for a, b in zip(*kept[1:], strict=True)]
    assert kept[2] == [0, pages, 0, 0]
    assert kept[1] == [0, 0, 0, 1_000_000]
    assert found.values[Value(1)] == 9_000_000


def really_kept(model, images):
    """Bytes of storages that autograd saves, but weights and images."""
    known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), images)}
    found: dict[int, int] = {}
    held = []

    def pack(x):
        held.append(x)
        if x.untyped_storage().data_ptr() not in known:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(images)
    buffers = {b.untyped_storage().data_ptr() for b in model.buffers()}
    return sum(size for key, size in found.items() if key not in buffers)


def test_what_is_kept_is_what_autograd_saves():
    model = resnet18(num_classes=10, width=8)
    found = count(program(model), (3, 3, 96, 64))
    kept = really_kept(model, torch.randn(3, 3, 96, 64))
    assert found.lives.held(0, len(found.layers), ()) == kept


def test_what_is_said_on_a_grid():
    """A convolution's halo and its adjoint, and the sum of an average."""
    conv, _, pool, _, _ = count(program(small()), (2, 3, 12, 7), (3, 1)).layers
    row = 4 * 2 * 3 * 7
    assert conv.forward_messages == [Talk("exchange", 2, 2 * row)]
    assert conv.backward_messages == []  # images learn nothing
    assert [talk.kind for talk in pool.forward_messages] == ["sum"]
    tiles = count(program(small()), (2, 3, 12, 7), (3, 1))
    whole = count(program(small()), (2, 3, 12, 7))
    assert tiles.input * 3 == whole.input
    assert tiles.lives.held(1, 2, ()) * 3 == whole.lives.held(1, 2, ())


def test_memory_depends_on_the_tile_and_not_on_the_whole_image():
    """What an operation asks without data, of the whole image, was counted as memory once."""
    model = program(unet(num_classes=3, width=4, depth=2), (48, 64))

    def peak(parts: int) -> int:
        found = count(model, (1, 3, 16 * parts, 64), (parts, 1), segments=True)
        assert found.loss is not None
        return found.lives.forward_peak(0, len(found.layers))

    assert peak(30) == pytest.approx(peak(3), rel=1e-3)


def test_a_head_over_a_flattened_map_multiplies_its_own_columns():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 5))
    heads = [count(program(model), (2, 3, 8, 8), grid).layers[-1] for grid in ((1, 1), (2, 2))]
    products = [
        sum(work.flops for work in (*one.forward, *one.backward) if work.kind == "matmul")
        for one in heads
    ]
    assert products[1] == products[0] / 4
    assert [talk.bytes for talk in heads[1].forward_messages] == [2 * 5 * 4]


def test_a_rank_has_some_channels_and_says_so_on_another_axis():
    model, shape = program(small()), (2, 3, 12, 7)
    conv, relu, _, _, linear = count(model, shape, divided=DividedStage(2, 0, 5)).layers
    assert flops(conv.forward, "conv") == 2 * (2 * 4 * 12 * 7) * (3 * 3 * 3)
    assert relu.outputs[0].bytes == 4 * 2 * 4 * 12 * 7
    assert (conv.weights, linear.weights) == (4 * 4 * 3 * 3 * 3, 4 * (4 * 5 + 3))
    assert conv.forward_messages == relu.forward_messages == []
    # a rank has 3 of 5 outputs; of sums it sends 2, then what it has
    assert linear.forward_messages == [
        Talk("exchange", 1, 4 * 2 * 2, "tensor"),
        Talk("exchange", 1, 4 * 2 * 3, "tensor"),
    ]
    tiles = count(model, shape, (3, 1), divided=DividedStage(2, 0, 5)).layers[0]
    assert tiles.forward_messages == [Talk("exchange", 2, 2 * 4 * 2 * 3 * 7)]


# --- combined


def test_costs_of_a_virtual_tile_are_extrapolated_over_samples():
    model, stream = program(small(), (24, 20)), (2, 1)
    _, two, four, seven = (  # constants are made by the first
        count(model, (n, 3, 24, 20), stream=stream, on_cpu=False) for n in (2, 2, 4, 7)
    )
    assert between(two, four, 2.5) == seven


def test_a_divided_stage_stands_in_the_place_of_the_whole_one():
    model, shape = program(small()), (2, 3, 12, 7)
    whole, which = count(model, shape), DividedStage(2, 0, 1)
    own = count(model, shape, divided=which)
    found = with_stage(whole, own, which)
    assert [one.name for one in found.layers] == [one.name for one in whole.layers]
    assert found.layers[0].weights == whole.layers[0].weights / 2
    assert found.values == whole.values  # what it gives is whole
    assert found.layers[1:] == whole.layers[1:]
    assert found.loss == whole.loss
