"""Dense heads over a flattened map: products of a rank's own columns, added up over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, average_gradients, shard
from spatialdl.random import keyed
from spatialdl.spatial.recompute import recompute
from tests.mpi.device import DEVICE
from tests.mpi.equality import check_keyed, drawn, every_mesh, mean_over_ranks
from tests.mpi.spatial.test_ring import Largest

N, C, H, W = 3, 4, 7, 6
SIZE = C * H * W
Meshes = dict[tuple[int, ...], Mesh]
Operation = Callable[..., Tensor]


def flat(x: Tensor) -> Tensor:
    return torch.flatten(x, 1)


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def with_class(x: Tensor, c: Tensor, t: Tensor) -> Tensor:
    return torch.cat([c.expand(N, -1, -1), tokens(x), t], 1).flatten(1)


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(flat(x), w, b)), v)


def pooled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """On four rows of ranks some have no pixel."""
    return F.linear(flat(F.max_pool2d(x, 3)), w, b)


def dropped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.dropout(flat(x), 0.4), w, b)


def again(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y: Tensor = recompute(lambda x, w, b: dropped(x, w, b).sin(), x, w, b, modules=[])
    return y


WEIGHT, BIAS = (5, SIZE), (5,)
BOTH: list[tuple[int, ...]] = [WEIGHT, BIAS]
BESIDE = [(1, 2, C), (N, 1, C), (5, SIZE + 3 * C), BIAS]
HEADS: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "flatten": (lambda x, w, b: F.linear(torch.flatten(x, 1), w, b), BOTH),
    "view": (lambda x, w, b: F.linear(x.view(N, -1), w, b), BOTH),
    "reshape": (lambda x, w, b: F.linear(x.reshape(len(x), -1), w, b), BOTH),
    "a module": (lambda x, w, b: F.linear(nn.Flatten()(x), w, b), BOTH),
    "no bias": (lambda x, w: F.linear(flat(x), w), [WEIGHT]),
    "one output": (lambda x, w: F.linear(flat(x), w), [(SIZE,)]),
    "a weight turned round": (lambda x, w, b: F.linear(flat(x), w.t(), b), [(SIZE, 5), BIAS]),
    "tokens": (lambda x, w, b: F.linear(tokens(x).flatten(1), w, b), BOTH),
    "channels last": (lambda x, w, b: F.linear(x.permute(0, 2, 3, 1).flatten(1), w, b), BOTH),
    "class token and register": (lambda x, c, t, w, b: F.linear(with_class(x, c, t), w, b), BESIDE),
    "matmul": (lambda x, w: flat(x) @ w, [(SIZE, 5)]),
    "matmul of tokens beside": (lambda x, c, t, w: with_class(x, c, t) @ w.t(), BESIDE[:3]),
    "addmm": (lambda x, w, b: torch.addmm(b, flat(x), w.t(), beta=0.5, alpha=2), BOTH),
    "einsum": (lambda x, w: torch.einsum("nk,ok->no", flat(x), w), [WEIGHT]),
    "bmm": (lambda x, w: torch.bmm(flat(x)[:, None], w), [(N, SIZE, 5)]),
    "dims before": (lambda x, w, b: F.linear(x.view(1, N, 1, SIZE), w, b), BOTH),
    "all samples in one": (lambda x, w, b: F.linear(x.flatten(), w, b), [(5, N * SIZE), BIAS]),
    "rows and columns alone": (
        lambda x, w, b: F.linear(x.flatten(2), w, b),
        [(5, H * W), BIAS],
    ),
    "activations": (lambda x, w, b: F.linear(flat(x).relu().sigmoid() * 3 - 1, w, b), BOTH),
    "numbers of their own": (
        lambda x, p, w, b: F.linear(flat(x) * p, w, b),
        [(SIZE,), *BOTH],
    ),
    "layer norm": (
        lambda x, g, w: F.linear(F.layer_norm(flat(x), (SIZE,), g), w),
        [(SIZE,), WEIGHT],
    ),
    "dropout": (dropped, BOTH),
    "several layers": (mlp, [*BOTH, (2, 5)]),
    "several heads": (
        lambda x, w, b, v: F.linear(flat(x), w, b) * F.linear(flat(x), v),
        [*BOTH, WEIGHT],
    ),
    "one weight twice": (
        lambda x, w, b: F.linear(flat(x), w, b) * F.linear(flat(x).cos(), w),
        BOTH,
    ),
    "empty tiles": (pooled, [(5, C * 2 * 2), BIAS]),
    "recomputed": (again, BOTH),
    "an image again": (lambda x, w: F.conv2d(flat(x).sin().view(N, C, H, W), w), [(2, C, 3, 3)]),
    "unflatten": (lambda x: flat(x).unflatten(1, (C, H, W)).cos(), []),
    "tokens again": (lambda x, w: tokens(x).flatten(1).view(N, H * W, C) @ w, [(C, 3)]),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_give_the_results_of_a_single_process(name: str, meshes: Meshes) -> None:
    operation, shapes = HEADS[name]
    check_keyed(operation, (N, C, H, W), shapes, meshes, name)


@pytest.mark.parametrize("size", [(11,), (5, 4, 4)])
def test_of_signals_and_volumes(size: tuple[int, ...]) -> None:
    count = C * torch.Size(size).numel()
    heads: list[Operation] = [
        lambda x, w, b: F.linear(flat(x), w, b),
        lambda x, w, b: F.linear(tokens(x).flatten(1), w, b),
        lambda x, w, b: torch.addmm(b, flat(x), w.t()),
    ]
    for number, head in enumerate(heads):
        check_keyed(head, (N, C, *size), [(5, count), BIAS], every_mesh(len(size)), f"{number}")


class Classifier(nn.Sequential):
    """As many are: convolutions, and a dense head; of images of 29 x 18."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, 2, 1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 5, 3, 2, 1),
            nn.Flatten(),
            nn.PReLU(),
            nn.Dropout(0.2),
            nn.Linear(5 * 8 * 5, 16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 3),
        )


def trained(network: nn.Module, mesh: Mesh | None) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of some steps."""
    network = copy.deepcopy(network).to(DEVICE if mesh else "cpu")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(5):
        image, classes = drawn(step, 4, 3, 29, 18), torch.tensor([0, 2, 1, 2])
        optimizer.zero_grad()
        with keyed(1, step):
            if mesh is None:
                loss = F.cross_entropy(network(image), classes)
            else:
                output = network(shard(image.to(DEVICE), mesh))
                assert not isinstance(output, SpatialTensor)
                loss = F.cross_entropy(output, classes.to(DEVICE))
            loss.backward()
        if mesh is not None:
            average_gradients(network, mesh)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [one.detach().cpu() for one in network.state_dict().values()]


def test_several_steps() -> None:
    torch.manual_seed(0)
    network = Classifier().double()
    expected = trained(network, None)
    assert expected[0][0] > expected[0][-1]
    for mesh in every_mesh().values():
        torch.testing.assert_close(trained(network, mesh), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("product", ["linear", "addmm"])
def test_no_rank_holds_the_map(product: str) -> None:
    """Forward and backward. The weight is smaller than a map of several samples."""
    samples, channels, outputs = 8, 16, 3
    for mesh in every_mesh().values():
        if mesh.grid_comm.size < 3:
            continue
        whole = torch.rand(samples, channels, 20, 18, dtype=torch.float64).to(DEVICE)
        weight = drawn(1, outputs, channels * 20 * 18).to(DEVICE).requires_grad_()
        bias = drawn(2, outputs).to(DEVICE).requires_grad_()
        image = shard(whole * 0 + 1, mesh).requires_grad_()
        with Largest() as largest:
            y = flat(image.sin()).relu()
            if product == "linear":
                z = F.linear(y, weight, bias)
            else:
                z = torch.addmm(bias, y, weight.t())
            z.square().sum().backward()
        share = max(prod(box.shape[1:]) for box in image.spatial_layout.boxes)
        most = max(samples * channels * share, weight.numel())
        assert 0 < largest.elements <= most < whole.numel() * 0.6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mixed", [False, True])
def test_in_fewer_bits(dtype: torch.dtype, mixed: bool, meshes: Meshes) -> None:
    """Outputs and gradients differ from those of float64 by the rounding of their type."""
    if mixed and dtype == torch.float32:
        pytest.skip("autocast has no use for it")
    image, weight, bias = drawn(9, N, C, H, W), drawn(1, *WEIGHT), drawn(2, 5)
    exact = [one.clone().requires_grad_() for one in (image, weight, bias)]
    wanted = F.linear(flat(exact[0]), *exact[1:])
    (wanted.sin().sum()).backward()
    given = torch.float32 if mixed else dtype
    close = partial(torch.testing.assert_close, rtol=0, atol=60 * torch.finfo(dtype).eps)
    for mesh in meshes.values():
        x, w, b = (one.to(DEVICE, given).requires_grad_() for one in (image, weight, bias))
        with torch.autocast(DEVICE.type, dtype if mixed else torch.bfloat16, enabled=mixed):
            y = F.linear(flat(shard(x, mesh)), w, b)
        assert y.dtype == dtype
        assert y.shape == wanted.shape
        close(y.double().cpu(), wanted.detach())
        grad = torch.autograd.grad(y, (x, w, b), wanted.detach().cos().to(y))
        assert [one.dtype for one in grad] == [given] * 3
        close(grad[0].double().cpu(), exact[0].grad)
        for ours, one in zip(grad[1:], exact[1:], strict=True):
            close(mean_over_ranks(ours, mesh).double().cpu(), one.grad)


REFUSED: dict[str, Operation] = {
    "some columns": lambda x: flat(x)[:, :C],
    "one column": lambda x: flat(x)[:, 1],
    "more columns": lambda x: torch.cat([flat(x), torch.ones(N, 2, device=DEVICE)], 1),
    "two maps": lambda x: torch.cat([flat(x), flat(x)], 1),
    "halves": lambda x: flat(x).chunk(2, 1),
    "batch norm": lambda x: F.batch_norm(flat(x), None, None, training=True),
    "group norm": lambda x: F.group_norm(flat(x), 2),
    "a number for each column": lambda x: F.prelu(flat(x), torch.ones(SIZE, device=DEVICE)),
    "the other way round": lambda x: flat(x).flip(1),
    "sums": lambda x: flat(x).cumsum(1),
    "order": lambda x: flat(x).sort(1),
    "a convolution": lambda x: F.conv1d(flat(x)[:, None], torch.ones(1, 1, 3, device=DEVICE)),
    "a pool": lambda x: F.avg_pool1d(flat(x)[:, None], 2),
    "gates": lambda x: F.glu(flat(x)),
    "classes": lambda x: F.cross_entropy(flat(x), torch.zeros(N, dtype=torch.int64)),
    "bilinear": lambda x: F.bilinear(flat(x), flat(x), torch.ones(1, SIZE, SIZE)),
    "between rows": lambda x: x.transpose(1, 2).flatten(1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, meshes: Meshes) -> None:
    for mesh in meshes.values():
        if mesh.grid_comm.size == 1:
            continue
        with pytest.raises(UnsupportedSpatialOp):
            REFUSED[name](shard(torch.ones(N, C, H, W, device=DEVICE), mesh))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.linear(flat(x), torch.ones(3, SIZE + 1)),
        lambda x: F.linear(flat(x), torch.ones(3, SIZE), torch.ones(4)),
        lambda x: F.linear(flat(x), torch.ones(3, SIZE, dtype=torch.float64)),
        lambda x: F.linear(flat(x), torch.ones(SIZE), torch.ones(())),
    ],
)
def test_what_pytorch_refuses(call: Operation, meshes: Meshes) -> None:
    whole = torch.ones(N, C, H, W)
    for mesh in meshes.values():
        for image in (whole, shard(whole, mesh)):
            with pytest.raises(RuntimeError):
                call(image)
