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
    "channels last": lambda x: x.to(memory_format=torch.channels_last) + 1,
    "zeros": lambda x: x + torch.zeros_like(x),
    "roll": lambda x: x.roll((1, -2), (2, 3)),
    "roll of all rows": lambda x: torch.roll(x, 3, dims=-1),
    "pad, channels last": lambda x: F.pad(x.transpose(1, 3), (0, 0, 1, 2, 0, 1), value=2.0),
    "cut": lambda x: F.pad(x, (-1, -2)),
    "new tensors": lambda x: x + x.new_ones(7) * x.new_full((1,), 3) + x.new_zeros(5, 1),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=2),
    "norm, kept": lambda x: x.norm(dim=(2, 3), keepdim=True),
    "normalized rows": lambda x: F.normalize(x, dim=-1),
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
    "roll of channels": lambda x: x.roll(1, 1),
    "roll of everything": lambda x: x.roll(3),
    "pad of channels": lambda x: F.pad(x, (0, 0, 1, 1, 2, 0)),
    "normalized": F.normalize,
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
