"""Operators of vision networks give the CPU's numbers on the device, and so do their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

IMAGE = (2, 4, 9, 10)
VOLUME = (1, 2, 5, 6, 7)
LABELS = torch.arange(2 * 9 * 10).view(2, 9, 10) % 4

Function = Callable[[Tensor], Tensor]


def weights(*size: int) -> Tensor:
    """Numbers that do not depend on what was drawn before."""
    count = torch.Size(size).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float64).view(size)


def like(x: Tensor, *size: int) -> Tensor:
    return weights(*size).to(x.device)


ON_IMAGES: dict[str, Function] = {
    "conv": lambda x: F.conv2d(x, like(x, 6, 4, 3, 3), like(x, 6), 2, 1),
    "conv, groups and dilation": lambda x: F.conv2d(x, like(x, 4, 2, 3, 3), None, 1, 2, 2, 2),
    "conv, same padding": lambda x: F.conv2d(x, like(x, 4, 4, 4, 3), padding="same"),
    "transposed conv": lambda x: F.conv_transpose2d(x, like(x, 4, 3, 2, 2), like(x, 3), 2),
    "transposed conv, groups": lambda x: F.conv_transpose2d(
        x, like(x, 4, 3, 3, 3), None, 2, 1, 1, groups=2
    ),
    "conv1d": lambda x: F.conv1d(x.flatten(2), like(x, 6, 4, 3)),
    "batch norm": lambda x: F.batch_norm(x, None, None, like(x, 4), like(x, 4), True),
    "frozen batch norm": lambda x: F.batch_norm(x, like(x, 4), like(x, 4) + 2),
    "group norm": lambda x: F.group_norm(x, 2, like(x, 4), like(x, 4)),
    "instance norm": F.instance_norm,
    "layer norm": lambda x: F.layer_norm(x, (9, 10), like(x, 9, 10)),
    "local response norm": lambda x: F.local_response_norm(x, 2),
    "normalize": F.normalize,
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max pool, ceil": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "max unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "avg pool": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "lp pool": lambda x: F.lp_pool2d(x.abs() + 1, 2, 2),
    "adaptive avg pool": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "global avg pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest-exact": lambda x: F.interpolate(x, (13, 7), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, (13, 7), mode="bilinear"),
    "bilinear, aligned": lambda x: F.interpolate(x, (13, 7), mode="bilinear", align_corners=True),
    "bilinear, antialias": lambda x: F.interpolate(x, (5, 7), mode="bilinear", antialias=True),
    "bicubic": lambda x: F.interpolate(x, (13, 7), mode="bicubic"),
    "area": lambda x: F.interpolate(x, (4, 5), mode="area"),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x[..., :8, :], 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "fold": lambda x: F.fold(F.unfold(x, 3), (9, 10), 3),
    "unfold of a tensor": lambda x: x.unfold(2, 3, 2),
    "grid sample": lambda x: F.grid_sample(
        x, F.affine_grid(like(x, 2, 2, 3), [2, 4, 6, 6], align_corners=False), align_corners=False
    ),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3)),
    "pad, reflect": lambda x: F.pad(x, (1, 2, 2, 3), mode="reflect"),
    "pad, replicate": lambda x: F.pad(x, (1, 2, 2, 3), mode="replicate"),
    "pad, circular": lambda x: F.pad(x, (1, 2, 2, 3), mode="circular"),
    "relu": lambda x: F.relu(x, inplace=False),
    "in place": lambda x: (x * 1).add_(1).mul_(like(x, 10)).relu_(),
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "leaky relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, like(x, 4)),
    "glu": lambda x: F.glu(x, 1),
    "softplus": F.softplus,
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(-1),
    "softmin": lambda x: F.softmin(x, 1),
    "mean": lambda x: x.mean((2, 3)),
    "var": lambda x: x.var((0, 2, 3)),
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=1),
    "vector norm": lambda x: torch.linalg.vector_norm(x, 3, (2, 3)),
    "amax": lambda x: x.amax((2, 3)),
    "max": lambda x: x.max(1).values,
    "median": lambda x: x.flatten(2).median(2).values,
    "logsumexp": lambda x: x.logsumexp(1),
    "cumsum": lambda x: x.cumsum(2),
    "prod": lambda x: x.prod(1),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 1).values,
    "flip": lambda x: x.flip((2, 3)),
    "roll": lambda x: x.roll((1, 2), (2, 3)),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, x + 1]),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda x: x.split([1, 3], 1)[1],
    "index": lambda x: x[:, torch.tensor([2, 0], device=x.device)],
    "index on the host": lambda x: x[:, torch.tensor([2, 0])],
    "mask": lambda x: x[x > 0],
    "index put": lambda x: x.index_put((torch.tensor([1], device=x.device),), like(x, 4, 9, 10)),
    "masked fill": lambda x: x.masked_fill(x > 0, -1.0),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "gather": lambda x: x.gather(1, LABELS.to(x.device)[:, None]),
    "scatter": lambda x: x.scatter(1, LABELS.to(x.device)[:, None], 1.0),
    "scatter add": lambda x: x.scatter_add(1, LABELS.to(x.device)[:, None], x[:, :1] * 2),
    "index add": lambda x: x.index_add(1, torch.tensor([1, 1], device=x.device), x[:, :2] * 2),
    "index select": lambda x: x.index_select(1, torch.tensor([3, 1], device=x.device)),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat interleave": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1, -1) * 1,
    "permute": lambda x: x.permute(0, 2, 3, 1).reshape(2, -1, 4),
    "channels last": lambda x: F.relu(x.to(memory_format=torch.channels_last)),
    "linear": lambda x: F.linear(x, like(x, 3, 10), like(x, 3)),
    "linear on tokens": lambda x: F.linear(x.flatten(2).mT, like(x, 3, 4), like(x, 3)),
    "matmul": lambda x: x @ x.mT,
    "bmm": lambda x: torch.bmm(x.flatten(2), x.flatten(2).mT),
    "einsum": lambda x: torch.einsum("nchw,ndhw->ncd", x, x),
    "addmm": lambda x: torch.addmm(like(x, 8, 8), x.reshape(8, -1), x.reshape(8, -1).T),
    "bilinear layer": lambda x: F.bilinear(x, x, like(x, 2, 10, 10)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention, mask": lambda x: F.scaled_dot_product_attention(x, x, x, like(x, 9, 9)),
    "sign": lambda x: x.sgn() * x,
    "cross entropy": lambda x: F.cross_entropy(x, LABELS.to(x.device)),
    "cross entropy, weights": lambda x: F.cross_entropy(
        x, LABELS.to(x.device), like(x, 4) + 2, ignore_index=1, label_smoothing=0.1
    ),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), LABELS.to(x.device), reduction="none"),
    "mse": lambda x: F.mse_loss(x, like(x, *IMAGE)),
    "l1": lambda x: F.l1_loss(x, like(x, *IMAGE)),
    "smooth l1": lambda x: F.smooth_l1_loss(x, like(x, *IMAGE)),
    "huber": lambda x: F.huber_loss(x, like(x, *IMAGE)),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, like(x, *IMAGE).sigmoid()),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), like(x, *IMAGE).sigmoid()),
    "kl": lambda x: F.kl_div(x.log_softmax(1), like(x, *IMAGE).softmax(1), reduction="sum"),
    "cosine similarity": lambda x: F.cosine_similarity(x, like(x, *IMAGE)),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "lerp": lambda x: x.lerp(like(x, *IMAGE), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=2),
    "atan2": lambda x: torch.atan2(x, like(x, *IMAGE)),
    "powers and roots": lambda x: (x.abs() + 1).sqrt() + x**3 + torch.pow(2.0, x) + x.square(),
    "exponentials": lambda x: x.exp() + (x.abs() + 1).log() + torch.erf(x) + x.tanh() + x.sigmoid(),
    "rounding": lambda x: x.floor() + x.round() + x.fmod(0.3) + x.sign() + x.frac(),
    "fft": lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real,
    "tril": lambda x: x.tril(),
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3),
    "cdist": lambda x: torch.cdist(x, x * 2 + 1),
    "inverse": lambda x: torch.linalg.inv(x[..., :9] @ x[..., :9].mT + torch.eye(9).to(x) * 9),
    "svd": torch.linalg.svdvals,
    "qr": lambda x: torch.linalg.qr(x.mT)[1].abs(),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 99 * torch.eye(9).to(x)),
}

ON_VOLUMES: dict[str, Function] = {
    "conv": lambda x: F.conv3d(x, like(x, 3, 2, 3, 3, 3), like(x, 3), 2, 1),
    "transposed conv": lambda x: F.conv_transpose3d(x, like(x, 2, 3, 2, 2, 2), None, 2),
    "max pool": lambda x: F.max_pool3d(x, 2),
    "avg pool": lambda x: F.avg_pool3d(x, 3, 2, 1),
    "adaptive avg pool": lambda x: F.adaptive_avg_pool3d(x, (2, 3, 3)),
    "adaptive max pool": lambda x: F.adaptive_max_pool3d(x, (2, 3, 3)),
    "trilinear": lambda x: F.interpolate(x, (7, 3, 9), mode="trilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "batch norm": lambda x: F.batch_norm(x, None, None, like(x, 2), like(x, 2), True),
    "pad, replicate": lambda x: F.pad(x, (1, 2, 2, 1, 1, 1), mode="replicate"),
    "grid sample": lambda x: F.grid_sample(
        x,
        F.affine_grid(like(x, 1, 3, 4), [1, 2, 3, 4, 5], align_corners=False),
        align_corners=False,
    ),
}


def result_and_gradient(function: Function, size: tuple[int, ...], device: str) -> list[Tensor]:
    x = (weights(*size) * 3.3).sin().to(device).requires_grad_()
    y = function(x)
    z = y.abs() if y.is_complex() else y
    (z * like(z, *z.shape)).sum().backward()
    assert y.device.type == x.grad.device.type == device
    return [y.detach().cpu(), x.grad.cpu()]


def assert_the_same(function: Function, size: tuple[int, ...]) -> None:
    for ours, theirs in zip(
        result_and_gradient(function, size, "sim"),
        result_and_gradient(function, size, "cpu"),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ON_IMAGES)
def test_images(name, delays):
    assert_the_same(ON_IMAGES[name], IMAGE)


@pytest.mark.parametrize("name", ON_VOLUMES)
def test_volumes(name, delays):
    assert_the_same(ON_VOLUMES[name], VOLUME)


NEW = {
    "zeros": lambda device: torch.zeros(3, device=device),
    "full": lambda device: torch.full((2, 3), 7, device=device),
    "arange": lambda device: torch.arange(2, 9, 2, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "meshgrid": lambda device: torch.stack(
        torch.meshgrid(*[torch.arange(3, device=device)] * 2, indexing="ij")
    ),
    "nonzero": lambda device: torch.arange(5, device=device).remainder(2).nonzero(),
    "unique": lambda device: (
        torch.arange(9, device=device).remainder(4).unique(return_counts=True)[1]
    ),
    "bincount": lambda device: torch.arange(9, device=device).remainder(4).bincount(),
    "histc": lambda device: torch.linspace(0, 1, 9, device=device).histc(3),
    "one_hot": lambda device: F.one_hot(torch.arange(4, device=device)),
    "argsort": lambda device: torch.linspace(3, 1, 4, device=device).argsort(),
    "argmax": lambda device: torch.linspace(3, 1, 4, device=device).argmax(),
    "searchsorted": lambda device: torch.searchsorted(
        torch.arange(5, device=device), torch.tensor([2, 9], device=device)
    ),
    "comparisons": lambda device: torch.arange(4, device=device) > torch.tensor(1),
    "bits": lambda device: torch.arange(4, device=device) & 1,
    "promotion": lambda device: torch.arange(4, device=device) / 2 + torch.tensor(1.5),
    "out": lambda device: torch.add(
        torch.ones(3, device=device), 1, out=torch.empty(0, device=device)
    ),
    "nonzero, out": lambda device: torch.nonzero(
        torch.ones(3, device=device), out=torch.empty(0, dtype=torch.long, device=device)
    ),
    "complex": lambda device: torch.view_as_complex(torch.ones(3, 2, device=device)).conj() * 2j,
    "isin": lambda device: torch.isin(
        torch.arange(4, device=device), torch.tensor([1, 2]).to(device)
    ),
}


@pytest.mark.parametrize("name", NEW)
def test_new_tensors(name):
    ours, theirs = NEW[name]("sim"), NEW[name]("cpu")
    assert ours.device == torch.device("sim:0")
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.cpu(), theirs)


def test_attention_with_its_logsumexp():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    x = weights(1, 2, 8, 4)
    ours, theirs = attention(*[x.to("sim")] * 3), attention(x, x, x)
    for one, other in zip(ours, theirs, strict=True):
        assert one.device == torch.device("sim:0")
        assert torch.equal(one.cpu(), other)


def test_what_is_asked_of_numbers():
    x = torch.ones(3, device="sim")
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    assert x.allclose(x + 1e-9)
    assert bool((x == 1).all())
    assert x.is_set_to(x)
    assert int(x.sum()) == 3
    assert "device='sim:0'" in repr(x)


def test_wrong_sizes_are_refused_at_once():
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="sim") + torch.ones(4, device="sim")
    with pytest.raises(RuntimeError, match="expected input"):
        F.conv2d(torch.ones(1, 2, 4, 4, device="sim"), torch.ones(1, 3, 3, 3, device="sim"))


def test_unknown_operators_are_refused_by_name():
    library = torch.library.Library("simtest", "DEF")
    library.define("nowhere(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="simtest::nowhere is not implemented for sim"):
        torch.ops.simtest.nowhere(torch.ones(3, device="sim"))


def test_operators_without_a_shape_rule_wait_and_are_listed():
    torch.sim.reset_counters()
    found = torch.histogram(torch.linspace(0, 1, 9, device="sim"), 3)[0]
    assert found.tolist() == torch.histogram(torch.linspace(0, 1, 9), 3)[0].tolist()
    assert "aten::histogram.bin_ct" in torch.sim.synchronous_operators()
    assert torch.sim.counters().waits[("no shape on Meta", "aten::histogram.bin_ct")] == 1


def test_sparse_tensors_are_refused():
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.eye(3, device="sim").to_sparse() + 1
