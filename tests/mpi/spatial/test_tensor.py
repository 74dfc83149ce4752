"""SpatialTensor as users meet it: what it says, what it does, what it refuses."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import spatialdl
from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, from_local, init_mesh, shard
from spatialdl.parallel.layout import Layout, last_slices
from spatialdl.spatial.table import HANDLERS
from spatialdl.spatial.tensor import from_tile
from tests.mpi.device import DEVICE

H, W = 13, 10


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    ranks = MPI.COMM_WORLD.size
    return init_mesh((2, 2) if ranks == 4 else (ranks, 1))


def image(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (2, 4, H, W), dtype=torch.float64, generator=draw).to(dtype)


def own(whole: Tensor, mesh: Mesh) -> Tensor:
    row0, row1, col0, col1 = mesh.box((whole.shape[-2], whole.shape[-1]))
    return whole[..., row0:row1, col0:col1]


# --- what it says


def test_sizes_are_global(mesh: Mesh) -> None:
    x = shard(image(), mesh)
    assert x.shape == x.size() == torch.Size((2, 4, H, W))
    assert (x.size(2), x.shape[-1], x.dim(), x.ndim) == (H, W, 4, 4)
    assert (x.numel(), len(x), x.dtype) == (2 * 4 * H * W, 2, torch.float64)
    assert x.layout == torch.strided
    assert x.is_contiguous()
    assert (x.spatial_layout.samples, x.spatial_layout.size) == (2, (H, W))
    assert isinstance(x, Tensor)


def test_local_and_full(mesh: Mesh) -> None:
    whole = image()
    x = shard(whole, mesh)
    assert type(x.to_local()) is Tensor
    assert torch.equal(x.to_local(), own(whole, mesh))
    assert type(x.full_tensor()) is Tensor
    assert torch.equal(x.full_tensor(), whole)


@pytest.mark.parametrize("shape", [(2, H, W), (2, 4, H, W)])
def test_from_local_is_shard_of_the_whole(shape: tuple[int, ...], mesh: Mesh) -> None:
    labels = (image(*shape) * 10).long()
    for x in (shard(labels, mesh), from_local(own(labels, mesh), mesh, (H, W))):
        assert x.shape == labels.shape
        assert torch.equal(x.full_tensor(), labels)


def test_it_is_shown_without_its_pixels(mesh: Mesh) -> None:
    text = repr(shard(image(), mesh))
    assert text.startswith(f"SpatialTensor(shape=(2, 4, {H}, {W}), tile=(2, 4, ")
    assert f"grid={mesh.grid}" in text


def test_channels_last_is_seen_and_kept(mesh: Mesh) -> None:
    x = shard(image(2, 4, 16, 12), mesh).to(memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.to_local().is_contiguous(memory_format=torch.channels_last)
    y = F.conv2d(x.relu(), image(4, 4, 3, 3), padding=1)
    assert torch.allclose(
        y.full_tensor(), F.conv2d(image(2, 4, 16, 12).relu(), image(4, 4, 3, 3), padding=1)
    )
    assert x.contiguous().to_local().is_contiguous()


# --- pointwise operations

POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "hardswish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2], dtype=x.dtype)),
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "threshold": lambda x: F.threshold(x, 0.1, -1.0),
    "sigmoid": torch.sigmoid,
    "tanh": lambda x: x.tanh(),
    "negative": lambda x: -x,
    "abs": abs,
    "power": lambda x: x**2,
    "exp": lambda x: 2**x,
    "reflected": lambda x: 1 - x,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "where, compared": lambda x: torch.where(x > x.mean(), x, -x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 1.0),
    "lerp": lambda x: torch.lerp(x, x * x, 0.25),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=2),
    "maximum": lambda x: torch.maximum(x, -x),
    "chain": lambda x: (x.exp() + 1).log() * x.sin() / (x.cos() + 2),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "float and back": lambda x: x.float().double(),
    "to": lambda x: x.to(torch.float32).to(torch.float64),
    "zeros_like": lambda x: x + torch.zeros_like(x),
    "ones_like": lambda x: x * torch.ones_like(x),
    "full_like": lambda x: x * torch.full_like(x, 3.0),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "dropout of nothing": lambda x: F.dropout2d(x, 0.0),
    "dropout layers": nn.Sequential(nn.Dropout(), nn.Dropout2d()).eval(),
}
ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU),
    *(nn.Sigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Tanh, nn.Hardtanh, nn.Softplus, nn.Softsign),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
)
POINTWISE |= {kind.__name__: kind() for kind in ACTIVATIONS}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": torch.relu_,
    "F.relu inplace": lambda x: F.relu(x, inplace=True),
    "ReLU6 inplace": nn.ReLU6(inplace=True),
    "Hardswish inplace": nn.Hardswish(inplace=True),
    "SiLU inplace": nn.SiLU(inplace=True),
    "LeakyReLU inplace": nn.LeakyReLU(inplace=True),
    "Mish inplace": nn.Mish(inplace=True),
    "Threshold inplace": nn.Threshold(0.1, -2.0, inplace=True),
    "add_": lambda x: x.add_(2.0),
    "add_ scaled": lambda x: x.add_(x, alpha=0.5),
    "mul_": lambda x: x.mul_(-1),
    "+=": lambda x: x.__iadd__(1.0),
    "clamp_": lambda x: x.clamp_(min=0),
    "sigmoid_": lambda x: x.sigmoid_(),
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(x + 1),
    "all of it set": lambda x: (x.__setitem__(..., 2.0), x)[1],
}


def value_and_gradient(
    operation: Callable[[Tensor], Tensor], whole: Tensor, mesh: Mesh | None
) -> tuple[Tensor, Tensor]:
    leaf = whole.clone().requires_grad_()
    y = operation(leaf * 1 if mesh is None else shard(leaf, mesh))
    weight = torch.arange(whole.numel(), dtype=whole.dtype).view(whole.shape).cos()
    (y * weight).sum().backward()
    if mesh is not None:
        assert isinstance(y, SpatialTensor)
        y = y.full_tensor()
    return y.detach(), leaf.grad


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str, mesh: Mesh) -> None:
    ours = value_and_gradient(POINTWISE[name], image(), mesh)
    plain = value_and_gradient(POINTWISE[name], image(), None)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str, mesh: Mesh) -> None:
    ours = value_and_gradient(IN_PLACE[name], image(), mesh)
    plain = value_and_gradient(IN_PLACE[name], image(), None)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    x = shard(image(), mesh)
    assert IN_PLACE[name](x) is x


BESIDE: dict[str, Tensor | float] = {
    "number": 3.0,
    "scalar": torch.tensor(2.0, dtype=torch.float64),
    "one value": image(1, seed=1),
    "per channel": image(1, 4, 1, 1, seed=1),
    "per channel, three dims": image(4, 1, 1, seed=1),
    "per sample and channel": image(2, 4, 1, 1, seed=1),
    "per row": image(1, 1, H, 1, seed=1),
    "per column": image(W, seed=1),
    "one channel": image(2, 1, H, W, seed=1),
    "one image for all": image(4, H, W, seed=1),
    "full size": image(seed=1),
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("swapped", [False, True])
def test_whole_tensors_beside_it(name: str, swapped: bool, mesh: Mesh) -> None:
    """Broadcast or cut; they are parameters, so their gradients count too."""
    other = BESIDE[name]
    if isinstance(other, Tensor):
        other = other.clone().requires_grad_()

    def operation(x: Tensor) -> Tensor:
        return (other - x) * other if swapped else (x - other) * other

    ours = value_and_gradient(operation, image(), mesh)
    grad = average(other, mesh)
    plain = value_and_gradient(operation, image(), None)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    if grad is not None:
        torch.testing.assert_close(grad, other.grad)


def test_a_trained_scalar_does_not_widen_the_type(mesh: Mesh) -> None:
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = shard(image().float(), mesh) * scale
    assert y.dtype == (image().float() * scale).dtype == torch.float32
    y.sum().backward()
    assert average(scale, mesh).item() == pytest.approx(image().sum().item(), rel=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("split_mask", [False, True])
def test_filling_with_a_trained_value(split_mask: bool, in_place: bool, mesh: Mesh) -> None:
    """A mask token. In place it once ended in an error of PyTorch about its number of dims."""
    token = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    mask = image(1, 1, H, W, seed=1) > 0

    def operation(x: Tensor) -> Tensor:
        chosen = shard(mask, mesh) if split_mask and isinstance(x, SpatialTensor) else mask
        filled = (x * 2).masked_fill_(chosen, token) if in_place else x.masked_fill(chosen, token)
        return filled * filled

    ours = value_and_gradient(operation, image(), mesh)
    grad = average(token, mesh)
    plain = value_and_gradient(operation, image(), None)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(grad, token.grad)


def average(parameter: Tensor | float, mesh: Mesh) -> Tensor | None:
    """The averaged gradient of a parameter, which is cleared."""
    if not isinstance(parameter, Tensor) or parameter.grad is None:
        return None
    grad = parameter.grad.contiguous()
    grad = mesh.comm.all_reduce(grad)
    parameter.grad = None
    return grad / mesh.size


def test_arguments_by_name(mesh: Mesh) -> None:
    x = shard(image(), mesh)
    ours = torch.add(input=x, other=image(seed=1), alpha=2)
    torch.testing.assert_close(ours.full_tensor(), image() + 2 * image(seed=1))


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize("first", [0, 1])
def test_a_second_layout_is_brought_to_the_first(first: int, mesh: Mesh) -> None:
    whole = image(1, 3, 24, 24)
    even = shard(whole, mesh)
    layout = Layout((0, 1), ((0, 1, *even.spatial_layout.cuts[0][2:]), even.spatial_layout.cuts[1]))
    assert layout != even.spatial_layout
    box = mesh.own_box(layout)
    leaf = whole[last_slices(box.slices_in(layout.whole)[1:])].clone().requires_grad_()
    odd = from_tile(leaf, layout, mesh)
    pair = (even, odd) if first == 0 else (odd, even)
    y = pair[0] * 2 + pair[1]
    assert y.spatial_layout == pair[0].spatial_layout
    torch.testing.assert_close(y.full_tensor(), 2 * whole + whole)
    y.sum().backward()
    expected = (1.0 if first == 0 else 2.0) * mesh.size
    torch.testing.assert_close(leaf.grad, torch.full_like(leaf, expected))


# --- autograd


def test_the_gradient_of_the_image_is_the_same_for_shard_and_from_local(mesh: Mesh) -> None:
    kernel = image(3, 4, 3, 3, seed=1)

    def loss(x: Tensor) -> Tensor:
        return F.conv2d(x, kernel, padding=1).sigmoid().mean()

    whole = image().requires_grad_()
    loss(whole).backward()
    leaf = image().requires_grad_()
    loss(shard(leaf, mesh)).backward()
    torch.testing.assert_close(leaf.grad, whole.grad)
    tile = own(image(), mesh).clone().requires_grad_()
    loss(from_local(tile, mesh, (H, W))).backward()
    torch.testing.assert_close(tile.grad, own(whole.grad, mesh))


def _set(x: SpatialTensor) -> SpatialTensor:
    x.requires_grad = True
    return x


def _set_and_reset(x: SpatialTensor) -> SpatialTensor:
    return x.requires_grad_().requires_grad_(False).requires_grad_()


LEAVES: dict[str, Callable[[SpatialTensor], SpatialTensor]] = {
    "requires_grad_()": lambda x: x.requires_grad_(),
    "requires_grad = True": _set,
    "set, unset and set": _set_and_reset,
    "of a copy": lambda x: copy.deepcopy(x.requires_grad_()),
    "of a detached image": lambda x: x.detach().requires_grad_(),
    "a parameter": torch.nn.Parameter,
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=True),
}


@pytest.mark.parametrize("name", LEAVES)
def test_the_gradient_of_a_split_leaf_is_that_of_one_process(name: str, mesh: Mesh) -> None:
    split, plain = LEAVES[name](shard(image(), mesh)), LEAVES[name](image())
    weight = torch.rand(3, 4, 3, 3, dtype=torch.float64, generator=torch.manual_seed(0))
    for leaf in (split, plain):
        (F.conv2d(leaf.sin(), weight).square().mean() + leaf.exp().sum()).backward()
    assert isinstance(split.grad, SpatialTensor)
    torch.testing.assert_close(split.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-13)
    loss = F.conv2d(split.sin(), weight).square().mean() + split.exp().sum()
    (grad,) = torch.autograd.grad(loss, split)
    torch.testing.assert_close(grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-13)


def test_a_network_cut_in_two_by_hand_has_the_gradients_of_one_process(mesh: Mesh) -> None:
    leaf, plain = (image().requires_grad_() for _ in range(2))
    (plain.sin() * plain).square().mean().backward()
    activation = shard(leaf, mesh).sin()
    cut = activation.detach().requires_grad_()
    (cut * shard(leaf, mesh)).square().mean().backward()
    activation.backward(cut.grad)
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-12, atol=1e-13)


def test_full_tensor_is_differentiable(mesh: Mesh) -> None:
    leaf = image().requires_grad_()
    whole = shard(leaf, mesh).full_tensor()
    (whole.flatten() * torch.arange(whole.numel())).sum().backward()
    torch.testing.assert_close(
        leaf.grad.flatten(), torch.arange(whole.numel(), dtype=torch.float64)
    )


def test_to_local_is_differentiable(mesh: Mesh) -> None:
    leaf = image().requires_grad_()
    (shard(leaf, mesh).to_local() * (mesh.part + 1)).sum().backward()
    parts = torch.zeros(1, 1, H, W, dtype=torch.float64)
    for part, box in enumerate(mesh.layout(1, (H, W)).boxes):
        parts[last_slices(slice(*own) for own in box.spatial)] = part + 1
    torch.testing.assert_close(leaf.grad * mesh.size, parts.expand(2, 4, H, W))


def test_deepcopy_is_a_copy_of_the_tile(mesh: Mesh) -> None:
    x = shard(image(), mesh).requires_grad_()
    copied = copy.deepcopy(x)
    assert copied.requires_grad
    copied.detach().zero_()
    assert torch.equal(x.full_tensor(), image())
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(x * 2)


def test_no_grad_and_detach(mesh: Mesh) -> None:
    leaf = image().requires_grad_()
    x = shard(leaf, mesh)
    with torch.no_grad():
        assert not F.conv2d(x, image(3, 4, 3, 3)).requires_grad
        assert not x.relu().requires_grad
    detached = x.detach()
    assert isinstance(detached, SpatialTensor)
    assert not detached.requires_grad
    assert x.clone().requires_grad
    assert (detached * 2).sum().requires_grad is False
    with pytest.raises(RuntimeError, match="does not require grad"):
        detached.sum().backward()


def test_hooks_of_modules_see_split_images(mesh: Mesh) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()).double()
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda *call: seen.append(call[2]))
    model[1].register_full_backward_hook(lambda *call: seen.append(call[2][0]))
    x = shard(image(), mesh).requires_grad_()
    model(x).sum().backward()
    # one rank differentiates its tile as any tensor, so that hooks see plain gradients there
    assert [isinstance(value, SpatialTensor) for value in seen] == [True, mesh.size > 1]
    assert [value.shape for value in seen] == [torch.Size((2, 4, H, W))] * 2


def test_a_whole_gradient_is_cut(mesh: Mesh) -> None:
    kernel = image(4, 4, 3, 3)
    leaf, plain = (image().requires_grad_() for _ in range(2))
    F.conv2d(shard(leaf, mesh), kernel, padding=1).backward(image(seed=2))
    F.conv2d(plain, kernel, padding=1).backward(image(seed=2))
    torch.testing.assert_close(leaf.grad * mesh.size, plain.grad)


def test_gradients_for_images_and_parameters_together(mesh: Mesh) -> None:
    x, weight = shard(image(), mesh).requires_grad_(), image(3, 4, 3, 3).requires_grad_()
    y = F.conv2d(x, weight)
    of_x, of_weight = torch.autograd.grad(y.square().sum(), [x, weight])
    assert isinstance(of_x, SpatialTensor)
    assert of_weight.shape == weight.shape
    if mesh.size == 1:
        return  # any gradient is of the whole image
    with pytest.raises(UnsupportedSpatialOp, match="gradient of a split image must be split"):
        torch.autograd.grad(F.conv2d(x, weight), [weight], image(2, 3, H - 2, W - 2))


class Passed(torch.autograd.Function):
    """A user's own: hands its input on."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_users_own_autograd_function(mesh: Mesh) -> None:
    leaf = image().requires_grad_()
    y = Passed.apply(shard(leaf, mesh))
    assert isinstance(y, SpatialTensor)
    y.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full_like(leaf, 2.0))


# --- what it refuses

LABELS = torch.zeros(2, H, W, dtype=torch.int64)
ASKED: dict[str, Callable[[Tensor], object]] = {
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(2, -1),
    "reshape": lambda x: x.reshape(2, 4, -1),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(2, 3),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.squeeze(),
    "expand": lambda x: x.expand(3, 2, 4, H, W),
    "repeat": lambda x: x.repeat(1, 1, 2, 1),
    "cat": lambda x: torch.cat([x, x], 1),
    "cat with whole": lambda x: torch.cat([image(), x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "chunk": lambda x: x.chunk(2, 1),
    "split": lambda x: x.split(2, 2),
    "unbind": lambda x: x.unbind(0),
    "iteration": list,
    "one sample": lambda x: x[0],
    "slice of rows": lambda x: x[:, :, 2:5],
    "slice of channels": lambda x: x[:, :2],
    "mask": lambda x: x[x > 0],
    "set rows": lambda x: x.clone().__setitem__((0, 0, 3), 0.0),
    "index_select": lambda x: x.index_select(2, torch.tensor([0])),
    "gather": lambda x: x.gather(2, torch.zeros(2, 4, 1, W, dtype=torch.int64)),
    "take from whole": lambda x: image().flatten()[x.long()],
    "flip": lambda x: x.flip(3),
    "roll": lambda x: x.roll(1, 2),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "tril": lambda x: x.tril(),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate, bilinear": lambda x: F.interpolate(x, size=(5, 5), mode="bilinear"),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2, dtype=torch.float64)),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "pad, reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "unfold": lambda x: F.unfold(x, 3),
    "Tensor.unfold": lambda x: x.unfold(2, 2, 1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "conv1d": lambda x: F.conv1d(x, image(4, 4, 3)),
    "conv3d": lambda x: F.conv3d(x, image(4, 4, 3, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, image(4, 4, 3, 3)),
    "a split kernel": lambda x: F.conv2d(image(), x),
    "both split": lambda x: F.conv2d(x, x),
    "a layer that pads by reflection": lambda x: F.conv2d(
        F.pad(x, (1, 1, 1, 1), "reflect"), image(4, 4, 3, 3, seed=1)
    ),
    "max_pool2d with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "adaptive_avg_pool2d(2)": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive_avg_pool2d(None)": lambda x: F.adaptive_avg_pool2d(x, (None, 1)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 1),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "dropout in training": lambda x: F.dropout(x, 0.5),
    "dropout2d in training": lambda x: F.dropout2d(x, 0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x.bernoulli(0.5),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, (W,)),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "normalize": F.normalize,
    "softmax over W": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "cumsum": lambda x: x.cumsum(3),
    "cumprod": lambda x: x.cumprod(2),
    "sort": lambda x: x.sort(),
    "argsort": lambda x: x.argsort(1),
    "topk": lambda x: x.topk(2),
    "argmax": lambda x: x.argmax(1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(1),
    "amax": lambda x: x.amax((2, 3)),
    "median": lambda x: x.median(),
    "std": lambda x: x.std(),
    "var": lambda x: x.var((2, 3)),
    "norm": lambda x: x.norm(),
    "prod": lambda x: x.prod(),
    "any": lambda x: (x > 0).any(),
    "all": lambda x: (x > 0).all(),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "sum over rows": lambda x: x.sum(2),
    "sum over columns, kept": lambda x: x.sum(-1, keepdim=True),
    "sum over channels, not kept": lambda x: x.sum(1),
    "mean over samples": lambda x: x.mean(0),
    "linear": lambda x: F.linear(x, image(3, W)),
    "matmul": lambda x: x @ image(W, 3),
    "matmul of both": lambda x: x @ x.detach().mT,
    "einsum": lambda x: torch.einsum("nchw,cd->ndhw", x, image(4, 4)),
    "bilinear": lambda x: F.bilinear(x, x, image(2, W, W)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "nll_loss": lambda x: F.nll_loss(x, LABELS),
    "mse_loss": lambda x: F.mse_loss(x, image()),
    "l1_loss": lambda x: F.l1_loss(x, image()),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy_with_logits(x, image()),
    "fft": torch.fft.fft2,
    "svd": torch.linalg.svd,
    "equal": lambda x: torch.equal(x, x.detach()),
    "Tensor.equal": lambda x: x.equal(image()),
    "equal to a whole": lambda x: torch.equal(image(), x),
    "allclose": lambda x: torch.allclose(x, x.detach()),
    "in": lambda x: 0.5 in x,
    "numpy": lambda x: x.detach().numpy(),
    "np.asarray": lambda x: np.asarray(x.detach()),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "data_ptr": lambda x: x.data_ptr(),
    "pickle": pickle.dumps,
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "share_memory_": lambda x: x.detach().share_memory_(),
    "apply_": lambda x: x.detach().apply_(lambda value: value),
    "map_": lambda x: x.detach().map_(x.detach(), lambda value, other: value),
    "a vector of another size beside it": lambda x: x + image(W + 1),
    "a map of another size beside it": lambda x: x + image(1, 1, H + 1, W),
    "more dims beside it": lambda x: x + image(1, 1, 1, 1, 1),
    "a split image of another size beside it": lambda x: x + F.max_pool2d(x, 2),
    "whole += split": lambda x: image().__iadd__(x),
    "whole.copy_(split)": lambda x: image().copy_(x),
    "whole[...] = split": lambda x: image().__setitem__(..., x),
    "split.data of another size": lambda x: setattr(x.detach(), "data", F.max_pool2d(x, 2)),
    "into a whole": lambda x: torch.add(x.detach(), 1.0, out=image()),
    "into a scalar": lambda x: torch.exp(x.detach(), out=torch.tensor(0.0, dtype=x.dtype)),
}


@torch.library.custom_op("spatialdl_tests::neighbours", mutates_args=())
def neighbours(x: Tensor, others: Tensor) -> Tensor:
    """An operator of another library, such as neighbourhood attention."""
    return x.roll(1, -1) + others


class Neighbours(torch.autograd.Function):
    """How such libraries give their operators a gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return neighbours(x, x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize(
    "call",
    [
        lambda x: neighbours(x, x),
        lambda x: torch.ops.spatialdl_tests.neighbours(x, image()),
        Neighbours.apply,
    ],
)
@pytest.mark.usefixtures("still_talking")
def test_operators_of_other_libraries_are_refused_by_name(
    call: Callable[[Tensor], Tensor], mesh: Mesh
) -> None:
    if mesh.size > 1:
        with pytest.raises(UnsupportedSpatialOp, match=r"neighbours.* is not supported on an"):
            call(shard(image().requires_grad_(), mesh))


def test_what_no_table_sees_finds_no_data(mesh: Mesh) -> None:
    """As a function of a C++ extension that is no operator."""
    x = shard(image(), mesh)
    if mesh.size > 1:
        with (
            torch._C.DisableTorchFunctionSubclass(),
            pytest.raises(RuntimeError, match="data point"),
        ):
            x.data_ptr()


@pytest.fixture
def still_talking(mesh: Mesh) -> Iterator[None]:
    """After a refusal ranks are where they were: they can go on together."""
    yield
    mesh.comm.barrier()
    kernel = image(3, 4, 3, 3, seed=1)
    y = F.conv2d(shard(image(), mesh), kernel, padding=1)
    torch.testing.assert_close(y.full_tensor(), F.conv2d(image(), kernel, padding=1))


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.usefixtures("still_talking")
def test_exact_or_refused_on_every_rank_alike(name: str, mesh: Mesh) -> None:
    x = shard(image().requires_grad_(), mesh)
    said = given = None
    try:
        given = ASKED[name](x)
    except UnsupportedSpatialOp as error:
        said = str(error)
    except RuntimeError:
        assert mesh.size == 1
        with pytest.raises(RuntimeError):
            ASKED[name](image())
        return
    assert said is None or f"{mesh.grid[0]}x{mesh.grid[1]} over {H}x{W}" in said
    assert len(set(mesh.comm.allgather(said))) == 1
    if said is not None or name in DRAWN:
        return
    pairs = zip(tree_leaves(given), tree_leaves(ASKED[name](image())), strict=True)
    for ours, plain in pairs:
        if not isinstance(plain, Tensor):
            assert ours == plain
            continue
        whole = ours.full_tensor() if isinstance(ours, SpatialTensor) else ours
        torch.testing.assert_close(whole, plain, rtol=1e-10, atol=1e-10)


DRAWN = {name for name in ASKED if "dropout" in name or "like" in name or "rrelu" in name} | {
    "bernoulli",
    "normal_",
    "uniform_",
}
"""Random numbers, compared elsewhere."""


REFUSED = [
    "mask",
    "gather",
    "take from whole",
    "a split kernel",
    "both split",
    "max_pool2d with indices",
    "cumsum",
    "cumprod",
    "median",
    "nonzero",
    "unique",
    "sort",
    "bilinear",
    "fft",
    "svd",
    "equal",
    "Tensor.equal",
    "equal to a whole",
    "numpy",
    "np.asarray",
    "item",
    "tolist",
    "data_ptr",
    "pickle",
    "dlpack",
    "share_memory_",
    "apply_",
    "map_",
    "a vector of another size beside it",
    "a map of another size beside it",
    "a split image of another size beside it",
    "whole += split",
    "whole.copy_(split)",
    "whole[...] = split",
    "split.data of another size",
    "into a whole",
    "into a scalar",
]


DONE_BY_ONE_RANK = {
    *("both split", "nonzero", "unique", "bilinear", "fft", "svd", "whole += split"),
    "split.data of another size",
    *("whole.copy_(split)", "into a whole", "into a scalar", "a vector of another size beside it"),
    *("a map of another size beside it", "a split image of another size beside it"),
}
"""Its tile is the whole image, so that PyTorch does it, or refuses it."""


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, mesh: Mesh) -> None:
    if mesh.size == 1 and name in DONE_BY_ONE_RANK:
        pytest.skip("one rank has the whole image")
    with pytest.raises(UnsupportedSpatialOp):
        ASKED[name](shard(image().requires_grad_(), mesh))


@pytest.mark.parametrize(
    ("name", "operation"),
    [("cumsum", "cumsum"), ("svd", "linalg_svd"), ("numpy", "numpy"), ("sort", "sort")],
)
def test_a_refusal_names_the_operation_and_what_to_do(
    name: str, operation: str, mesh: Mesh
) -> None:
    if mesh.size == 1 and name in DONE_BY_ONE_RANK:
        pytest.skip("one rank has the whole image")
    with pytest.raises(UnsupportedSpatialOp, match=f"^{operation}") as error:
        ASKED[name](shard(image(), mesh))
    assert "full_tensor()" in str(error.value)


@pytest.mark.world(2, 3, 4)
def test_a_refused_write_has_written_nothing(mesh: Mesh) -> None:
    whole = image()
    x = shard(image() + 1, mesh)
    for write in (
        lambda: whole.__setitem__(slice(None), x),
        lambda: torch.mul(x, x, out=whole),
        lambda: whole.add_(x),
    ):
        with pytest.raises(UnsupportedSpatialOp):
            write()
    assert torch.equal(whole, image())


def test_data_of_a_split_tensor_is_its_tile(mesh: Mesh) -> None:
    """It kept the old tile, and all that followed had the old numbers."""
    x, reference = shard(image(), mesh), image()
    for value in (image(seed=1), shard(image(seed=2), mesh), x * 2 - 1):
        whole = value.full_tensor() if isinstance(value, SpatialTensor) else value
        x.data, reference.data = value, whole.clone()
        torch.testing.assert_close((x + 1).full_tensor(), reference + 1)


@pytest.mark.world(2, 3, 4)
def test_data_shared_with_another_split_tensor_are_not_written_to_unseen(mesh: Mesh) -> None:
    """A write into the one is a write into the other, of which autograd knows nothing."""
    x, value = shard(image(), mesh), shard(image(seed=1).requires_grad_(), mesh)
    y = value * 2
    x.data = y
    with pytest.raises(UnsupportedSpatialOp, match="it would also modify another split tensor"):
        x.mul_(2)


@pytest.mark.parametrize(
    "call",
    [
        bool,
        float,
        pytest.param(lambda x: x.untyped_storage().data_ptr(), marks=pytest.mark.world(2, 3, 4)),
        lambda x: x + torch.ones(2, 3, H, W),
    ],
)
@pytest.mark.usefixtures("still_talking")
def test_what_pytorch_itself_refuses(call: Callable[[Tensor], object], mesh: Mesh) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        call(shard(image(), mesh))


# --- teaching, making


def test_an_operation_can_be_taught(mesh: Mesh) -> None:
    x = shard(image(), mesh)
    with pytest.raises(UnsupportedSpatialOp):
        torch.median(x)

    @spatialdl.register_op(torch.median)
    def median(input: SpatialTensor, dim: object = ()) -> Tensor:
        tile = input.to_local()
        return tile.new_tensor(input.mesh.grid_comm.allreduce(tile.max().item(), op=MPI.MAX))

    try:
        assert torch.median(x) == image().max()
        assert torch.median(image()) == image().median()
    finally:
        del HANDLERS[torch.median]


def test_a_taught_operation_is_an_ordinary_function(mesh: Mesh) -> None:
    def handler(input: Tensor) -> str:
        return "taught"

    assert spatialdl.register_op(torch.trace)(handler) is handler
    try:
        assert torch.trace(shard(image(), mesh)) == "taught"
        flip = HANDLERS[torch.flip]
        with pytest.warns(UserWarning, match="flip works on split images already; .* replaces the"):
            spatialdl.register_op(torch.flip)(handler)
    finally:
        del HANDLERS[torch.trace]
        HANDLERS[torch.flip] = flip


@pytest.mark.parametrize("shape", [(H, W), (W,), (1, 2, 4, H, W)])
def test_images_have_three_or_four_dims(shape: tuple[int, ...], mesh: Mesh) -> None:
    for make in (lambda t: shard(t, mesh), lambda t: from_local(t, mesh, (H, W))):
        with pytest.raises(ValueError, match=r"\(N, C, H, W\) or \(N, H, W\), got shape"):
            make(torch.zeros(shape))


def test_an_image_smaller_than_the_grid_is_refused(mesh: Mesh) -> None:
    rows, cols = mesh.grid
    with pytest.raises(ValueError, match=f"of {rows - 1}x{cols} is smaller than the grid"):
        shard(torch.zeros(1, 1, rows - 1, cols), mesh)


def test_a_tile_of_another_shape_is_refused_with_the_box(mesh: Mesh) -> None:
    tile = own(image(), mesh)[..., 1:, :]
    with pytest.raises(ValueError, match=r"cut the tile by mesh\.box") as error:
        from_local(tile, mesh, (H, W))
    assert str(mesh.box((H, W))) in str(error.value)
    assert f"rank {mesh.comm.rank} has a tile of {tile.shape[-2]}x" in str(error.value)


def test_a_size_of_one_number_is_refused(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="expects a size for each spatial dim: the grid"):
        from_local(own(image(), mesh), mesh, H)  # type: ignore[arg-type]


def test_splitting_twice_is_refused(mesh: Mesh) -> None:
    x = shard(image(), mesh)
    with pytest.raises(ValueError, match="already split"):
        shard(x, mesh)


def test_shard_copies_and_from_local_does_not(mesh: Mesh) -> None:
    whole = image()
    shard(whole, mesh).zero_()
    assert torch.equal(whole, image())


@pytest.mark.world(2, 3, 4)
def test_the_mesh_must_be_the_world(world: MPI.Intracomm) -> None:
    with pytest.raises(
        ValueError, match=rf"world has {world.size} ranks: start it with `mpiexec -n 7`"
    ):
        init_mesh((7, 1))


@pytest.mark.world(4)
def test_a_mesh_with_replicas(world: MPI.Intracomm) -> None:
    mesh = init_mesh((1, 2), data=2)
    assert (mesh.replica, mesh.part) == divmod(world.rank, 2)
    assert (mesh.size, mesh.comm.size, mesh.grid_comm.size) == (4, 4, 2)
    assert mesh.grid_comm.allgather(world.rank) == [2 * mesh.replica, 2 * mesh.replica + 1]
    whole = image(seed=mesh.replica)
    assert torch.equal(shard(whole, mesh).full_tensor(), whole)


@pytest.mark.parametrize("seed", range(5))
def test_any_box_of_any_image(seed: int, mesh: Mesh) -> None:
    rng = random.Random(seed)
    size = rng.randint(mesh.grid[0], 40), rng.randint(mesh.grid[1], 40)
    whole = image(1, 1, *size, seed=seed)
    tiles = mesh.comm.allgather((mesh.box(size), own(whole, mesh).numpy()))
    built = np.full(size, np.nan)
    for (row0, row1, col0, col1), tile in tiles:
        assert np.isnan(built[row0:row1, col0:col1]).all()
        built[row0:row1, col0:col1] = tile[0, 0]
    assert (built == whole.numpy()).all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: F.grid_sample(x, torch.zeros(1, 4, 4, 2), align_corners=False), "may read pix"),
        (lambda x: torch.jit.trace(torch.nn.Conv2d(3, 2, 1), x), "record operations on plain"),
        (torch.jit.script(nn.Conv2d(3, 2, 1)), "^forward of a scripted.*13x11.*before torch.jit"),
        (torch.jit.trace(nn.Conv2d(3, 2, 1), torch.ones(1, 3, 5, 5)), "^forward of a scripted"),
    ],
)
def test_refusals_say_what_cannot_be_split(
    call: Callable[[Tensor], object], sentence: str, meshes: dict
) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match=sentence):
            call(shard(torch.ones(1, 3, 13, 11), mesh))


@torch.jit.script
def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@torch.jit.script
def softmax_of_rows(x: Tensor) -> Tensor:
    return x.softmax(2)


def test_scripted_functions_are_exact_or_warn_with_the_reason(mesh: Mesh) -> None:
    x = shard(image(), mesh)
    if mesh.size == 1:  # the interpreter does not know that it is given more than a plain tensor
        assert torch.equal(swish(x), swish(image()))
        return
    assert torch.equal(swish(x).full_tensor(), swish(image()))
    with (
        pytest.warns(UserWarning, match=r"softmax.*split.*before torch.jit.script"),
        pytest.raises(RuntimeError, match="TorchScript"),
    ):
        softmax_of_rows(x)


def test_a_split_leaf_takes_a_gradient_in_another_order_of_memory(mesh: Mesh) -> None:
    def run(x: Tensor) -> Tensor:
        (F.layer_norm(x.movedim(1, -1), (4,)) ** 3).sin().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = run(image().requires_grad_())
    found = run(shard(image().to(DEVICE), mesh).detach().requires_grad_())
    assert isinstance(found, SpatialTensor)
    torch.testing.assert_close(found.full_tensor().cpu(), expected, rtol=1e-10, atol=1e-10)
