"""Every family of operations in one to three dims: half precision, autocast, running twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spatialdl import SpatialTensor, shard
from spatialdl.random import checkpoint_contexts, keyed
from tests.mpi.device import DEVICE
from tests.mpi.equality import CHANNELS_LAST, check, functional, some_meshes

Family = Callable[[Tensor, Tensor, int], Tensor]
"""Of an image, a weight (4, 4, 3, ...) and the number of dims."""

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}

FAMILIES: dict[str, Family] = {
    "convolution": lambda x, w, n: functional("conv", n)(x, w, padding=1),
    "strided, dilated": lambda x, w, n: functional("conv", n)(x, w, None, 2, 2, 2),
    "groups": lambda x, w, n: functional("conv", n)(x, w[:, :2], groups=2),
    "transposed": lambda x, w, n: functional("conv_transpose", n)(x, w, stride=2, padding=1),
    "maximum": lambda x, w, n: functional("max_pool", n)(x, 3, 2, 1),
    "average": lambda x, w, n: functional("avg_pool", n)(x, 3, 2, 1),
    "powers": lambda x, w, n: functional("lp_pool", n)(x.sigmoid(), 2, 3, 2),
    "average of what there is": lambda x, w, n: functional("avg_pool", n)(x, 3, 2, 1, True, False),
    "adaptive average": lambda x, w, n: functional("adaptive_avg_pool", n)(x, 3),
    "adaptive maximum": lambda x, w, n: functional("adaptive_max_pool", n)(x, 2),
    "linear": lambda x, w, n: F.interpolate(x, scale_factor=2, mode=LINEAR[n]),
    "nearest": lambda x, w, n: F.interpolate(x, size=(5, 6, 7)[:n]),
    "nearest exact": lambda x, w, n: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
    "area": lambda x, w, n: F.interpolate(x, size=(4, 5, 3)[:n], mode="area"),
    "corners": lambda x, w, n: F.interpolate(x, None, 2, LINEAR[n], align_corners=True),
    "zeros": lambda x, w, n: F.pad(x, (1, 2) * n),
    "constant": lambda x, w, n: F.pad(x, (1, 2) * n, value=0.5),
    "crop": lambda x, w, n: F.pad(x, (-1, 2) * n),
    "reflect": lambda x, w, n: F.pad(x, (1, 2) * n, "reflect"),
    "replicate": lambda x, w, n: F.pad(x, (2, 1) * n, "replicate"),
    "circular": lambda x, w, n: F.pad(x, (1, 2) * n, "circular"),
    "batch norm": lambda x, w, n: F.batch_norm(x, None, None, training=True),
    "instance norm": lambda x, w, n: F.instance_norm(x),
    "group norm": lambda x, w, n: F.group_norm(x, 2),
    "layer norm": lambda x, w, n: F.layer_norm(x, x.shape[1:]),
    "layer norm of channels": lambda x, w, n: F.layer_norm(x.movedim(1, -1), (4,)),
    "root mean square norm": lambda x, w, n: F.rms_norm(x.movedim(1, -1), (4,)),
    "local response norm": lambda x, w, n: F.local_response_norm(x, 2),
    "dropout": lambda x, w, n: F.dropout(x, 0.4),
    "dropout of channels": lambda x, w, n: functional("dropout", n)(x, 0.4),
    "alpha dropout": lambda x, w, n: F.alpha_dropout(x, 0.4, training=True),
    "sum": lambda x, w, n: x.sum(-1),
    "mean": lambda x, w, n: x.mean(tuple(range(2, n + 2))),
    "variance": lambda x, w, n: x.var(tuple(range(2, n + 2))),
    "largest": lambda x, w, n: x.amax(tuple(range(2, n + 2))),
    "norm": lambda x, w, n: torch.linalg.vector_norm(x, dim=-1),
    "log of sums": lambda x, w, n: x.logsumexp(-1),
    "softmax": lambda x, w, n: x.softmax(-1),
    "tokens": lambda x, w, n: x.flatten(2).mT.sin(),
    "permuted": lambda x, w, n: x.movedim(1, -1).sin(),
    "slice": lambda x, w, n: x[..., 1:-2],
    "every other": lambda x, w, n: x[..., 1::2],
    "flip": lambda x, w, n: x.flip(2),
    "roll": lambda x, w, n: x.roll(2, -1),
    "repeat": lambda x, w, n: x.repeat(1, 2, *(1,) * n),
    "chunks": lambda x, w, n: x.chunk(2, 1)[1].cos(),
    "stack": lambda x, w, n: torch.stack([x, x.cos()], 1),
    "join": lambda x, w, n: torch.cat([x, x.sin()], 1),
    "squares": lambda x, w, n: F.mse_loss(x, x.sin()),
    "distances": lambda x, w, n: F.l1_loss(x, x.sin()),
    "huber": lambda x, w, n: F.huber_loss(x, x.sin(), delta=0.3),
    "logits": lambda x, w, n: F.binary_cross_entropy_with_logits(x, x.detach().cos().abs()),
    "cross entropy": lambda x, w, n: F.cross_entropy(x, x.detach().argmax(1)),
}

IMAGES = pytest.param(2, marks=pytest.mark.slow)  # of which each family has a file of its own
ALL = pytest.mark.parametrize("dims", [1, IMAGES, 3])
BY_NAME = pytest.mark.parametrize("name", FAMILIES)
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


def near(found: Tensor, exact: Tensor, error: float, what: str) -> None:
    found, size = found.cpu().double(), exact.norm()
    assert found.isfinite().all(), what
    assert (found - exact).norm() <= error * size + 1e-6, f"{what}: {(found - exact).norm()} {size}"


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


@ALL
@BY_NAME
@pytest.mark.parametrize("dtype", ERRORS)
def test_half_precision_is_near_one_process_in_float64(
    dtype: torch.dtype, name: str, dims: int
) -> None:
    family, (image, weight) = FAMILIES[name], drawn(dims)
    if error := lack(family, image.to(dtype), weight.to(dtype), dims):
        pytest.skip(f"PyTorch: {error}")
    if DEVICE.type == "sim" and name == "layer norm of channels":
        pytest.skip("the CPU's kernel keeps statistics in half precision, a GPU's in float32")
    image, weight = image.to(dtype).double(), weight.to(dtype).double()  # the same numbers for both
    exact = with_gradient(family, image.clone().requires_grad_(), weight, dims)
    for grid, mesh in some_meshes(dims).items():
        given = image.to(DEVICE, dtype)
        if dtype == torch.bfloat16 and dims in CHANNELS_LAST:
            given = given.contiguous(memory_format=CHANNELS_LAST[dims])
        x = shard(given, mesh).detach().requires_grad_()
        found = with_gradient(family, x, weight.to(DEVICE, dtype), dims)
        for ours, plain, what in zip(found, exact, ("result", "gradient"), strict=True):
            assert ours.dtype == dtype
            near(ours, plain, ERRORS[dtype], f"{name} of {dtype} on {grid}: {what}")


@ALL
@BY_NAME
def test_autocast_gives_the_types_and_nearly_the_numbers_of_one_process(
    name: str, dims: int
) -> None:
    family, (image, weight) = FAMILIES[name], drawn(dims)
    image = image.bfloat16().double()  # the same numbers for all types
    exact = with_gradient(family, image.clone().requires_grad_(), weight, dims)
    image, weight = image.float().to(DEVICE), weight.float().to(DEVICE)
    for given in (torch.float32, torch.bfloat16):
        if DEVICE.type == "sim" and lack(family, image.to(given), weight.to(given), dims):
            continue  # of which the CPU's autocast makes float32, and a GPU's does not
        with torch.autocast(DEVICE.type, torch.bfloat16):
            with keyed(1, 2):
                expected = family(image.to(given), weight, dims)
            for grid, mesh in some_meshes(dims).items():
                x = shard(image.to(given), mesh).detach().requires_grad_()
                found = with_gradient(family, x, weight, dims)
                assert found[0].dtype == expected.dtype, f"{name} of {given} on {grid}"
                for ours, plain, what in zip(found, exact, ("result", "gradient"), strict=True):
                    near(ours, plain, 0.08, f"{name} of {given} on {grid}: {what}")


@ALL
@BY_NAME
def test_a_second_forward_in_backward_gives_the_same(name: str, dims: int) -> None:
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
    for grid, mesh in some_meshes(dims).items():
        check(twice, image, [weight], mesh, f"{name} in {dims} dims on {grid}")
