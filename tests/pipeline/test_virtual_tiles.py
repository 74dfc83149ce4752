"""Virtual tiles of one rank, compared with the network on the whole image."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import CommMismatch
from spatialdl.layout.layout import Layout
from spatialdl.layout.placement import Axes, Placement
from spatialdl.models.resnet import resnet18
from spatialdl.models.unet import unet, unet3d
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.own_tile import TileRegion
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage import OUTPUT
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.pipeline.virtual_tiles import VirtualTiles
from spatialdl.spatial.streaming.memory import Memory
from spatialdl.spatial.streaming.store import DiskStore
from spatialdl.training.tasks.losses import segmentation_loss

WEIGHT = 0.3


def mesh_of(stream: tuple[int, ...]) -> Mesh:
    axes = Axes(spatial=(1,) * len(stream))
    return Mesh(axes, 0, 0, SingleProcess(), SingleProcess(), stream=stream)


def tiles_of(
    module: nn.Module,
    stream: tuple[int, ...],
    memory: Memory | None = None,
    recompute: bool = False,
) -> VirtualTiles:
    options = PipelineOptions(recompute="stage" if recompute else "none")
    return VirtualTiles(module, mesh_of(stream), options, memory or Memory())


def image(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(4)
    return torch.randn(shape, dtype=torch.float64, generator=draw)


def entering(x: Tensor, stream: Sequence[int]) -> dict[Value, HandoverShape]:
    layout = Layout.even(len(x), x.shape[2:], stream)
    return {IMAGE: HandoverShape(tuple(x.shape), x.dtype, layout, layout)}


def region(whole: Tensor, dims: int = 2) -> TileRegion:
    return TileRegion(tuple(whole.shape), whole.dtype, whole.shape[-dims:], whole.__getitem__)


def state(model: nn.Module, x: Tensor | None = None) -> dict[str, Tensor]:
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {**model.state_dict(), **grads} | ({} if x is None else {"image": x})


def assert_same(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert list(ours) == list(plain)
    for name, one in plain.items():
        if one is None:
            assert ours[name] is None, name
        else:
            torch.testing.assert_close(ours[name], one, rtol=1e-10, atol=1e-10, msg=name)


NETWORKS = {
    "unet": (partial(unet, 3, width=8, depth=2), (2, 3, 101, 70), (3, 2)),
    "unet3d": (partial(unet3d, 3, width=4, depth=1), (1, 1, 21, 26, 30), (2, 1, 2)),
}


@pytest.mark.parametrize(("name", "recompute"), [("unet", False), ("unet3d", True)])
def test_a_step_with_activations_on_a_disk_equals_that_of_the_whole_image(
    name, recompute, tmp_path
):
    make, shape, stream = NETWORKS[name]
    torch.manual_seed(0)
    model = make().double()
    plain, x, whole = copy.deepcopy(model), image(*shape).requires_grad_(), image(*shape)
    whole.requires_grad_()
    output = plain(whole)
    maps = output.dim() > 2
    criterion = partial(segmentation_loss, classes=3) if maps else F.cross_entropy
    target = torch.arange(prod(output[:, 0].shape)).view(output[:, 0].shape) % 3
    loss = F.cross_entropy(output, target)
    (loss * WEIGHT).backward()

    memory = Memory(600_000, DiskStore(tmp_path))
    tiles = tiles_of(model, stream, memory, recompute)
    shapes = entering(x, stream)
    made = tiles.forward({IMAGE: x}, shapes, len(x))
    torch.testing.assert_close(made.output, output.detach(), rtol=1e-10, atol=1e-10)
    given = region(target, len(stream)) if maps else target
    value = made.backward_of_loss(criterion, given, WEIGHT)
    assert value.dtype == torch.float64
    assert value == pytest.approx(loss.item(), abs=1e-10)
    gradient = made.gradient(IMAGE, shapes[IMAGE])
    assert_same(state(model, gradient), state(plain, whole.grad))
    assert memory.store.written > 2 * 600_000
    assert memory.peak < 6_000_000  # and what the largest operation has


@pytest.mark.parametrize("stream", [(1, 1), (2, 2)])
def test_what_has_left_stays_in_memory(stream, tmp_path):
    """Others read it, or send it on, while the next micro-batch is worked on."""
    x = image(1, 10_000, 4, 6)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    tiles = tiles_of(model, stream, Memory(100_000, DiskStore(tmp_path)))
    size = Layout.even(1, (10_000,), (1,))
    whole = HandoverShape((1, 10_000), x.dtype, size, size)
    with torch.no_grad():
        first = tiles.forward({IMAGE: x}, entering(x, stream), 1)
        found = [first.output, first.leaving(OUTPUT, whole)]
        tiles.forward({IMAGE: x * 2}, entering(x, stream), 1)
    assert tiles.memory.store.written > 0
    for one in found:
        assert one.untyped_storage().nbytes() > 0
        torch.testing.assert_close(one, x.mean((2, 3)))


class Tied(nn.Module):
    """A weight under two names, and settings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("nothing", None)
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x))).mean((2, 3)) * self.rate


def test_weights_modes_and_settings_are_those_of_the_network_at_each_forward():
    torch.manual_seed(0)
    model, x = Tied().double(), image(2, 3, 33, 34)
    tiles = tiles_of(model, (2, 2))
    tiles.forward({IMAGE: x}, entering(x, (2, 2)), 2)
    model.eval()
    model.rate = 2.0
    model.first.bias.requires_grad_(False)
    with torch.no_grad():
        model.norm.running_mean += 7
        for parameter in model.parameters():
            parameter.data = parameter + 0.01  # other memory, as averaged weights have
    made = tiles.forward({IMAGE: x}, entering(x, (2, 2)), 2)
    torch.testing.assert_close(made.output, model(x).detach(), rtol=1e-10, atol=1e-10)
    own = [p.untyped_storage().data_ptr() for p in model.parameters()]
    for network in tiles._copies.networks[1:]:  # weights are in memory once
        assert [p.untyped_storage().data_ptr() for p in network.parameters()] == own
    made.backward_of_loss(lambda output, target: output.square().mean(), None, 1.0)
    whole = copy.deepcopy(model)
    whole.zero_grad()
    whole(x).square().mean().backward()
    assert_same(state(model), state(whole))


# --- what fails


class Fails(nn.Module):
    """In the forward or the backward of one virtual tile, while its peers wait for its pixels."""

    def __init__(self, place: str, tile: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.place, self.tile = place, tile

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        part = x.mesh.part
        if part == self.tile and self.place == "forward":
            raise ArithmeticError("a network of somebody's")
        if part == self.tile and self.place == "nothing":
            return torch.zeros(2, 3, dtype=torch.float64)
        if part == self.tile and self.place == "mean":
            return x.mean((2, 3))
        x = self.second(x)
        if self.place == "backward" and part == self.tile:
            x.register_hook(self._fail)
        return x.mean((2, 3))

    def _fail(self, grad: Tensor) -> Tensor:
        raise ArithmeticError("a network of somebody's")


def step(pipeline: PipelineRuntime, x: Tensor) -> Tensor | float:
    return pipeline.train_step([Microbatch(len(x), 1.0, x, torch.tensor([0, 2]))], 0)


def pipeline_of(model: nn.Module, memory: Memory | None = None, size: int = 12) -> PipelineRuntime:
    placement = Placement(1, ((1, 1),), stream=(2, 2))
    schedule = make_schedule("gpipe", placement, 1)
    options = PipelineOptions(memory=memory)
    return PipelineRuntime(
        *(model, placement, schedule, SingleProcess(), F.cross_entropy, (3, size, size), options)
    )


@pytest.mark.parametrize(
    ("place", "tile"), [("forward", 0), ("forward", 3), ("backward", 0), ("backward", 2)]
)
def test_an_error_in_one_virtual_tile_ends_the_step(place, tile):
    model = Fails(place, tile).double()
    own = dict(model.named_parameters())
    pipeline = pipeline_of(model)
    with pytest.raises(ArithmeticError, match="a network of somebody's"):
        step(pipeline, image(2, 3, 12, 12))
    after = dict(model.named_parameters())
    assert all(after[name] is own[name] for name in own)


@pytest.mark.parametrize("tile", [0, 3])
@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("nothing", "3 of 4 virtual ranks wait for each other, and 1 have ended: the network"),
        ("mean", "one of 4 virtual ranks calls another operation than those before it: the"),
    ],
)
def test_virtual_tiles_that_do_not_do_the_same_are_told(place, sentence, tile):
    with pytest.raises(CommMismatch, match=sentence):
        step(pipeline_of(Fails(place, tile).double()), image(2, 3, 12, 12))


def test_a_full_disk_ends_the_step_and_names_the_folder(tmp_path, monkeypatch):
    """In the backward, which stores as well."""
    writes: list[int] = []

    def write(*_: object) -> int:
        writes.append(1)
        if len(writes) == 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*_)

    pwrite = os.pwrite
    memory = Memory(200_000, DiskStore(tmp_path))
    pipeline = pipeline_of(resnet18(3, width=16).double(), memory, 64)
    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(
        OSError, match=f"No space left on device: {tmp_path}, where .* more free space"
    ):
        step(pipeline, image(2, 3, 64, 64))
    assert len(writes) == 12
