from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.channels import tensor
from spatialdl.channels.tensor import ChannelTensor, is_pointwise, whole_of
from spatialdl.channels.weights import Weight  # noqa: F401  (registers all operations)
from spatialdl.errors import UnsupportedSpatialOp
from tests.mpi.channels.divided import WORLD, assert_as_whole, channels
from tests.mpi.device import DEVICE


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def no_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation for which all channels are gathered fails."""

    def refuse(func: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError(f"{func} gathers all channels")

    monkeypatch.setattr(tensor, "on_all_channels", refuse)


POINTWISE = {
    "relu": F.relu,
    "relu, in place": lambda x: F.relu(x, inplace=True),
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "times a number": lambda x: 2 * x - 1,
    "one over": lambda x: 1 / (2 + x.square()),
    "power": lambda x: (x.abs() + 1) ** 1.5,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "itself": lambda x: x * x + x,
    "in place": lambda x: x.mul_(3).add_(x),
}


@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.usefixtures("no_gathers")
def test_pointwise_operations_stay_where_the_channels_are(name: str):
    assert_as_whole(POINTWISE[name], drawn(2, 7, 3, 5))


def test_what_all_ranks_have_meets_the_channels_that_it_belongs_to():
    """Of a whole operand a rank takes its own channels; one for all channels gets all gradients."""
    x = drawn(2, 7, 3)
    for shape in ((7, 1), (2, 1, 1), (3,), (), (2, 7, 3)):
        other, reference = drawn(*shape).requires_grad_(), drawn(*shape).requires_grad_()
        weights = drawn(2, 7, 3) + 2
        (x * reference * weights).sum().backward()
        given = channels(x) * other.to(DEVICE)
        assert isinstance(given, ChannelTensor)
        (whole_of(given).cpu() * weights).sum().backward()
        torch.testing.assert_close(other.grad, reference.grad, rtol=0, atol=1e-12)


def test_tensors_divided_otherwise_meet():
    assert_as_whole(lambda x: x + x.transpose(1, 2), drawn(2, 5, 5))


def test_what_nothing_knows_gets_all_channels():
    assert_as_whole(lambda x: x.cumprod(1), drawn(2, 5, 3))
    assert_as_whole(torch.linalg.matrix_norm, drawn(2, 5, 3))


def test_shapes_are_those_of_the_whole():
    x = channels(drawn(2, 7, 3))
    assert (x.shape, x.dim(), x.numel(), x.size(1)) == ((2, 7, 3), 3, 42, 7)
    assert torch.equal(x.full_tensor().cpu(), drawn(2, 7, 3))
    assert x.part.shape[1] == x.partition.size_of(WORLD.rank)


def test_writing_into_a_copy_is_refused():
    x = channels(drawn(2, 7, 3))
    with pytest.raises(UnsupportedSpatialOp, match="it would modify a copy"):
        x[:, 2] = 0
    with pytest.raises(UnsupportedSpatialOp, match="cumsum_ is not supported"):
        x.cumsum_(1)


def test_a_hook_that_would_never_be_called_is_refused():
    """It would hang on a copy with all channels, of which backward knows nothing."""
    x = channels(drawn(2, 7, 3).requires_grad_())
    with pytest.raises(UnsupportedSpatialOp, match="register_hook"):
        x.register_hook(print)


def test_data_of_a_part_are_not_set():
    x, buffer = channels(drawn(2, 7, 3)), drawn(2, 7, 3).to(DEVICE)
    with pytest.raises(UnsupportedSpatialOp, match="data is not supported"):
        x.data = buffer


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_function_of_somebody_else_does_not_lose_gradients():
    """Its forward runs on parts, but autograd would go past them: the gradient was zero."""
    x = channels(drawn(2, 7, 3).requires_grad_())
    with pytest.raises(UnsupportedSpatialOp, match=r"autograd\.Function"):
        _Doubled.apply(x).flatten(2)


def test_random_functions_are_not_pointwise():
    assert is_pointwise(torch.add)
    assert is_pointwise(Tensor.__rsub__)
    assert is_pointwise(Tensor.relu_)
    assert not is_pointwise(torch.bernoulli)
    assert not is_pointwise(torch.softmax)
    assert not is_pointwise(Tensor.copy_)


WRITES = {
    "a slice": lambda h: h[:, 1:3].mul_(2),
    "a channel": lambda h: h[:, 2].zero_(),
    "narrowed": lambda h: h.narrow(1, 0, 2).add_(1),
    "a view of a view": lambda h: h[:, 1:5][:, 1:].add_(1),
    "inplace=True": lambda h: F.relu(h[:, :3], inplace=True),
    "set": lambda h: h[:, 1:3].__setitem__((slice(None), 0), 1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_into_a_view_of_a_copy_is_refused(name: str):
    """The write was lost: `h[:, 1:3].mul_(2)` left `h` as it was."""
    with pytest.raises(UnsupportedSpatialOp, match="it would modify a copy"):
        WRITES[name](channels(drawn(2, 7, 3)))


def test_reading_a_view_of_a_copy_is_all_right():
    assert_as_whole(lambda h: (h[:, 1:3] * 2).sum(1) + h[:, 4] + F.relu(h[:, 5]), drawn(2, 7, 3))


@pytest.mark.parametrize("size", [WORLD.size, WORLD.size + 1, 2 * WORLD.size])
def test_copies_and_views_are_those_of_whole_tensors(size: int):
    """A rank with one channel got a view where others copied, and wrote into the original."""

    def written(copied: Any) -> Any:
        def run(h: Tensor) -> Tensor:
            h = h + 0
            copied(h).add_(1)
            return h

        return run

    for copied in (
        lambda h: h.permute(0, 2, 3, 1).contiguous(),
        lambda h: h.permute(0, 2, 3, 1).reshape(2, -1),
        lambda h: h.transpose(1, 2).flatten(2),
        lambda h: h.reshape(2, -1),
        lambda h: h.contiguous(),
        lambda h: h.flatten(2),
    ):
        assert_as_whole(written(copied), drawn(2, size, 3, 4))
    x = channels(drawn(2, size, 3, 4))
    assert x.is_contiguous()
    assert not x.permute(0, 2, 3, 1).is_contiguous()


def test_out_is_written():
    x, whole = channels(drawn(2, 7, 3)), drawn(2, 7, 3)
    out = torch.zeros(2, 7, 3, dtype=torch.float64, device=DEVICE)
    torch.add(x, x, out=out)
    assert torch.equal(out.cpu(), 2 * whole)
    out = torch.zeros(2, 7, dtype=torch.float64, device=DEVICE)
    torch.sum(x, 2, out=out)
    torch.testing.assert_close(out.cpu(), whole.sum(2), rtol=0, atol=1e-15)


SPELLINGS = {
    "cat": lambda x: torch.cat([x, x], axis=1),
    "chunk": lambda x: torch.chunk(x, 2, axis=2)[0],
    "permute": lambda x: torch.permute(x, dims=(0, 2, 1)),
    "flip": lambda x: torch.flip(x, dims=(2,)),
    "swapaxes": lambda x: torch.swapaxes(x, axis0=0, axis1=2),
    "sum": lambda x: torch.sum(input=x, dim=-1),
    "where": lambda x: x[x > 0].sum() + torch.where(x > 0)[0].double().sum(),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_arguments_may_be_spelled_as_pytorch_takes_them(name: str):
    assert_as_whole(SPELLINGS[name], drawn(2, 7, 4))
