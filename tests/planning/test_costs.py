"""Counts against arithmetic by hand, and against what PyTorch really keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.comm.dry import Talk
from spatialdl.layout import Layout
from spatialdl.models import resnet18, unet
from spatialdl.planning.costs import between, count, largest_part
from spatialdl.planning.layers import Layer, layers_of


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def chain(model: nn.Module, size: tuple[int, int] = (8, 8)) -> list[Layer]:
    return layers_of(model, (3, *size))[0]


def flops(work, kind):
    return sum(one.flops for one in work if one.kind == kind)


def test_operations_are_those_of_arithmetic_by_hand():
    conv, relu, _, _, linear = count(chain(small()), (2, 3, 10, 7)).layers
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
    found = count(chain(small()), (2, 3, 10, 7), on_cpu=False)
    conv, relu, pool, _, linear = found.layers
    values = 4 * 2 * 8 * 10 * 7
    assert found.input == 4 * 2 * 3 * 10 * 7
    # the convolution keeps its input and its weight, ReLU its output, pooling its input
    assert (conv.output, conv.kept, conv.output_kept) == (values, 0, False)
    assert (relu.output, relu.kept, relu.output_kept) == (values, values, True)
    assert conv.forward_extra == relu.forward_extra == values
    assert pool.kept == pool.output == 4 * 2 * 8
    assert (conv.weights, linear.weights) == (4 * 8 * 3 * 3 * 3, 4 * (8 * 5 + 5))
    # in the backward of ReLU there are its output and the gradients of its output and input, and
    # the loss with a gradient of its own
    assert relu.backward_extra == 3 * values + 2 * 4
    assert conv.backward_extra == values + conv.weights + 2 * 4


def test_convolutions_on_a_cpu_take_memory_for_themselves():
    plain = count(chain(small()), (2, 3, 10, 7), on_cpu=False).layers[0]
    with_room = count(chain(small()), (2, 3, 10, 7), on_cpu=True).layers[0]
    assert with_room.forward_extra == plain.forward_extra + plain.output
    assert with_room.kept == plain.kept


def test_on_a_cpu_memory_lies_in_the_heap_or_is_mapped_in_whole_pages():
    model = nn.Sequential(nn.Tanh(), nn.AdaptiveAvgPool2d((500, 500)), nn.Tanh())
    model.insert(0, nn.Conv2d(3, 1, 1))
    side = 1500  # 9,000,000 bytes: more than 4 pages of 2 MB; and 1,000,000
    found = count(chain(model), (1, 3, side, side))
    assert found.heap is not None
    assert found.mapped is not None
    kept = [[one.kept for one in costs.layers] for costs in (found, found.heap, found.mapped)]
    pages = 5 * 2 * 2**20
    assert kept[0] == [a + b for a, b in zip(*kept[1:], strict=True)]
    assert kept[2] == [0, pages, 0, 0]
    assert kept[1] == [0, 0, 0, 1_000_000]
    assert found.layers[1].output == 9_000_000


def really_kept(model, images, target):
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
        output = model(images)
    buffers = {b.untyped_storage().data_ptr() for b in model.buffers()}
    return sum(size for key, size in found.items() if key not in buffers), output


@pytest.mark.parametrize("side", [64, 96])
def test_what_is_kept_is_what_autograd_saves(side):
    model = resnet18(num_classes=10, width=8)
    images = torch.randn(3, 3, side, side)
    kept, _ = really_kept(model, images, None)
    found = count(chain(model), (3, 3, side, side))
    assert sum(one.kept for one in found.layers) == kept


def test_the_rank_with_the_largest_tile_and_most_neighbours_counts():
    assert largest_part(Layout.even((1, 12, 12), (3, 3))) == 4
    assert largest_part(Layout.even((1, 7, 4), (2, 1))) == 1


def test_what_is_said_on_a_grid():
    """A convolution's halo and its adjoint, and the sum of an average."""
    conv, _, pool, _, _ = count(chain(small()), (2, 3, 12, 7), (3, 1)).layers
    row = 4 * 2 * 3 * 7
    assert conv.forward_talks == [Talk("exchange", 2, 2 * row)]
    assert conv.backward_talks == []  # images learn nothing
    assert [talk.kind for talk in pool.forward_talks] == ["sum"]
    tiles = count(chain(small()), (2, 3, 12, 7), (3, 1))
    whole = count(chain(small()), (2, 3, 12, 7))
    assert tiles.input * 3 == whole.input
    assert tiles.layers[1].kept * 3 == whole.layers[1].kept


def test_other_numbers_of_samples_lie_on_a_line():
    model = chain(unet(num_classes=3, width=4, depth=2), (24, 20))
    two, four, seven = (
        count(model, (n, 3, 24, 20), segments=True, on_cpu=False) for n in (2, 4, 7)
    )
    assert between(two, four, 2.5) == seven


def test_layers_that_cannot_work_on_a_grid_are_told():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    found = count(chain(model), (1, 3, 8, 8), (2, 1))
    assert [one.name for one in found.layers] == ["0", "1"]
    assert found.loss is None
    assert str(found.refused).startswith("2: linear")
    with pytest.raises(RuntimeError):
        count(chain(model), (1, 3, 9, 9))
