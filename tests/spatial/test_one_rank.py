"""Split tensors of a grid of one rank are as PyTorch's own; what needs no other rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, gather_before, init_mesh, shard
from spatialdl.models import resnet18

H, W = 13, 10


def image(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (2, 4, H, W), dtype=torch.float64, generator=draw)


@pytest.fixture(scope="module")
def one() -> Mesh:
    return init_mesh((1, 1))


def test_a_training_step_has_the_bits_of_one_process(one: Mesh) -> None:
    """In float32, where another order of sums would differ."""
    torch.manual_seed(0)
    network, images = resnet18(num_classes=3, width=8), torch.randn(2, 3, 67, 58)
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


def test_tokens_are_pooled_to_one(one: Mesh) -> None:
    """Once the image of the tokens was passed to PyTorch's pool of signals, which refused it."""
    for pool in (F.adaptive_avg_pool1d, F.adaptive_max_pool1d):
        pooled = pool(shard(image(), one).flatten(2), 1)
        torch.testing.assert_close(pooled, pool(image().flatten(2), 1))


def test_dims_do_not_change_in_place(one: Mesh) -> None:
    for change in (lambda x: x.transpose_(1, 3), lambda x: x.unsqueeze_(0), lambda x: x.t_()):
        with pytest.raises(UnsupportedSpatialOp, match="in place"):
            change(shard(image(), one))


# --- interpolation whose gradient is wrong in PyTorch

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def has_a_wrong_gradient(
    mode: str,
    image: Tensor,
    scale_factor: float | tuple[float, ...] | None = None,
    recompute_scale_factor: bool | None = None,
    **options: Any,
) -> bool:
    """Whether PyTorch's gradient is that of a copy but its output is none, or the reverse."""
    if scale_factor is None or recompute_scale_factor or options.get("align_corners"):
        return False
    output = F.interpolate(image, scale_factor=scale_factor).shape
    dims = image.dim() - 2
    each = scale_factor if isinstance(scale_factor, tuple) else (scale_factor,) * dims
    kept = [s for s, n, m in zip(each, image.shape[2:], output[2:], strict=True) if n == m]
    both = mode == "bicubic" and len(kept) == 2
    in_each_dim = options.get("antialias") or (mode == "nearest" and dims != 2)
    return any(scale != 1 for scale in kept) and bool(in_each_dim or both)


WRONG: list[tuple[str, object, dict]] = [
    ("bilinear", (2, 1.04), {"antialias": False}),
    ("bilinear", (2, 1.04), {"antialias": True}),
    ("bilinear", (1.04, 1.04), {"align_corners": True}),
    ("bilinear", (2, 1), {"antialias": True}),
    ("bicubic", (2, 1.04), {"antialias": True}),
    ("bicubic", (1.04, 1.04), {"antialias": False}),
    ("bicubic", (1.04, 1.04), {"align_corners": True, "antialias": True}),
    ("bicubic", (2, 1), {"antialias": False}),
    *((mode, s, {}) for mode in ("nearest", "nearest-exact", "linear") for s in (1.04, 2.0, 0.5)),
]


@pytest.mark.parametrize(("mode", "scale", "options"), WRONG, ids=str)
def test_gradients_of_pytorch_are_wrong_where_they_are_refused(
    mode: str, scale: float | tuple[float, ...], options: dict
) -> None:
    """A change of PyTorch shows here, and a refusal can go."""
    for dims in (2,) if options else (1, 3):
        x = image(1, 1, *(6, 5, 4)[:dims]).requires_grad_()

        def resize(x: Tensor, mode: str = LINEAR[dims] if mode == "linear" else mode) -> Tensor:
            return F.interpolate(x, scale_factor=scale, mode=mode, **options)

        is_right = torch.autograd.gradcheck(resize, (x,), raise_exception=False)
        assert is_right is not has_a_wrong_gradient(mode, x, scale, **options)


# --- sizes and names


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("haed", r"Sequential has no module 'haed'; similar names: head"),
        ("conv", r"has no module 'conv'"),
        ("features.9", r"similar names: .*features\.0"),
        ("linear", r"similar names: .*head\.linear"),
        ("", r"its modules: features, head"),
    ],
)
def test_an_unknown_name_is_told_with_those_near_it(name: str, sentence: str) -> None:
    network = nn.Sequential()
    network.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    network.head = nn.Sequential()
    network.head.linear = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=sentence):
        gather_before(network, name)


@pytest.mark.parametrize(
    ("name", "hooks"), [(1, [0, 1]), ("1", [0, 1]), (["1"], [0, 1]), (None, [0, 0]), (0, [1, 0])]
)
def test_modules_of_a_chain_are_named_by_numbers(name: object, hooks: list[int]) -> None:
    chain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    gather_before(chain, name)
    assert [len(layer._forward_pre_hooks) for layer in chain] == hooks
