"""Operations on divided channels, against those on whole tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.spatial.channels.tensor import ChannelTensor, all_channels
from spatialdl.spatial.channels.weights import Weight  # noqa: F401  (registers all operations)
from spatialdl.spatial.random import keyed
from tests.mpi.device import DEVICE
from tests.mpi.spatial.channels.divided import (
    WORLD,
    assert_as_whole,
    channels,
    drawn,
    no_gathers,
    within,
)

RANKS = WORLD.size
IMAGE = (2, 7, 5, 7)
WIDE = 2 * RANKS + 1
MANY = (2, WIDE, 3, 4)


def places(x: Tensor) -> Tensor:
    return torch.tensor([[3, 0, 1], [1, 1, 4]], device=x.device)


def other(x: Tensor, *shape: int) -> Tensor:
    """On the device of `x`: the whole one may be on another than the parts."""
    return drawn(*shape, seed=4).to(x.device)


def copied(x: Tensor, source: Tensor) -> Tensor:
    """It was refused, as if it wrote into a copy."""
    into = torch.zeros_like(x)
    into.copy_(source)
    return into * x


POINTWISE = {
    "relu, in place": lambda x: F.relu(x, inplace=True),
    "hardswish": F.hardswish,
    "power": lambda x: (x.abs() + 1) ** 1.5,
    "in place": lambda x: x.mul_(3).add_(x),
}


SHAPES = {
    "flatten pixels": lambda x: x.flatten(2).transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "halves of rows": lambda x: torch.cat(x.split([2, 3], dim=2)[::-1], 2),
    "cat and split": lambda x: torch.cat([x, 2 * x], 1).chunk(2, 1)[1],
    "expand, new dims": lambda x: x.expand(2, 1, 2, 7, -1, 7).mean((0, 1)),
    "expand something else as": lambda x: x.mean((2, 3), keepdim=True).expand_as(x),
    "repeat, new dim": lambda x: x.repeat((2, 1, 1, 1, 1)),
    "places": lambda x: x[:, :, places(x)],
    "places before": lambda x: x.permute(2, 3, 0, 1)[places(x)][:, 1:],
}


OF_MAPS = {
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "mean of pixels, kept": lambda x: x.mean((-1, -2), keepdim=True),
    "channels last": lambda x: x.to(memory_format=torch.channels_last) + 1,
    "roll": lambda x: x.roll((1, -2), (2, 3)),
    "pad, channels last": lambda x: F.pad(x.transpose(1, 3), (0, 0, 1, 2, 0, 1), value=2.0),
    "new tensors": lambda x: x + x.new_ones(7) * x.new_full((1,), 3) + x.new_zeros(5, 1),
    "norm, kept": lambda x: x.norm(dim=(2, 3), keepdim=True),
    "normalized rows": lambda x: F.normalize(x, dim=-1),
    "flip": lambda x: x.flip(3),
    "largest row": lambda x: x.max(dim=2).values,
    "channels last, pooled": lambda x: x.to(memory_format=torch.channels_last).mean((2, 3)),
}


PRODUCTS = {
    "fewer channels than ranks": lambda x: torch.einsum("bchw,cd->bdhw", x, other(x, WIDE, 1)),
    "each channel": lambda x: torch.einsum("bchw,c->bchw", x, other(x, WIDE)),
    "channels behind": lambda x: torch.einsum("bchw,hd->bwdc", x, other(x, 3, 4)),
    "itself": lambda x: torch.einsum("bchw,bchv->bcwv", x, x),
    "sums over channels": lambda x: torch.einsum("bchw,bchv->bwv", x, x),
    "two dims in place of one": lambda x: torch.einsum("bchw,cde->bdehw", x, other(x, WIDE, 2, 3)),
    "three operands": lambda x: torch.einsum("bchw,c,h->bchw", x, other(x, WIDE), other(x, 3)),
    "a size of one": lambda x: torch.einsum("bchw,xc->bchw", x, other(x, 2, 1)),
}


STAYS = {
    **{name: (operation, IMAGE) for name, operation in {**POINTWISE, **SHAPES, **OF_MAPS}.items()},
    **{
        name: (PRODUCTS[name], MANY)
        for name in ("each channel", "channels behind", "itself", "three operands")
    },
    "a copy of itself": (lambda x: copied(x, x * 2), MANY),
    "a copy of a whole one": (lambda x: copied(x, other(x, *MANY)), MANY),
    "a copy that is broadcast": (lambda x: copied(x, other(x, 3, 4)), MANY),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_where_the_channels_are(name: str):
    operation, shape = STAYS[name]
    assert_as_whole(within(operation), drawn(*shape))


GATHERS = {
    "flip of channels": lambda x: x.flip(3, 1) + x.flip(dims=(1,)),
    "some channels": lambda x: x[:, 1:4],
    "channels together": lambda x: x.reshape(2, 5, 7, 7),
    "repeat of channels": lambda x: x.repeat(1, 2, 1, 1),
    "softmax": lambda x: x.softmax(1),
    "roll of channels": lambda x: x.roll(1, 1),
    "pad of channels": lambda x: F.pad(x, (0, 0, 1, 1, 2, 0)),
    "largest of two": lambda x: torch.max(x, x * x),
    "pooled without samples": lambda x: F.max_pool2d(x[0].transpose(0, 1), 2),
    "product with a matrix": lambda x: (
        x.transpose(1, 3) @ torch.eye(7, dtype=x.dtype, device=x.device)
    ),
    "a view of a copy": lambda x: (x[:, 1:3] * 2).sum(1) + x[:, 4] + F.relu(x[:, 5]),
}
OF_THREE_DIMS = {
    "spelled cat": lambda x: torch.cat([x, x], axis=1),
    "spelled chunk": lambda x: torch.chunk(x, 2, axis=2)[0],
    "spelled flip": lambda x: torch.flip(x, dims=(2,)),
    "spelled sum": lambda x: torch.sum(input=x, dim=-1),
    "spelled where": lambda x: x[x > 0].sum() + torch.where(x > 0)[0].double().sum(),
    "divided otherwise": lambda x: x[:, :4] + x[:, :4].transpose(1, 2),
}
ANY = {
    **{name: (operation, IMAGE) for name, operation in GATHERS.items()},
    **{name: (operation, (2, 7, 4)) for name, operation in OF_THREE_DIMS.items()},
    **{
        f"einsum, {name}": (operation, MANY)
        for name, operation in PRODUCTS.items()
        if name not in STAYS
    },
}


@pytest.mark.parametrize("name", ANY)
def test_equals_one_process(name: str):
    operation, shape = ANY[name]
    assert_as_whole(operation, drawn(*shape))


@pytest.mark.parametrize("size", [RANKS, RANKS + 1, 2 * RANKS])
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


def test_what_all_ranks_have_meets_the_channels_that_it_belongs_to():
    """Of a whole operand a rank takes its own channels; one for all channels gets all gradients."""
    x, weights = drawn(2, 7, 3), drawn(2, 7, 3) + 2
    for shape in ((7, 1), (2, 1, 1), (1, 7, 1), (3,), (), (2, 7, 3)):
        for expand in (False, True):
            other, reference = drawn(*shape).requires_grad_(), drawn(*shape).requires_grad_()
            (reference * x * weights).sum().backward()
            divided, whole = channels(x), other.to(DEVICE)
            given = (whole.expand_as(divided) if expand else whole) * divided
            assert isinstance(given, ChannelTensor)
            (all_channels(given).cpu() * weights).sum().backward()
            torch.testing.assert_close(other.grad, reference.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_dropout_drops_what_one_process_drops(function: Any):
    x = drawn(2, 7, 5, 4)
    with keyed(1, 2):
        expected = function(x, 0.4, True)
    with keyed(1, 2), no_gathers():
        given = function(channels(x), 0.4, True)
    assert isinstance(given, ChannelTensor)
    torch.testing.assert_close(all_channels(given).cpu(), expected, rtol=0, atol=1e-12)


# --- what would be lost is refused


class _Doubled(torch.autograd.Function):
    """Of somebody else: its forward runs on parts, but autograd would go past them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


COPY = "it would modify a copy"
REFUSED = {  # the writes were lost: `h[:, 1:3].mul_(2)` left `h` as it was
    "set a channel": (COPY, lambda h: h.__setitem__((slice(None), 2), 0)),
    "a slice": (COPY, lambda h: h[:, 1:3].mul_(2)),
    "a channel": (COPY, lambda h: h[:, 2].zero_()),
    "narrowed": (COPY, lambda h: h.narrow(1, 0, 2).add_(1)),
    "a view of a view": (COPY, lambda h: h[:, 1:5][:, 1:].add_(1)),
    "inplace=True": (COPY, lambda h: F.relu(h[:, :3], inplace=True)),
    "set in a slice": (COPY, lambda h: h[:, 1:3].__setitem__((slice(None), 0), 1.0)),
    "cumsum_": ("cumsum_ is not supported", lambda h: h.cumsum_(1)),
    "a hook that would never be called": (
        "register_hook",
        lambda h: h.register_hook(print),
    ),
    "a function whose gradient was zero": (
        r"autograd\.Function",
        lambda h: _Doubled.apply(h).flatten(2),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    sentence, call = REFUSED[name]
    learns = name.startswith(("a hook", "a function"))
    with pytest.raises(UnsupportedSpatialOp, match=sentence):
        call(channels(drawn(2, 7, 3).requires_grad_(learns)))


# --- group norms


@pytest.mark.parametrize("shape", [(2, 12, 5, 3), (4, 12)])
@pytest.mark.parametrize("groups", [1, RANKS, 12])
def test_group_norms_gather_only_groups_that_lie_on_several_ranks(
    groups: int, shape: tuple[int, ...]
):
    def normed(x: Tensor) -> Tensor:
        with no_gathers() if groups % RANKS == 0 else nullcontext():
            return F.group_norm(x + 3, groups, eps=1e-3)

    assert_as_whole(normed, drawn(*shape))
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        F.group_norm(channels(drawn(2, 7, 3)), 3)
