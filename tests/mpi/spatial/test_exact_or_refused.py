"""An image that is asked for anything: what comes is exact, or refused on every rank alike."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import spatialdl
from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, init_mesh, shard
from spatialdl.models import resnet50
from tests.mpi.equality import Operation
from tests.mpi.spatial.test_families import FAMILIES, drawn
from tests.mpi.spatial.test_views import VIEWS

H, W = 13, 10


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    ranks = MPI.COMM_WORLD.size
    return init_mesh((2, 2) if ranks == 4 else (ranks, 1))


def image(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (2, 4, H, W), dtype=torch.float64, generator=draw)


ASKED: dict[str, Callable[[Tensor], object]] = {
    "mask": lambda x: x[x > 0],
    "gather": lambda x: x.gather(2, torch.zeros(2, 4, 1, W, dtype=torch.int64)),
    "take from whole": lambda x: image().flatten()[x.long()],
    "tril": lambda x: x.tril(),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2, dtype=torch.float64)),
    "conv1d": lambda x: F.conv1d(x, image(4, 4, 3)),
    "conv3d": lambda x: F.conv3d(x, image(4, 4, 3, 3, 3)),
    "a split kernel": lambda x: F.conv2d(image(), x),
    "both split": lambda x: F.conv2d(x, x),
    "max_pool2d with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x.bernoulli(0.5),
    "rand_like": torch.rand_like,
    "cumsum": lambda x: x.cumsum(3),
    "sort": lambda x: x.sort(),
    "median": lambda x: x.median(),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "bilinear": lambda x: F.bilinear(x, x, image(2, W, W)),
    "fft": torch.fft.fft2,
    "svd": torch.linalg.svd,
    "equal": lambda x: torch.equal(x, x.detach()),
    "equal to a whole": lambda x: torch.equal(image(), x),
    "allclose": lambda x: torch.allclose(x, x.detach()),
    "in": lambda x: 0.5 in x,
    "numpy": lambda x: x.detach().numpy(),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "data_ptr": lambda x: x.data_ptr(),
    "pickle": pickle.dumps,
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "apply_": lambda x: x.detach().apply_(lambda value: value),
    "map_": lambda x: x.detach().map_(x.detach(), lambda value, other: value),
    "a vector of another size beside it": lambda x: x + image(W + 1),
    "more dims beside it": lambda x: x + image(1, 1, 1, 1, 1),
    "a split image of another size beside it": lambda x: x + F.max_pool2d(x, 2),
    "whole += split": lambda x: image().__iadd__(x),
    "whole.copy_(split)": lambda x: image().copy_(x),
    "whole[...] = split": lambda x: image().__setitem__(..., x),
    "split.data of another size": lambda x: setattr(x.detach(), "data", F.max_pool2d(x, 2)),
    "into a whole": lambda x: torch.add(x.detach(), 1.0, out=image()),
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


DRAWN = {"rrelu", "bernoulli", "rand_like"}
"""Random numbers, compared elsewhere."""

REFUSED = (
    *("mask", "gather", "take from whole", "a split kernel", "both split"),
    *("max_pool2d with indices", "cumsum", "median", "nonzero", "unique", "sort"),
    *("bilinear", "fft", "svd", "equal", "equal to a whole", "numpy"),
    *("item", "tolist", "data_ptr", "pickle", "dlpack", "apply_"),
    *(
        "map_",
        "a vector of another size beside it",
    ),
    *("a split image of another size beside it", "whole += split", "whole.copy_(split)"),
    *("whole[...] = split", "split.data of another size", "into a whole"),
)

DONE_BY_ONE_RANK = {
    *("both split", "nonzero", "unique", "bilinear", "fft", "svd", "whole += split"),
    "split.data of another size",
    *(
        "whole.copy_(split)",
        "into a whole",
        "a vector of another size beside it",
        "a split image of another size beside it",
    ),
}
"""Its tile is the whole image, so that PyTorch does it, or refuses it."""


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
    if name in REFUSED and (mesh.size > 1 or name not in DONE_BY_ONE_RANK):
        assert said is not None
    if name in ("cumsum", "svd", "numpy", "sort") and said is not None:
        assert said.startswith("linalg_svd" if name == "svd" else name)
        assert "full_tensor()" in said
    if said is not None or name in DRAWN:
        return
    pairs = zip(tree_leaves(given), tree_leaves(ASKED[name](image())), strict=True)
    for ours, plain in pairs:
        if not isinstance(plain, Tensor):
            assert ours == plain
            continue
        whole = ours.full_tensor() if isinstance(ours, SpatialTensor) else ours
        torch.testing.assert_close(whole, plain, rtol=1e-10, atol=1e-10)


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


# --- a grid of one rank: as PyTorch's own, and split where those of others are


@pytest.fixture(scope="module")
def one() -> Mesh:
    """A grid of this rank alone."""
    return init_mesh((1, 1), comm=MPI.COMM_SELF)


@pytest.fixture(scope="module")
def all_ranks() -> Mesh:
    """Which draws as many numbers as the other one, for it serves the same tests."""
    ranks = MPI.COMM_WORLD.size
    return init_mesh((2, 2) if ranks == 4 else (ranks, 1))


MORE: dict[str, Callable[[Tensor], object]] = {
    "same from the right": lambda x: image(4, 1, 1) * x,
    "a whole image": lambda x: image() + x,
    "a whole image as the other's type": lambda x: image().type_as(x),
    "more dims": lambda x: x + image(3, 2, 4, 1, 1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "float": lambda x: x.float(),
    "clone": lambda x: x.clone(),
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=True),
    "compare": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "two results": torch.frexp,
    "in place": lambda x: (x * 1).relu_(),
    "one row": lambda x: x[:, :, 3],
    "steps": lambda x: x[:, 1, 1::2, :7],
    "losses of pixels": lambda x: F.mse_loss(x, image(seed=1), reduction="none"),
}
ALSO: dict[str, tuple[Operation, Tensor]] = {
    **{name: (call, image()) for name, call in {**ASKED, **MORE}.items()},
    **{name: (view, torch.rand(2, 4, 12, 8)) for name, view in VIEWS.items()},
    **{
        name: (lambda x, f=family: f(x, drawn(2)[1], 2), drawn(2)[0])
        for name, family in FAMILIES.items()
    },
}


@pytest.mark.parametrize("name", ALSO)
def test_the_same_results_are_split_on_one_rank_and_on_all(
    name: str, one: Mesh, all_ranks: Mesh
) -> None:
    """Also random numbers are then drawn for the same tensors in the same way."""
    operation, whole = ALSO[name]
    try:
        expected = operation(shard(whole.clone().requires_grad_(), all_ranks))
    except (UnsupportedSpatialOp, RuntimeError):
        return
    given = operation(shard(whole.clone().requires_grad_(), one))
    for ours, theirs in zip(tree_leaves(given), tree_leaves(expected), strict=True):
        assert isinstance(ours, SpatialTensor) == isinstance(theirs, SpatialTensor)
        assert isinstance(ours, Tensor) == isinstance(theirs, Tensor)
        if isinstance(theirs, Tensor):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert ours.requires_grad == theirs.requires_grad
        if isinstance(theirs, SpatialTensor):
            assert ours.spatial_dims == theirs.spatial_dims
            assert ours.spatial_layout.size == theirs.spatial_layout.size
            assert ours.spatial_layout.grid == (1, 1)
            # random numbers too, in whichever layout they were drawn
            torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor())


def test_a_training_step_has_the_bits_of_one_process(one: Mesh) -> None:
    torch.manual_seed(0)
    network, images = resnet50(num_classes=3), torch.randn(2, 3, 64, 64)
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight)
    results = []
    for x in (images, shard(images, one)):
        network.zero_grad()
        loss = F.cross_entropy(network(x), torch.tensor([0, 2]))
        loss.backward()
        buffers = [value.clone() for value in network.buffers()]
        network.apply(lambda m: isinstance(m, nn.BatchNorm2d) and m.reset_running_stats())
        results.append([loss, *(p.grad.clone() for p in network.parameters()), *buffers])
    plain, ours = results
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_what_draws_without_a_handler_is_refused(one: Mesh) -> None:
    for draw in (Tensor.cauchy_, Tensor.log_normal_, torch.poisson):
        with pytest.raises(UnsupportedSpatialOp):
            draw(shard(image().abs(), one))


def test_gradients_are_split(one: Mesh) -> None:
    x = shard(image(), one).requires_grad_()
    hooked: list[Tensor] = []
    x.register_hook(hooked.append)
    (x * 3).sum().backward()
    (returned,) = torch.autograd.grad((x * 2).sum(), x)
    for grad, value in ((hooked[0], 3), (x.grad, 3), (returned, 2)):
        assert isinstance(grad, SpatialTensor)
        assert grad.spatial_layout == x.spatial_layout
        torch.testing.assert_close(
            grad.full_tensor(), torch.full((2, 4, H, W), float(value)).double()
        )


def test_views_are_pytorchs(one: Mesh) -> None:
    """What is written to them reaches the image, and autograd knows."""

    def steps(x: Tensor) -> Tensor:
        x = x * 1
        x[:, :, 3].mul_(2)
        x.permute(0, 2, 3, 1)[:, 1:5, 2:].add_(x.mean())
        return x.relu_() * x

    plain, ours = (image().requires_grad_() for _ in range(2))
    expected, given = steps(plain), steps(shard(ours, one))
    assert isinstance(given, SpatialTensor)
    assert torch.equal(given.full_tensor(), expected)
    expected.sum().backward()
    given.sum().backward()
    assert torch.equal(ours.grad, plain.grad)


def test_a_plain_tensor_that_is_handed_on_stays_plain(one: Mesh) -> None:
    x, plain = shard(image(), one), image()
    assert isinstance(plain.type_as(x), SpatialTensor)
    assert torch.add(plain, x, out=plain) is plain
    assert type(plain) is Tensor
    base = image()
    view = spatialdl.from_local(base, one, (H, W))
    assert type(view._base) is not SpatialTensor or view._base is not base
    assert type(base) is Tensor


def test_dims_do_not_change_in_place(one: Mesh) -> None:
    for change in (lambda x: x.transpose_(1, 3), lambda x: x.unsqueeze_(0), lambda x: x.t_()):
        with pytest.raises(UnsupportedSpatialOp, match="in place"):
            change(shard(image(), one))


def test_a_detached_tile_is_the_same_memory(one: Mesh) -> None:
    x = shard(image(), one)
    x.to_local().zero_()
    assert math.isclose(float(x.full_tensor().abs().sum()), 0.0)
