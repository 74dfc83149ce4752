"""SpatialTensor as users meet it: what it says, what it does, what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import spatialdl
from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, from_local, init_mesh, shard
from spatialdl.layout.layout import Layout, last_slices
from spatialdl.spatial.table import HANDLERS
from spatialdl.spatial.tensor import from_tile
from tests.mpi.equality import Operation, check, close

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


def test_sizes_are_global_and_tiles_local(mesh: Mesh) -> None:
    whole = image()
    x = shard(whole, mesh)
    assert x.shape == x.size() == torch.Size((2, 4, H, W))
    assert (x.size(2), x.shape[-1], x.dim(), x.ndim) == (H, W, 4, 4)
    assert (x.numel(), len(x), x.dtype) == (2 * 4 * H * W, 2, torch.float64)
    assert x.layout == torch.strided
    assert x.is_contiguous()
    assert (x.spatial_layout.samples, x.spatial_layout.size) == (2, (H, W))
    assert isinstance(x, Tensor)
    assert type(x.to_local()) is type(x.full_tensor()) is Tensor
    assert torch.equal(x.to_local(), own(whole, mesh))
    assert torch.equal(x.full_tensor(), whole)
    text = repr(x)  # without its pixels
    assert text.startswith(f"SpatialTensor(shape=(2, 4, {H}, {W}), tile=(2, 4, ")
    assert f"grid={mesh.grid}" in text


def test_a_lazy_conjugate_is_taken_as_it_is_seen(mesh: Mesh) -> None:
    """Kernels saw the values below it."""
    lazy = torch.complex(image(2, 4, H, W), image(2, 4, H, W) + 1).conj()
    for tile in (lazy, lazy.imag):
        x = from_local(own(tile, mesh), mesh, (H, W))
        assert torch.equal((x * 1).full_tensor(), tile)
        assert torch.equal(shard(tile, mesh).angle().full_tensor(), tile.angle())


@pytest.mark.parametrize("shape", [(2, H, W), (2, 4, H, W)])
def test_from_local_is_shard_of_the_whole(shape: tuple[int, ...], mesh: Mesh) -> None:
    labels = (image(*shape) * 10).long()
    for x in (shard(labels, mesh), from_local(own(labels, mesh), mesh, (H, W))):
        assert x.shape == labels.shape
        assert torch.equal(x.full_tensor(), labels)


def test_channels_last_is_seen_and_kept(mesh: Mesh) -> None:
    x = shard(image(2, 4, 16, 12), mesh).to(memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.to_local().is_contiguous(memory_format=torch.channels_last)
    assert x.contiguous().to_local().is_contiguous()


# --- pointwise operations

POINTWISE: dict[str, Operation] = {
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2], dtype=x.dtype)),
    "where, compared": lambda x: torch.where(x > x.mean(), x, -x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 1.0),
    "lerp": lambda x: torch.lerp(x, x * x, 0.25),
    "chain": lambda x: (x.exp() + 1).log() * x.sin() / (x.cos() + 2),
    "float and back": lambda x: x.float().double(),
}
IN_PLACE: dict[str, Operation] = {
    "relu_": torch.relu_,
    "Threshold inplace": nn.Threshold(0.1, -2.0, inplace=True),
    "copy_": lambda x: x.copy_(x + 1),
    "all of it set": lambda x: (x.__setitem__(..., 2.0), x)[1],
}


@pytest.mark.parametrize("name", {**POINTWISE, **IN_PLACE})
def test_pointwise(name: str, mesh: Mesh) -> None:
    operation = {**POINTWISE, **IN_PLACE}[name]
    check(lambda x: operation(x * 1), image(), [], mesh, name)
    if name in IN_PLACE:
        x = shard(image(), mesh)
        assert operation(x) is x


BESIDE: dict[str, Tensor | float] = {
    "number": 3.0,
    "scalar": torch.tensor(2.0, dtype=torch.float64),
    "per channel": image(1, 4, 1, 1, seed=1),
    "per row": image(1, 1, H, 1, seed=1),
    "per column": image(W, seed=1),
    "one channel": image(2, 1, H, W, seed=1),
    "full size": image(seed=1),
}


@pytest.mark.parametrize("name", BESIDE)
def test_whole_tensors_beside_it(name: str, mesh: Mesh) -> None:
    """Broadcast or cut; they are parameters, so their gradients count too."""
    other = BESIDE[name]

    def operation(x: Tensor, *given: Tensor) -> Tensor:
        y = given[0] if given else other
        return (x - y) * y + y / (x * x + 1)

    check(operation, image(), [other] if isinstance(other, Tensor) else [], mesh, name)


def test_a_trained_scalar_does_not_widen_the_type(mesh: Mesh) -> None:
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = shard(image().float(), mesh) * scale
    assert y.dtype == (image().float() * scale).dtype == torch.float32
    y.sum().backward()
    mean = mesh.comm.all_reduce(scale.grad) / mesh.size
    assert mean.item() == pytest.approx(image().sum().item(), rel=1e-5)


def test_filling_with_a_trained_value(mesh: Mesh) -> None:
    """A mask token. In place it once ended in an error of PyTorch about its number of dims."""
    mask = image(1, 1, H, W, seed=1) > 0

    def operation(x: Tensor, token: Tensor) -> Tensor:
        split = shard(mask, mesh) if isinstance(x, SpatialTensor) else mask
        filled = (x * 2).masked_fill_(split, token) + (x * 3).masked_fill_(mask, token)
        return filled * x.masked_fill(split, token) * x.masked_fill(mask, token)

    check(operation, image(), [torch.tensor(2.0).double()], mesh, "filled")


def test_a_whole_tensor_may_stand_before_a_split_one(mesh: Mesh) -> None:
    one, other = image(2, 3, 9, 7, seed=2), image(2, 3, 9, 7, seed=3)
    for first in (one, one[:, :, :1], one[0, 0, 0, 0].view(1, 1, 1)):
        for pair in (lambda a, b: (a > 0) & (b > 0), lambda a, b: a.abs() ** b):
            ours = pair(first, shard(other, mesh)).full_tensor()
            torch.testing.assert_close(ours, pair(first, other))


@pytest.mark.parametrize("dim", [2, 3])
def test_one_split_row_or_column_beside_a_split_image(dim: int, meshes: dict) -> None:
    whole, line = image(2, 3, 9, 7), image(2, 3, 9, 7, seed=1).narrow(dim, 2, 1)
    for mesh in meshes.values():
        if mesh.grid[dim - 2] > 1:
            continue  # one row cannot be shared out among several rows of ranks
        for pair in ((line, whole), (whole, line)):
            plain = [x.clone().requires_grad_() for x in pair]
            ours = [x.clone().requires_grad_() for x in pair]
            expected = plain[0] / plain[1].exp()
            found = shard(ours[0], mesh) / shard(ours[1], mesh).exp()
            assert found.shape == expected.shape
            close(found.full_tensor(), expected, f"on {mesh.grid} ")
            (found * whole).sum().backward()
            (expected * whole).sum().backward()
            for one, other in zip(ours, plain, strict=True):
                close(one.grad, other.grad, f"gradient on {mesh.grid} ")


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


def test_the_gradient_of_a_tile_is_that_of_its_part_of_the_image(mesh: Mesh) -> None:
    """Of the whole image, `check` compares it in all tests of operations."""
    kernel, whole = image(3, 4, 3, 3, seed=1), image().requires_grad_()
    tile = own(image(), mesh).clone().requires_grad_()
    for x in (whole, from_local(tile, mesh, (H, W))):
        F.conv2d(x, kernel, padding=1).sigmoid().mean().backward()
    torch.testing.assert_close(tile.grad, own(whole.grad, mesh))


LEAVES: dict[str, Callable[[SpatialTensor], SpatialTensor]] = {
    "requires_grad = True": lambda x: (setattr(x, "requires_grad", True), x)[1],
    "set, unset and set": lambda x: x.requires_grad_().requires_grad_(False).requires_grad_(),
    "a parameter": torch.nn.Parameter,
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


def test_tiles_are_differentiable(mesh: Mesh) -> None:
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


# --- teaching, making


def test_an_operation_can_be_taught(mesh: Mesh) -> None:
    x, flip = shard(image(), mesh), HANDLERS[torch.flip]
    with pytest.raises(UnsupportedSpatialOp):
        torch.median(x)

    @spatialdl.register_op(torch.median)
    def median(input: SpatialTensor, dim: object = ()) -> Tensor:
        tile = input.to_local()
        return tile.new_tensor(input.mesh.grid_comm.allreduce(tile.max().item(), op=MPI.MAX))

    def handler(input: Tensor) -> str:
        return "taught"

    try:
        assert torch.median(x) == image().max()
        assert torch.median(image()) == image().median()
        assert spatialdl.register_op(torch.trace)(handler) is handler  # an ordinary function
        assert torch.trace(x) == "taught"
        with pytest.warns(UserWarning, match="flip works on split images already; .* replaces the"):
            spatialdl.register_op(torch.flip)(handler)
    finally:
        HANDLERS.pop(torch.median)
        HANDLERS.pop(torch.trace, None)
        HANDLERS[torch.flip] = flip


NOT_AN_IMAGE = r"\(N, C, H, W\) or \(N, H, W\), got shape"
MAKING: dict[str, tuple[str, Callable[[Mesh], object]]] = {
    "no samples": (NOT_AN_IMAGE, lambda mesh: shard(torch.zeros(H, W), mesh)),
    "a tile of a volume": (
        NOT_AN_IMAGE,
        lambda mesh: from_local(torch.zeros(1, 2, 4, H, W), mesh, (H, W)),
    ),
    "one number": (
        "expects a size for each spatial dim: the grid",
        lambda mesh: from_local(own(image(), mesh), mesh, H),
    ),
    "split twice": ("already split", lambda mesh: shard(shard(image(), mesh), mesh)),
}


@pytest.mark.parametrize("name", MAKING)
def test_what_makes_no_split_image(name: str, mesh: Mesh) -> None:
    sentence, make = MAKING[name]
    with pytest.raises(ValueError, match=sentence):
        make(mesh)


def test_tiles_and_images_of_another_size_are_refused(mesh: Mesh) -> None:
    rows, cols = mesh.grid
    with pytest.raises(ValueError, match=f"of {rows - 1}x{cols} is smaller than the grid"):
        shard(torch.zeros(1, 1, rows - 1, cols), mesh)
    tile = own(image(), mesh)[..., 1:, :]
    with pytest.raises(ValueError, match=r"cut the tile by mesh\.box") as error:
        from_local(tile, mesh, (H, W))
    assert str(mesh.box((H, W))) in str(error.value)
    assert f"rank {mesh.comm.rank} has a tile of {tile.shape[-2]}x" in str(error.value)


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
