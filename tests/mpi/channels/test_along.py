from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.channels import tensor
from spatialdl.channels.tensor import ChannelTensor, whole_of
from spatialdl.channels.weights import Weight  # noqa: F401  (registers all operations)
from spatialdl.parallel.partition import Partition
from spatialdl.random import keyed
from tests.mpi.channels.divided import WORLD, assert_as_whole, channels

RANKS = WORLD.size
HEADS = RANKS + 1


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of operations for which all channels are gathered."""
    names: list[str] = []
    real = tensor.on_all_channels

    def listed(func: Any, args: Any, kwargs: Any) -> Any:
        names.append(func.__name__)
        return real(func, args, kwargs)

    monkeypatch.setattr(tensor, "on_all_channels", listed)
    return names


OF_MAPS = {
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
    "mean of pixels": lambda x: x.mean((2, 3)),
    "mean of pixels, kept": lambda x: x.mean((-1, -2), keepdim=True),
    "sum of samples": lambda x: x.sum(0),
    "largest": lambda x: torch.amax(x, (2, 3)),
    "softmax of rows": lambda x: x.softmax(2),
    "flatten": lambda x: x.flatten(1),
    "flatten pixels": lambda x: x.flatten(2).transpose(1, 2),
    "view": lambda x: x.view(2, -1, 35),
    "permute": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "one sample": lambda x: x[1],
    "some rows": lambda x: x[:, :, 1:4],
    "last column": lambda x: x[..., -1],
    "new dim": lambda x: x[:, None].squeeze(1).unsqueeze(0)[0],
    "halves of rows": lambda x: torch.cat(x.split([2, 3], dim=2)[::-1], 2),
    "samples": lambda x: x.unbind(0)[1] - x.unbind(0)[0],
    "cat": lambda x: torch.cat([x, 2 * x], 1),
    "cat and split": lambda x: torch.cat([x, 2 * x], 1).chunk(2, 1)[1],
    "channels last": lambda x: x.to(memory_format=torch.channels_last) + 1,
    "zeros": lambda x: x + torch.zeros_like(x),
    "flip": lambda x: x.flip(3),
    "double": lambda x: x.double(),
    "variance of samples": lambda x: torch.var(x, (0, 2), True),
    "largest row": lambda x: x.max(dim=2).values,
    "channels last, pooled": lambda x: x.to(memory_format=torch.channels_last).mean((2, 3)),
}


@pytest.mark.parametrize("name", OF_MAPS)
def test_operations_on_maps_stay_where_the_channels_are(name: str, gathers: list[str]):
    assert_as_whole(OF_MAPS[name], drawn(2, 7, 5, 7))
    assert gathers == []


BY_ALL = {
    "sum": lambda x: x.sum(),
    "mean of channels": lambda x: x.mean(1),
    "softmax": lambda x: x.softmax(1),
    "a channel": lambda x: x[:, 2],
    "some channels": lambda x: x[:, 1:4],
    "half of channels": lambda x: x.split([3, 4], 1)[0],
    "channels together": lambda x: x.reshape(2, 5, 7, 7),
    "roll": lambda x: x.roll(1, 1),
    "largest of two": lambda x: torch.max(x, x * x),
    "flip of channels": lambda x: x.flip(3, 1),
    "pooled without samples": lambda x: F.max_pool2d(x[0].transpose(0, 1), 2),
    "rows without samples": lambda x: F.avg_pool1d(x[0, :, 0], 3),
    "product with a matrix": lambda x: (
        x.transpose(1, 3) @ torch.eye(7, dtype=x.dtype, device=x.device)
    ),
}


@pytest.mark.parametrize("name", BY_ALL)
def test_operations_across_channels_get_all_of_them(name: str):
    assert_as_whole(BY_ALL[name], drawn(2, 7, 5, 7))


def attend(x: Tensor) -> Tensor:
    """As transformers write it: one layer gives queries, keys and values."""
    samples, tokens, size = x.shape
    q, k, v = x.reshape(samples, tokens, 3, HEADS, size // 3 // HEADS).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(samples, tokens, size // 3)


def attend_fused(x: Tensor) -> Tensor:
    heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in x.chunk(3, -1)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def attend_with_heads_in_samples(x: Tensor) -> Tensor:
    """As `F.multi_head_attention_forward` does: heads and samples are one dim of a batch."""
    tokens, samples, size = x.shape
    q, k, v = x.unflatten(-1, (3, size // 3)).unsqueeze(0).transpose(0, -2).squeeze(-2)
    rows = [one.reshape(tokens, samples * HEADS, -1).transpose(0, 1) for one in (q, k, v)]
    found = torch.bmm(torch.bmm(rows[0], rows[1].transpose(1, 2)).softmax(-1), rows[2])
    return found.transpose(0, 1).reshape(tokens * samples, size // 3)


@pytest.mark.parametrize("attention", [attend, attend_fused])
def test_ranks_have_heads_of_their_own(attention: Any, gathers: list[str]):
    size = 3 * HEADS * 4
    partition = Partition.even(size, RANKS, unit=4, pieces=3)
    assert_as_whole(attention, drawn(2, 5, size), at=2, partition=partition)
    assert gathers == []


def test_heads_may_lie_in_one_dim_with_samples():
    size = 3 * HEADS * 4
    partition = Partition.even(size, RANKS, unit=4, pieces=3)
    function = attend_with_heads_in_samples
    assert_as_whole(function, drawn(5, 2, size), at=2, partition=partition)


def test_masks_of_heads_are_divided_with_them():
    def attend_masked(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, mask.to(x.device))

    for shape in ((5, 5), (1, 1, 5, 5), (HEADS, 5, 5)):
        mask = drawn(*shape)
        assert_as_whole(attend_masked, drawn(2, HEADS, 5, 4))


@pytest.mark.parametrize("function", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_dropout_drops_what_one_process_drops(function: Any, gathers: list[str]):
    x = drawn(2, 7, 5, 4)
    with keyed(1, 2):
        expected = function(x, 0.4, True)
    with keyed(1, 2):
        given = function(channels(x), 0.4, True)
    assert isinstance(given, ChannelTensor)
    assert gathers == []
    torch.testing.assert_close(whole_of(given).cpu(), expected, rtol=0, atol=1e-12)
