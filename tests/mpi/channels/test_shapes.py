from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spatialdl.channels.tensor import ChannelTensor, whole_of
from spatialdl.channels.weights import Weight  # noqa: F401  (registers all operations)
from tests.mpi.channels.divided import assert_as_whole, channels, within
from tests.mpi.device import DEVICE


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def places(x: Tensor) -> Tensor:
    return torch.tensor([[3, 0, 1], [1, 1, 4]], device=x.device)


SHAPES = {
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
    "expand": lambda x: x[:1].expand(3, -1, 5, -1),
    "expand, new dims": lambda x: x.expand(2, 1, 2, 7, -1, 7).mean((0, 1)),
    "expand as": lambda x: x[:, :, :1].expand_as(x),
    "expand something else as": lambda x: x.mean((2, 3), keepdim=True).expand_as(x),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "repeat, new dim": lambda x: x.repeat((2, 1, 1, 1, 1)),
    "view as": lambda x: (2 * x.transpose(0, 1)).reshape_as(x.transpose(0, 1)),
    "places": lambda x: x[:, :, places(x)],
    "places, new dim": lambda x: x[:, :, None, :, places(x)[0]],
    "places of the last dim": lambda x: x[..., places(x).int()],
    "places before": lambda x: x.permute(2, 3, 0, 1)[places(x)][:, 1:],
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_change_where_the_channels_are(name: str):
    assert_as_whole(within(SHAPES[name]), drawn(2, 7, 5, 7))


BY_ALL = {
    "a channel": lambda x: x[:, 2],
    "some channels": lambda x: x[:, 1:4],
    "half of channels": lambda x: x.split([3, 4], 1)[0],
    "channels together": lambda x: x.reshape(2, 5, 7, 7),
    "channels of places": lambda x: x[:, places(x)],
    "places of two dims": lambda x: x[:, :, places(x), places(x)],
    "place and number": lambda x: x[1, :, places(x)],
    "truths": lambda x: x[:, :, torch.tensor([True, False, True, True, False], device=x.device)],
    "repeat of channels": lambda x: x.repeat(1, 2, 1, 1),
}


@pytest.mark.parametrize("name", BY_ALL)
def test_shapes_across_channels_get_all_of_them(name: str):
    assert_as_whole(BY_ALL[name], drawn(2, 7, 5, 7))


def test_what_all_have_is_expanded_as_the_channels():
    """One number for all channels gets the gradients of all of them."""
    x, weights = drawn(2, 7, 3), drawn(2, 7, 3) + 2
    for shape in ((2, 1, 1), (1, 7, 1), (3,), (2, 7, 3)):
        other, reference = drawn(*shape).requires_grad_(), drawn(*shape).requires_grad_()
        (reference.expand_as(x) * x * weights).sum().backward()
        divided = channels(x)
        given = other.to(DEVICE).expand_as(divided) * divided
        assert isinstance(given, ChannelTensor)
        (whole_of(given).cpu() * weights).sum().backward()
        torch.testing.assert_close(other.grad, reference.grad, rtol=0, atol=1e-12)
