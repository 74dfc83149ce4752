from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spatialdl
from spatialdl.models.resnet import resnet18
from spatialdl.models.unet import unet, unet3d
from spatialdl.models.vit import VisionTransformer
from spatialdl.pipeline import streamed
from spatialdl.spatial.streaming import memory as memory_module
from spatialdl.spatial.streaming.memory import Memory
from spatialdl.spatial.streaming.sizes import SHARE, ImageSizes, sizes_of, stored, tiles_within
from spatialdl.spatial.streaming.store import DiskStore

Result = dict[str, Tensor]


def image(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained(model: nn.Module, x: Tensor, call: Callable[..., Any], steps: int = 2) -> Result:
    """Losses, gradients of the image, weights and buffers of a few steps."""
    model, found = copy.deepcopy(model).double(), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        leaf = x.clone().requires_grad_()
        with spatialdl.random.keyed(0, step):
            output = call(model, leaf)
        target = torch.arange(output[:, 0].numel()).view(output[:, 0].shape) % output.shape[1]
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        found |= {f"loss {step}": loss.detach(), f"image {step}": leaf.grad}
    return found | dict(model.state_dict())


def assert_same(model: nn.Module, x: Tensor, grid: tuple[int, ...], **options: Any) -> None:
    whole = trained(model, x, lambda net, leaf: net(leaf))
    tiled = trained(model, x, lambda net, leaf: spatialdl.stream(net, leaf, grid, **options))
    assert list(whole) == list(tiled)
    for name, one in whole.items():
        torch.testing.assert_close(tiled[name], one, rtol=1e-10, atol=1e-10, msg=name)


def signals() -> nn.Module:
    pool = nn.AdaptiveAvgPool1d(1), nn.Flatten()
    return nn.Sequential(nn.Conv1d(2, 6, 5, 2, 2), nn.BatchNorm1d(6), nn.ReLU(), *pool)


def transformer() -> nn.Module:
    return VisionTransformer(5, patch=8, width=16, depth=2, heads=2, registers=2, dropout=0.1)


@pytest.mark.parametrize(
    ("build", "shape", "grid", "limit_gb"),
    [
        (lambda: resnet18(5, width=8), (2, 3, 37, 41), (2, 2), 0.0005),
        (lambda: resnet18(5, width=8), (1, 3, 40, 40), (1, 1), 0.0005),
        (lambda: unet(3, width=4, depth=2), (1, 3, 70, 53), (3, 2), 0.0005),
        (transformer, (2, 3, 40, 56), (2, 2), 0.0002),
        (lambda: unet3d(2, width=4, depth=2), (1, 1, 13, 16, 11), (2, 1, 2), None),
        (signals, (3, 2, 37), (4,), None),
    ],
    ids=["resnet", "one tile", "unet", "transformer", "volumes", "signals"],
)
def test_a_streamed_network_equals_the_whole_one(build, shape, grid, limit_gb):
    torch.manual_seed(0)
    assert_same(build(), image(*shape), grid, limit_gb=limit_gb)


class _Odd(nn.Module):
    """Tied and frozen weights, dropout of pixels and of paths, recompute, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.tied = nn.Conv2d(4, 4, 3, padding=1)
        self.tied.weight = self.again.weight
        self.first.bias.requires_grad_(False)
        self.drop = nn.Dropout2d(0.3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.drop(self.first(x))
        contexts = spatialdl.random.checkpoint_contexts
        x = checkpoint(self._block, x, use_reentrant=False, context_fn=contexts)
        if self.training:  # a path for each sample
            x = x * torch.rand(len(x), 1, 1, 1, dtype=x.dtype).round()
        return self.tied(x).mean((2, 3))

    def _block(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(self.again(x)), 0.2, self.training)


def test_what_networks_do_besides():
    torch.manual_seed(0)
    assert_same(_Odd(), image(3, 3, 23, 19), (2, 3))
    model = _Odd().double()
    spatialdl.stream(model, image(1, 3, 23, 19), (2, 2)).sum().backward()
    assert model.calls == 1  # as of the network itself, not of each tile
    assert model.first.bias.grad is None
    assert all(each.is_leaf for each in model.parameters())


def test_dropout_without_a_key_differs_from_step_to_step_and_follows_the_seed():
    model, x = nn.Sequential(nn.Dropout(0.5)), torch.ones(1, 1, 30, 30)
    torch.manual_seed(0)
    first, second = spatialdl.stream(model, x), spatialdl.stream(model, x)
    torch.manual_seed(0)
    again = spatialdl.stream(model, x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert 0.3 < float((first > 0).double().mean()) < 0.7


class _Several(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        tokens = x.flatten(2).transpose(1, 2)
        return {"map": x * 2, "tokens": tokens * 3, "number": 7, "mean": x.mean((2, 3))}


def test_outputs_of_all_kinds():
    x = image(2, 3, 9, 8).requires_grad_()
    found = spatialdl.stream(_Several(), x, (2, 2))
    expected = _Several()(x)
    assert found["number"] == 7
    names = ("map", "tokens", "mean")
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)
    own, of_whole = (
        torch.autograd.grad(sum(one[name].square().sum() for name in names), x)
        for one in (found, expected)
    )
    torch.testing.assert_close(own, of_whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["memmap", "hdf5"])
def test_tiles_are_read_when_their_turn_comes(kind, tmp_path):
    pixels = np.random.default_rng(0).random((1, 3, 41, 30))
    if kind == "memmap":
        np.save(tmp_path / "image.npy", pixels)
        array: Any = np.load(tmp_path / "image.npy", mmap_mode="r")
    else:
        array = h5py.File(tmp_path / "image.h5", "w").create_dataset("image", data=pixels)
    read = []

    class Watched:
        shape = array.shape

        def __getitem__(self, part: Any) -> Any:
            read.append(part)
            return array[part]

    torch.manual_seed(0)
    model = resnet18(4).double().eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        found = spatialdl.stream(model, Watched(), (3, 2))
        torch.testing.assert_close(found, model(torch.from_numpy(pixels)), rtol=0, atol=1e-10)
    assert len(read) == 6
    assert (
        max((part[2].stop - part[2].start) * (part[3].stop - part[3].start) for part in read) < 220
    )


def test_autocast_goes_with_it():
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(1, 3, 20, 20)
    with torch.autocast("cpu", torch.bfloat16):
        whole, tiled = model(x), spatialdl.stream(model, x)
    assert tiled.dtype == whole.dtype == torch.bfloat16
    torch.testing.assert_close(tiled, whole, rtol=0.02, atol=0.02)


def test_a_limit_holds(monkeypatch):
    torch.manual_seed(0)
    model, made = unet(2, width=8, depth=2).float(), []

    class Seen(Memory):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(memory_module, "Memory", Seen)
    for limit in (100.0, 0.004):
        x = torch.randn(1, 3, 256, 256)
        spatialdl.stream(model, x, (3, 3), limit_gb=limit).mean().backward()
    without, within = (memory.peak for memory in made)
    assert without > 30e6
    assert within < 0.004e9 + 3e6  # and what one operation on a tile takes


@pytest.mark.parametrize(
    ("model", "x", "options", "message"),
    [
        (lambda x: x, image(1, 3, 8, 8), {}, "must be a torch.nn.Module, got a function"),
        (nn.ReLU(), image(3, 8, 8), {}, r"for a grid of 2x2 must be .*got shape \(3, 8, 8\)"),
        (nn.ReLU(), [1, 2], {}, "got a list"),
        (nn.ReLU(), image(1, 3, 8, 1), {}, "8x1 is smaller than the grid 2x2"),
        (nn.ReLU(), image(1, 3, 8, 8), {"grid": 2}, r"one to three numbers, .*, got 2"),
        (nn.ReLU(), image(1, 3, 8, 8), {"grid": (0, 2)}, "needs at least 1 rank, got 0"),
        (nn.ReLU(), image(1, 3, 8, 8), {"store": "/tmp"}, "store=/tmp has no effect without"),
        (nn.ReLU(), image(1, 3, 8, 8), {"limit_gb": 1, "store": "/no"}, "cannot store tensors"),
        (nn.Conv2d(3, 3, 1, device="meta"), image(1, 3, 8, 8), {"limit_gb": 1}, "is on meta"),
    ],
    ids=[
        *("function", "dims", "list", "small", "number", "grid"),
        *("no limit", "folder", "device"),
    ],
)
def test_what_does_not_fit_is_refused(model, x, options, message):
    with pytest.raises(ValueError, match=message):
        spatialdl.stream(model, x, **options)


class _Sorts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sort(-1).values


def test_an_operation_that_cannot_be_split_is_refused_by_name():
    with pytest.raises(spatialdl.UnsupportedSpatialOp, match="sort"):
        spatialdl.stream(_Sorts(), image(1, 3, 8, 8))


def test_an_output_says_what_its_tensors_take(tmp_path):
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    x = torch.rand(1, 1, 256, 256)
    output = spatialdl.stream(net, x, (2, 2), limit_gb=0.001, store=tmp_path)
    memory = streamed.memory_of(output)
    output.sum().backward()
    assert memory.store is not None
    assert memory.store.written >= 256 * 256 * 8 * 4
    assert memory.store.peak <= memory.store.written + 4096 * 100
    assert 0.001e9 <= memory.peak <= 0.001e9 + 3 * 2**20
    with pytest.raises(ValueError, match=r"needs a differentiable output of spatialdl\.stream"):
        streamed.memory_of(net(x))


def test_backward_twice_is_refused():
    model = nn.Conv2d(3, 4, 3).double()
    output = spatialdl.stream(model, image(1, 3, 8, 8))
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="streamed image a second time"):
        output.sum().backward()


# --- sizes


def really(model: nn.Module, shape: tuple[int, ...]) -> int:
    """What tensors take at most while an image is trained on."""
    memory = Memory(10**12, DiskStore())
    with memory.watch():
        output = model(torch.rand(shape))
        output.backward(torch.ones_like(output))
    return memory.peak


@pytest.mark.parametrize(("build", "recompute"), [(resnet18, False), (unet, True)])
def test_what_a_network_takes_is_known_without_data(build, recompute):
    from spatialdl.spatial.recompute import recompute_blocks

    model = build(num_classes=3) if build is resnet18 else build(num_classes=3, width=8, depth=2)
    shape = (2, 3, 128, 96)
    found = sizes_of(model, shape, torch.float32, recompute=recompute)
    if recompute:
        recompute_blocks(model)
    assert found is not None
    assert found.live == pytest.approx(really(model, shape), rel=0.2)
    assert model.training  # and it is as it was
    assert not any(one.grad is None for one in model.parameters())
    assert next(model.parameters()).device.type == "cpu"


def test_evaluation_takes_less_than_training():
    model = unet(num_classes=2, width=4, depth=2)
    trained, evaluated = (
        sizes_of(model, (1, 3, 64, 64), torch.float64, trains=trains) for trains in (True, False)
    )
    assert trained is not None
    assert evaluated is not None
    assert evaluated.live < trained.live / 2
    # the last upsampled map and its skip, and both together
    assert evaluated.largest == 2 * (2 * 4) * 64 * 64 * 8


def test_a_network_that_reads_values_is_not_known():
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.mean())

    assert sizes_of(Reads(), (1, 3, 8, 8), torch.float32) is None


@pytest.mark.parametrize(
    ("size", "grid"),
    [((1000, 90), (1, 1)), ((300, 200, 100), (1, 1, 1)), ((999,), (3,))],
)
def test_tiles_are_as_few_as_fit_and_nearly_square(size, grid):
    sizes, limit = ImageSizes(10**9, 4 * 10**8), 10**8
    found = tiles_within(sizes, limit, size, grid)
    per_tile = sizes.largest / prod(found) / prod(grid)
    assert per_tile <= SHARE * limit
    fewer = [tuple(n - (i == at) for i, n in enumerate(found)) for at in range(len(found))]
    assert any(sizes.largest / max(1, prod(few)) / prod(grid) > SHARE * limit for few in fewer)
    sides = [extent / (own * parts) for extent, own, parts in zip(size, found, grid, strict=True)]
    assert max(sides) <= 2.5 * min(sides)


def test_tiles_and_stores_are_no_larger_than_needed():
    assert tiles_within(ImageSizes(10, 10), 1000, (64, 64), (1, 1)) == [1, 1]
    assert tiles_within(ImageSizes(10**9, 10**9), 1, (4, 2), (1, 1)) == [3, 2]  # whole pixels
    assert stored(ImageSizes(1000, 10), 300, 2) == 200
    assert stored(ImageSizes(1000, 10), 2000, 1) == 0
