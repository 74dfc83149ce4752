from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.channels.tensor import ChannelTensor, whole_of
from spatialdl.channels.weights import Weight  # noqa: F401  (registers all operations)
from spatialdl.parallel.partition import Partition
from tests.mpi.channels.divided import WORLD, assert_as_whole, channels, no_gathers
from tests.mpi.device import DEVICE

RANKS = WORLD.size


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("shape", [(2, 12, 5, 3), (3, 12, 7), (1, 12, 3, 2, 5), (4, 12)])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
def test_groups_may_lie_on_several_ranks(groups: int, shape: tuple[int, ...]):
    def normed(x: Tensor) -> Tensor:
        with no_gathers():
            return F.group_norm(x + 3, groups, eps=1e-3)

    assert_as_whole(normed, drawn(*shape))
    in_pieces = Partition.even(12, RANKS, pieces=2 if RANKS > 3 else 3)
    assert_as_whole(normed, drawn(*shape), partition=in_pieces)


@pytest.mark.parametrize("groups", [1, 5])
def test_weights_get_the_gradients_of_one_process(groups: int):
    x, weights = drawn(2, 10, 3, 4), drawn(2, 10, 3, 4) + 1
    found = []
    for divided in (False, True):
        weight, bias = (drawn(2, 10) + 1).unbind(0)
        device = DEVICE if divided else "cpu"
        weight, bias = (one.to(device).detach().requires_grad_() for one in (weight, bias))
        y = F.group_norm(channels(x) if divided else x, groups, weight, bias)
        (whole_of(y) * weights.to(device)).sum().backward()
        found.append([one.cpu() for one in (whole_of(y).detach(), weight.grad, bias.grad)])
    for given, wanted in zip(*found, strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12)


def test_large_numbers_keep_their_digits():
    """Sums of squares would lose what is left of float32 beside a mean of 10,000."""
    x = drawn(3, 8, 4, 4).float() + 1e4
    wanted = F.group_norm(x.double(), 1).float()
    given = whole_of(F.group_norm(channels(x), 1)).cpu()
    torch.testing.assert_close(given, wanted, rtol=0, atol=3e-3)


def test_what_is_no_number_stays_in_its_group():
    x = drawn(2, 9, 4, 4)
    x[1, 0] = float("nan")
    given = whole_of(F.group_norm(channels(x), 3)).cpu()
    torch.testing.assert_close(given, F.group_norm(x, 3), equal_nan=True)


def test_half_precision_stays_half():
    x = drawn(2, 6, 4, 4).bfloat16()
    given = F.group_norm(channels(x), 1)
    assert isinstance(given, ChannelTensor)
    wanted = F.group_norm(x.float(), 1)
    torch.testing.assert_close(whole_of(given).cpu().float(), wanted, rtol=0, atol=2e-2)


def test_errors_are_those_of_pytorch():
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        F.group_norm(channels(drawn(2, 7, 3)), 3)
