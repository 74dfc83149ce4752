"""Every family of operations in one to three dims: half precision, autocast, running twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from spatialdl import Mesh, SpatialTensor, init_mesh, shard
from spatialdl.comm.communicator import Communicator
from spatialdl.spatial.random import checkpoint_contexts, keyed
from tests.mpi.device import DEVICE
from tests.mpi.equality import CHANNELS_LAST, check, close, functional, slow_cases, some_meshes
from tests.mpi.spatial.shared import near, tokens
from tests.mpi.spatial.test_views import VIEWS

Family = Callable[[Tensor, Tensor, int], Tensor]
"""Of an image, a weight (4, 4, 3, ...) and the number of dims."""

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}

LETTERS = "dhw"


def planes(x: Tensor, n: int) -> Tensor:
    """A turn in the plane of the last dims, which a signal has not."""
    return x.rot90(1, (-2, -1)).rot90(-2, (2, -1)) if n > 1 else x.flip(-1)


def heads(x: Tensor) -> Tensor:
    """(N, heads, tokens, features)"""
    return x.flatten(2).unflatten(1, (2, 2)).transpose(2, 3)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x.cos()), heads(x.sin()))


def spelled_out(x: Tensor) -> Tensor:
    return (heads(x) @ heads(x.cos()).mT).softmax(-1) @ heads(x.sin())


def dice(x: Tensor) -> Tensor:
    """As it is written by hand."""
    wanted = F.one_hot(x.detach().argmax(1), 4).movedim(-1, 1).to(x.dtype)
    dims = tuple(range(2, x.dim()))
    found = x.softmax(1)
    overlap, total = (found * wanted).sum(dims), found.sum(dims) + wanted.sum(dims)
    return 1 - ((2 * overlap + 1) / (total + 1)).mean()


def spread(x: Tensor, over: tuple[int, ...]) -> Tensor:
    """Over any choice of dims, back on the image."""
    kept = x.mean(over, keepdim=True) + x.logsumexp(over, keepdim=True)
    return x * kept + x.amax(over, keepdim=True) + x.var(over, keepdim=True)


def waves(x: Tensor, *shape: int) -> Tensor:
    """Weights for so many columns of an image."""
    numbers = torch.arange(math.prod(shape), device=x.device).cos() / max(shape) ** 0.5
    return numbers.view(shape).to(x.dtype)


def mixed_tokens(x: Tensor) -> Tensor:
    count = x[0, 0].numel()
    one = torch.eye(count, dtype=x.dtype, device=x.device)
    return F.linear(x.flatten(2), one + waves(x, count, count) / count)


FAMILIES: dict[str, Family] = {
    "convolution": lambda x, w, n: functional("conv", n)(x, w, padding=1),
    "transposed": lambda x, w, n: functional("conv_transpose", n)(x, w, stride=2, padding=1),
    "maximum": lambda x, w, n: functional("max_pool", n)(x, 3, 2, 1),
    "average": lambda x, w, n: functional("avg_pool", n)(x, 3, 2, 1),
    "powers": lambda x, w, n: functional("lp_pool", n)(x.sigmoid(), 2, 3, 2),
    "adaptive average": lambda x, w, n: functional("adaptive_avg_pool", n)(x, 3),
    "adaptive maximum": lambda x, w, n: functional("adaptive_max_pool", n)(x, 2),
    "linear": lambda x, w, n: F.interpolate(x, scale_factor=2, mode=LINEAR[n]),
    "nearest": lambda x, w, n: F.interpolate(x, size=(5, 6, 7)[:n]),
    "area": lambda x, w, n: F.interpolate(x, size=(4, 5, 3)[:n], mode="area"),
    "corners": lambda x, w, n: F.interpolate(x, None, 2, LINEAR[n], align_corners=True),
    "zeros": lambda x, w, n: F.pad(x, (1, 2) * n),
    "crop": lambda x, w, n: F.pad(x, (-1, 2) * n),
    "reflect": lambda x, w, n: F.pad(x, (1, 2) * n, "reflect"),
    "replicate": lambda x, w, n: F.pad(x, (2, 1) * n, "replicate"),
    "circular": lambda x, w, n: F.pad(x, (1, 2) * n, "circular"),
    "batch norm": lambda x, w, n: F.batch_norm(x, None, None, training=True),
    "instance norm": lambda x, w, n: F.instance_norm(x),
    "group norm": lambda x, w, n: F.group_norm(x, 2),
    "layer norm": lambda x, w, n: F.layer_norm(x, x.shape[1:]),
    "root mean square norm": lambda x, w, n: F.rms_norm(x.movedim(1, -1), (4,)),
    "local response norm": lambda x, w, n: F.local_response_norm(x, 2),
    "dropout": lambda x, w, n: F.dropout(x, 0.4),
    "alpha dropout": lambda x, w, n: F.alpha_dropout(x, 0.4, training=True),
    "variance": lambda x, w, n: x.var(tuple(range(2, n + 2))),
    "log of sums": lambda x, w, n: x.logsumexp(-1),
    "softmax": lambda x, w, n: x.softmax(-1),
    "tokens": lambda x, w, n: x.flatten(2).mT.sin(),
    "permuted": lambda x, w, n: x.movedim(1, -1).sin(),
    "every other": lambda x, w, n: x[..., 1::2],
    "repeat": lambda x, w, n: x.repeat(1, 2, *(1,) * n),
    "chunks": lambda x, w, n: x.chunk(2, 1)[1].cos(),
    "bicubic": lambda x, w, n: F.interpolate(x, size=(14, 5), mode="bicubic") if n == 2 else x,
    "huber": lambda x, w, n: F.huber_loss(x, x.sin(), delta=0.3),
    "cross entropy": lambda x, w, n: F.cross_entropy(x, x.detach().argmax(1)),
    "same": lambda x, w, n: functional("conv", n)(x, w, padding="same"),
    "flip of all": lambda x, w, n: x.flip(tuple(range(2, 2 + n))),
    "roll of all": lambda x, w, n: torch.roll(x, (2, -3, 1)[:n], tuple(range(2, 2 + n))),
    "turn": lambda x, w, n: planes(x, n),
    "second of two parts": lambda x, w, n: x.split((1, x.shape[-1] - 1), -1)[1],
    "windows": lambda x, w, n: x[:, :, near(x.shape[2]).to(x.device)],
    "chosen": lambda x, w, n: x[..., [0, 4, 1]],
    "joined rows": lambda x, w, n: torch.cat([x, 2 * x.relu()], 2),
    "stacked columns": lambda x, w, n: torch.stack([x, x.exp()], -1),
    "linear of tokens": lambda x, w, n: F.linear(tokens(x), w.flatten(1)[:, :4]),
    "matmul": lambda x, w, n: w.flatten(1)[:, :4] @ x.flatten(2),
    "gram": lambda x, w, n: x.flatten(2) @ tokens(x.cos()),
    "dense head": lambda x, w, n: F.linear(x.flatten(1), waves(x, 1, x[0].numel())),
    "mixed tokens": lambda x, w, n: mixed_tokens(x),
    "tokens as channels": lambda x, w, n: tokens(x).reshape(x.shape),
    "rows and channels": lambda x, w, n: x.transpose(1, 2).reshape(x.shape).sin(),
    "attention": lambda x, w, n: attention(x),
    "attention spelled out": lambda x, w, n: spelled_out(x),
    "over all dims": lambda x, w, n: spread(x, tuple(range(2, 2 + n))),
    "softmax of tokens": lambda x, w, n: x.flatten(2).log_softmax(-1),
    "dropout of tokens": lambda x, w, n: F.dropout(tokens(x), 0.3),
    "smooth cross entropy": lambda x, w, n: F.cross_entropy(
        x, x.detach().argmax(1), label_smoothing=0.1, reduction="none"
    ),
    "cross entropy of probabilities": lambda x, w, n: F.cross_entropy(
        x, x.detach().cos().softmax(1)
    ),
    "dice": lambda x, w, n: dice(x),
}
ALSO_UNDER_AUTOCAST: dict[str, Family] = {
    "strided": lambda x, w, n: functional("conv", n)(x, w, stride=4),
    "flattened product": lambda x, w, n: x.flatten(1) @ waves(x, x[0].numel(), 3),
    "product": lambda x, w, n: x.prod(2),
    "add": lambda x, w, n: x + x.detach().float(),
    "power": lambda x, w, n: x.pow(2),
    "batch norm beside float32": lambda x, w, n: F.batch_norm(
        x, None, None, w.flatten()[:4], w.flatten()[4:8], True
    ),
    "beside float32": lambda x, w, n: torch.cat([x, x.float()], 1),
}


Case = tuple[int, torch.dtype]
HALVES: list[Case] = [(1, torch.float16), (2, torch.bfloat16)]
MORE_HALVES: list[Case] = [
    *((1, torch.bfloat16), (2, torch.float16), (3, torch.bfloat16), (3, torch.float16))
]
TYPES: list[Case] = [(2, torch.float16), (3, torch.bfloat16)]


def by_turns(names: Iterable[str], first: list[Case], more: list[Case]) -> list[object]:
    """The first case with every other family, the second with the rest; the slow tests take all."""
    chosen = [(*first[number % 2], name) for number, name in enumerate(names)]
    others = [(*case, name) for name in names for case in [*first, *more]]
    slow = slow_cases(case for case in others if case not in chosen)
    return [
        pytest.param(*case, marks=marks, id=f"{case[0]}-{str(case[1])[6:]}-{case[2]}")
        for case, marks in [
            *((one, ()) for one in chosen),
            *((one.values[0], one.marks) for one in slow),
        ]
    ]


ERRORS = {torch.float16: 0.01, torch.bfloat16: 0.08}
"""Of the norm of the exact result; rounding of the input alone is 0.0005 and 0.004."""


def drawn(dims: int) -> tuple[Tensor, Tensor]:
    """An image and a weight."""
    draw = torch.Generator().manual_seed(dims)
    image = torch.randn(2, 4, *(9, 11, 7)[:dims], dtype=torch.float64, generator=draw)
    return image, 0.3 * torch.randn(4, 4, *[3] * dims, dtype=torch.float64, generator=draw)


def with_gradient(family: Family, x: Tensor, weight: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """The result and the gradient of the image, whole."""
    with keyed(1, 2):
        y = family(x, weight, dims)
    y.float().sin().sum().backward()
    assert x.grad is not None
    whole = [one.full_tensor() if isinstance(one, SpatialTensor) else one for one in (y, x.grad)]
    return whole[0].detach(), whole[1]


def near_to(found: Tensor, exact: Tensor, error: float, what: str) -> None:
    found, size = found.cpu().double(), exact.norm()
    assert found.isfinite().all(), what
    assert (found - exact).norm() <= error * size + 1e-6, f"{what}: {(found - exact).norm()} {size}"


def one_mesh(dims: int) -> dict[tuple[int, ...], Mesh]:
    """In turn those of several rows or columns; exactness on each is for the other files."""
    return dict([*some_meshes(dims).items()][:1])


def lack(family: Family, image: Tensor, weight: Tensor, dims: int) -> str:
    """Why PyTorch itself has no kernel for this, or nothing."""
    # the simulated device has the kernels of the CPU, and reports a missing one too late to skip
    known_to = torch.device("cpu") if DEVICE.type == "sim" else DEVICE
    try:
        with keyed(1, 2):
            family(image.to(known_to), weight.to(known_to), dims)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("dims", "dtype", "name"), by_turns([*FAMILIES], HALVES, MORE_HALVES))
def test_half_precision_is_near_one_process_in_float64(
    dims: int, dtype: torch.dtype, name: str
) -> None:

    family, (image, weight) = FAMILIES[name], drawn(dims)
    if error := lack(family, image.to(dtype), weight.to(dtype), dims):
        pytest.skip(f"PyTorch: {error}")
    image, weight = image.to(dtype).double(), weight.to(dtype).double()  # the same numbers for both
    exact = with_gradient(family, image.clone().requires_grad_(), weight, dims)
    for grid, mesh in one_mesh(dims).items():
        given = image.to(DEVICE, dtype)
        if dtype == torch.bfloat16 and dims in CHANNELS_LAST:
            given = given.contiguous(memory_format=CHANNELS_LAST[dims])
        x = shard(given, mesh).detach().requires_grad_()
        found = with_gradient(family, x, weight.to(DEVICE, dtype), dims)
        for ours, plain, what in zip(found, exact, ("result", "gradient"), strict=True):
            assert ours.dtype == dtype
            near_to(ours, plain, ERRORS[dtype], f"{name} of {dtype} on {grid}: {what}")


@pytest.mark.parametrize(
    ("dims", "mixed", "name"),
    by_turns(
        sorted({*FAMILIES, *ALSO_UNDER_AUTOCAST} - {"attention"}), TYPES, [(1, torch.bfloat16)]
    ),
)
def test_autocast_gives_the_types_and_nearly_the_numbers_of_one_process(
    dims: int, mixed: torch.dtype, name: str
) -> None:
    family, (image, weight) = {**FAMILIES, **ALSO_UNDER_AUTOCAST}[name], drawn(dims)
    image = image.bfloat16().double()  # the same numbers for all types
    exact = with_gradient(family, image.clone().requires_grad_(), weight, dims)
    image, weight = image.float().to(DEVICE), weight.float().to(DEVICE)
    for given in (torch.float32, mixed):
        if DEVICE.type == "sim" and lack(family, image.to(given), weight.to(given), dims):
            continue  # of which the CPU's autocast makes float32, and a GPU's does not
        with torch.autocast(DEVICE.type, mixed):
            with keyed(1, 2):
                expected = family(image.to(given), weight, dims)
            for grid, mesh in one_mesh(dims).items():
                x = shard(image.to(given), mesh).detach().requires_grad_()
                found = with_gradient(family, x, weight, dims)
                what = f"{name} of {given} on {grid}"
                assert (found[0].dtype, found[1].dtype) == (expected.dtype, given), what
                for ours, right, which in zip(found, exact, ("result", "gradient"), strict=True):
                    near_to(ours, right, 0.08, f"{what}: {which}")


@pytest.mark.parametrize(
    ("dims", "name"), [(1 + 2 * (at % 2), name) for at, name in enumerate(FAMILIES)]
)
def test_a_second_forward_in_backward_gives_the_same(dims: int, name: str) -> None:
    """Checkpoints; channels last where there is such a format."""
    family, (image, weight) = FAMILIES[name], drawn(dims)

    def twice(x: Tensor, weight: Tensor) -> Tensor:
        with keyed(1, 2):
            y: Tensor = checkpoint(
                family, x, weight, dims, use_reentrant=False, context_fn=checkpoint_contexts
            )
        return y + 0 * weight.sum()  # families without a weight

    if dims in CHANNELS_LAST:
        image = image.contiguous(memory_format=CHANNELS_LAST[dims])
    check(twice, image, [weight], one_mesh(dims), f"{name} in {dims} dims")


DETACHED = "dice", "cross entropy", "smooth cross entropy", "cross entropy of probabilities"
DETACHED += ("add",)
"""In inference mode detach() of a split tensor that was made outside it fails."""


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], AbstractContextManager]) -> None:
    image, weight = drawn(2)
    for grid, mesh in one_mesh(2).items():
        outside = shard(image.clone().requires_grad_(), mesh)
        for name, family in FAMILIES.items():
            if mode is torch.inference_mode and name in DETACHED:
                continue
            with mode(), keyed(1, 2):
                expected = family(image, weight, 2)
            for is_inside in {False, mode is torch.inference_mode}:
                with mode(), keyed(1, 2):
                    ours = family(shard(image, mesh) if is_inside else outside, weight, 2)
                assert not ours.requires_grad, name
                whole = ours.full_tensor() if isinstance(ours, SpatialTensor) else ours
                close(whole, expected, f"{name} on {grid} ")


# --- on a grid of one rank the same results are split as on all ranks

MORE: dict[str, Callable[[Tensor], object]] = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x.bernoulli(0.5),
    "rand_like": torch.rand_like,
    "five dims beside it": lambda x: x + beside(1, 1, 1, 1, 1),
    "same from the right": lambda x: beside(4, 1, 1) * x,
    "a whole image": lambda x: beside(2, 4, 12, 8) + x,
    "a whole image as the other's type": lambda x: beside(2, 4, 12, 8).type_as(x),
    "more dims": lambda x: x + beside(3, 2, 4, 1, 1),
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
    "losses of pixels": lambda x: F.mse_loss(x, beside(2, 4, 12, 8), reduction="none"),
}


def beside(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", {**MORE, **VIEWS, **FAMILIES})
def test_the_same_results_are_split_on_one_rank_and_on_all(name: str, world: Communicator) -> None:
    """Also random numbers are then drawn for the same tensors in the same way."""
    if name in FAMILIES:
        image, weight = drawn(2)
        results = [FAMILIES[name](x, weight, 2) for x in on_one_and_all(image, world)]
    else:
        image = beside(2, 4, 12, 8)
        results = [{**MORE, **VIEWS}[name](x) for x in on_one_and_all(image, world)]
    for ours, theirs in zip(*map(tree_leaves, results), strict=True):
        assert isinstance(ours, SpatialTensor) == isinstance(theirs, SpatialTensor)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.requires_grad == theirs.requires_grad
        if isinstance(theirs, SpatialTensor):
            assert ours.spatial_dims == theirs.spatial_dims
            assert ours.spatial_layout.size == theirs.spatial_layout.size
            assert ours.spatial_layout.grid == (1, 1)
            # random numbers too, in whichever layout they were drawn
            torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor())


def on_one_and_all(image: Tensor, world: Communicator) -> list[Tensor]:
    one, every = grids_of_one_and_all(world.size)
    return [shard(image.clone().requires_grad_(), mesh) for mesh in (one, every)]


@cache
def grids_of_one_and_all(ranks: int) -> tuple[Mesh, Mesh]:
    """The first of this rank alone; both draw as many numbers, for they serve the same tests."""
    return init_mesh((1, 1), comm=MPI.COMM_SELF), init_mesh((2, 2) if ranks == 4 else (ranks, 1))
