from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.channels import tensor
from spatialdl.channels.tensor import ChannelTensor, whole_of
from spatialdl.channels.weights import Weight  # noqa: F401  (registers all operations)
from spatialdl.random import keyed
from tests.mpi.channels.divided import assert_as_whole, channels


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
