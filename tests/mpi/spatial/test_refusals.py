"""What is refused: alike on every rank, by name, with nothing computed."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import several_ranks
from tests.mpi.spatial.shared import flat, tokens

Call = Callable[[Tensor], object]
Refusals = dict[str, list[tuple[str, Call]]]
"""The words of the refusal, and the call."""

ALL, IMAGE, ONE = slice(None), (2, 4, 8, 8), torch.ones
SHAPES = {  # other than that of an image
    "joins and views": (2, 4, 12, 8),
    "an image and itself": (2, 4, 4, 6),
    "products": (3, 4, 7, 6),
    "a flattened map": (3, 4, 7, 6),
    "beside a class token": (2, 8, 7, 5),
    "views": (2, 4, 12, 8),
    "pads": (1, 1, 5, 5),
}
SIZE = 4 * 7 * 6
ROWS = torch.tensor([6, 0, 0, -1, 3, 2])


def places(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def rows_as_samples(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def beside(x: Tensor) -> Tensor:
    """Tokens behind a class token."""
    return torch.cat([ONE(1, 1, x.shape[1]).expand(len(x), -1, -1), tokens(x)], 1)


@torch.library.custom_op("spatialdl_tests::neighbours", mutates_args=())
def neighbours(x: Tensor, others: Tensor) -> Tensor:
    """An operator of another library, such as neighbourhood attention."""
    return x.roll(1, -1) + others


class Neighbours(torch.autograd.Function):
    """How such libraries give their operators a gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return neighbours(x, x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


NOT_4D, POOLED = r"takes \(N, C, H, W\)", r"adaptive_(avg|max)_pool1d"
UNSUPPORTED: Refusals = {
    "pools": [
        ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)),
        ("adaptive_max_pool2d", lambda x: torch._C._nn.adaptive_max_pool2d(x, (2, 2))),
        ("max_pool2d", lambda x: F.max_pool2d(x, 2, return_indices=True)),
        ("max_pool2d_with_indices", lambda x: F.max_pool2d_with_indices(x, 2)),
        ("max_unpool2d", lambda x: F.max_unpool2d(x, places(2, 4, 8, 8), 2)),
        ("fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 2, output_size=3)),
    ],
    "pools of tokens": [
        *(
            (POOLED, lambda x, p=pool, f=form, n=size: p(f(x), n))
            for pool in (F.adaptive_avg_pool1d, F.adaptive_max_pool1d)
            for form, size in (
                (lambda x: x.flatten(2), 2),
                (lambda x: x.flatten(2), (3,)),
                (tokens, 1),  # over channels
                (lambda x: x[0], 1),  # (C, H, W)
                (lambda x: x.flatten(2)[0], 1),  # (C, H*W)
                (lambda x: x.transpose(0, 1).reshape(4, -1)[None], 1),  # (1, C, N*H*W)
            )
        ),
        (POOLED, lambda x: F.adaptive_max_pool1d(x.flatten(2), 1, return_indices=True)),
        (POOLED, lambda x: F.adaptive_max_pool1d_with_indices(x.flatten(2), 1)),
        ("", lambda x: F.avg_pool1d(x.flatten(2), 3, 2)),
    ],
    "convolutions": [
        ("conv1d .* supported: use conv2d", lambda x: F.conv1d(x.flatten(2), ONE(6, 4, 3))),
        (
            r"conv2d .*channels\) must not be split",
            lambda x: F.conv2d(x.permute(0, 2, 3, 1), ONE(6, 8, 1, 1)),
        ),
        (
            "its weight cannot be a split tensor",
            lambda x: F.conv_transpose2d(ONE(1, 2, 3, 3), x),
        ),
    ],
    "of three dims, of which the second are not the channels": [
        (NOT_4D, lambda x: F.conv2d(x[:, 0], ONE(2, 2, 3, 3), padding=1)),
        (NOT_4D, lambda x: F.max_pool2d(x[:, 0], 2)),
        (NOT_4D, lambda x: F.batch_norm(x[:, 0], None, None, training=True)),
        (NOT_4D, lambda x: F.group_norm(x[:, 0], 2)),
        (NOT_4D, lambda x: F.instance_norm(x[:, 0])),
        ("the classes in dim 1", lambda x: F.cross_entropy(x[:, 0], places(2, 8))),
    ],
    "each row of a sample would be a sample of its own": [
        ("samples are merged with rows", lambda x: F.group_norm(rows_as_samples(x), 2)),
        ("", lambda x: rows_as_samples(x)[1:]),
    ],
    "moved pixels": [
        ("pass dims", lambda x: x.roll(2)),
        ("separate dims", lambda x: x.flatten(2).roll(1, 2)),
        ("rows and columns last", lambda x: F.pixel_shuffle(x.permute(0, 2, 3, 1), 2)),
        ("dim 1", lambda x: F.channel_shuffle(x.permute(0, 2, 3, 1), 2)),
        # other rows and columns, as many windows
        ("fold is not supported", lambda x: F.fold(x.flatten(2), (5, 17), 2)),
        ("floating-point", lambda x: F.interpolate(x.byte(), (5, 23), mode="bilinear")),
        ("circular pad", lambda x: F.pad(x[..., :5, :5], (0, 0, 4, -3), "circular")),
        ("", lambda x: F.pad(x.flatten(2), (1, -1))),
        ("", lambda x: F.pad(x.flatten(2), (1, 1), "reflect")),
        ("may read pix", lambda x: F.grid_sample(x, ONE(2, 4, 4, 2), align_corners=False)),
    ],
    "indices": [
        *(
            (r"^__getitem__ .* 8x8.*masked_fill", lambda x, i=index: x[i])
            for index in (
                (ALL, ALL, torch.tensor([0, 2]), torch.tensor([1, 2])),
                *((ALL, ALL, ONE(8, dtype=kind)) for kind in (torch.bool, torch.uint8)),
                ONE(IMAGE, dtype=torch.bool),
                (ALL, True),
            )
        ),
        ("masked_fill", lambda x: x[x > 0]),
        *(
            (r"^__(set|get)item__ .* 8x8", lambda x, i=index: x.__setitem__(i, 1.0))
            for index in ((ALL, ALL, slice(1, 4)), (..., 3), (ALL, ALL, torch.tensor([1])))
        ),
        ("in place", lambda x: torch.zeros(IMAGE).__setitem__(ALL, x)),
        ("index", lambda x: x[:, :, torch.arange(8), torch.arange(8)]),
        ("index", lambda x: x[torch.tensor([0, 1])[:, None], :, ROWS]),
        ("index", lambda x: x[:, 1:, ROWS]),
        ("index", lambda x: tokens(x)[:, ROWS]),
        ("index", lambda x: beside(x)[:, torch.arange(8 * 8 + 1)]),
        ("8x8", lambda x: x.unbind(2)),
        ("8x8", lambda x: x.flatten(2).index_select(2, torch.tensor([1]))),
        ("dim 2 is split", lambda x: x.gather(2, places(2, 1, 8, 8))),
        *(
            ("take_along_dim is not supported", lambda x, i=index: torch.take_along_dim(x, *i))
            for index in (
                (places(5),),
                (places(5), None),
                (places(2, 4, 1, 8), 2),
                (places(2, 1, 1, 8), 1),
            )
        ),
    ],
    "joins and views": [
        ("whole tensors only", lambda x: torch.cat([x.flatten(2), x.flatten(2)], 2)),
        ("same dims", lambda x: torch.cat([x[:, :, :8], x[:, :, :8].mT], 1)),
        ("arguments", lambda x: torch.cat([x, x], 1, out=torch.empty(2, 8, 12, 8))),
        (r"parallel\.gather_before", lambda x: x.permute(0, 3, 2, 1).flatten(1)),
    ],
    "an image and itself": [
        ("", lambda x: x @ x.mT),
        ("", lambda x: torch.einsum("nccw->nw", x.permute(0, 2, 1, 3))),
        ("must not be split", lambda x: F.scaled_dot_product_attention(x, x, x)),
    ],
    "a flattened map": [
        ("", lambda x: flat(x)[:, :4]),
        ("", lambda x: torch.cat([flat(x), ONE(3, 2)], 1)),
        ("", lambda x: F.batch_norm(flat(x), None, None, training=True)),
        ("", lambda x: F.prelu(flat(x), ONE(SIZE))),
        ("", lambda x: flat(x).cumsum(1)),
        ("", lambda x: F.conv1d(flat(x)[:, None], ONE(1, 1, 3))),
        ("", lambda x: F.glu(flat(x))),
        ("", lambda x: x.transpose(1, 2).flatten(1)),  # channels between rows
    ],
    "beside a class token": [
        ("", lambda x: beside(x)[:, :4]),
        ("", lambda x: beside(x).reshape(2, 18, 16)),
        ("", lambda x: F.conv1d(beside(x).transpose(1, 2), ONE(1, 8, 3))),
        ("", lambda x: torch.cat([beside(x), beside(x)], 1)),
        ("", lambda x: beside(x) + beside(x)[:, 1:]),
    ],
    "reductions": [
        (r"^cumsum .* on an image split.*full_tensor\(\)", lambda x: x.cumsum(2)),
        ("on an image split", lambda x: x.sort()),
        ("on an image split", lambda x: x.median()),
        ("on an image split", lambda x: torch.linalg.norm(x, 2, (2, 3))),
        ("on an image split", lambda x: torch.sum(x, 2, out=torch.empty(()))),
        *(
            ("call full_tensor", lambda x, f=function, d=dim: f(x, 0.5, d))
            for function in (torch.quantile, torch.nanquantile)
            for dim in (None, 0, 1, 2)  # which change which dims there are
        ),
    ],
    "random numbers": [
        (
            "not from a generator",
            lambda x: torch.bernoulli(x.sigmoid(), generator=torch.Generator()),
        ),
        ("", lambda x: x.cauchy_()),
    ],
    "what gives away pixels, or compares them": [
        (r"^linalg_svd.*full_tensor\(\)", torch.linalg.svd),
        (r"^numpy.*full_tensor\(\)", lambda x: x.numpy()),
        ("", lambda x: x.item()),
        ("", lambda x: x.data_ptr()),
        ("", pickle.dumps),
        ("", torch.from_dlpack),
        ("", lambda x: x.apply_(lambda value: value)),
        ("", lambda x: torch.equal(x, x)),
        ("", lambda x: x.nonzero()),
        ("", lambda x: ONE(9)[x.long()]),
    ],
    "other tensors beside a split one": [
        ("", lambda x: x + ONE(9)),
        ("", lambda x: x + F.max_pool2d(x, 2)),
        ("", lambda x: F.conv2d(x, x)),
        ("", lambda x: ONE(IMAGE).__iadd__(x)),
        ("", lambda x: torch.add(x, 1.0, out=ONE(IMAGE))),
        ("rebind the variable", lambda x: setattr(x, "data", x * 2)),  # it kept the old tile
    ],
    "operators of other libraries": [
        ("neighbours.* is not supported on an", lambda x: neighbours(x, x)),
        ("neighbours", lambda x: Neighbours.apply(x.requires_grad_())),
    ],
    "scripts": [
        ("record operations on plain", lambda x: torch.jit.trace(nn.Conv2d(4, 2, 1), x)),
        ("^forward of a scripted.*8x8.*before torch.jit", torch.jit.script(nn.Conv2d(4, 2, 1))),
    ],
}


def cases(table: Refusals) -> list[object]:
    return [
        pytest.param(SHAPES.get(subject, IMAGE), *one, id=f"{subject} {number}")
        for subject, calls in table.items()
        for number, one in enumerate(calls)
    ]


@pytest.mark.parametrize(("shape", "words", "call"), cases(UNSUPPORTED))
def test_not_supported(shape: tuple[int, ...], words: str, call: Call, meshes: dict) -> None:
    whole = torch.rand(shape)
    for mesh in several_ranks(meshes):
        x = shard(whole, mesh)
        with pytest.raises(UnsupportedSpatialOp, match=words or None) as error:
            call(x)
        assert len(set(mesh.comm.allgather(str(error.value)))) == 1
        assert torch.equal(x.full_tensor(), whole)  # ranks are where they were, and go on together


ERRORS = (ValueError, RuntimeError, IndexError, TypeError, AssertionError)
NOT_PYTORCH: Refusals = {
    "windows": [
        ("window is larger than the image", lambda x: F.conv2d(x, ONE(2, 4, 9, 1))),
        ("Output size is too small", lambda x: F.max_pool2d(x, (1, 9))),
        ("4 channels, but the weight.*expects 2", lambda x: F.conv2d(x, ONE(1, 2, 3, 3))),
        ("'same', 'valid' or", lambda x: F.conv2d(x, ONE(1, 4, 3, 3), padding="round")),
        ("needs stride 1", lambda x: F.conv2d(x, ONE(1, 4, 3, 3), None, 2, "same")),
        ("conv1d: the image has 4 channels", lambda x: F.conv1d(x.flatten(2), ONE(6, 3, 1))),
        ("at most half", lambda x: F.max_pool2d(x, 3, 1, 2)),
        ("must be not zero", lambda x: F.avg_pool2d(x, 2, divisor_override=0)),
        ("should not be zero", lambda x: F.max_pool2d(x, 2, 0)),
        ("dilation must be at least 1", lambda x: F.conv2d(x, ONE(1, 4, 3, 3), dilation=0)),
    ],
    "transposed convolutions": [
        ("must be the channels", lambda x: F.conv_transpose2d(x, ONE(3, 4, 3, 3))),
        ("into 3 groups", lambda x: F.conv_transpose2d(x, ONE(4, 4, 3, 3), groups=3)),
        (r"shape \(2,\)", lambda x: F.conv_transpose2d(x, ONE(4, 2, 3, 3), ONE(3))),
        ("smaller than", lambda x: F.conv_transpose2d(x, ONE(4, 2, 3, 3), None, 2, 0, 2)),
        ("less padding", lambda x: F.conv_transpose2d(x, ONE(4, 2, 3, 3), None, 1, 6)),
    ],
    "adaptive pools": [
        (
            "(?i)adaptive_|negative dim|output_size",
            lambda x, p=pool, n=size: p(x.long() if n == 2 else x, n),
        )
        for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d)
        for size in (2, (2, -1), (1, 2, 3))
    ],
    "folds": [
        ("expected input.size", lambda x: F.fold(x.flatten(2), (9, 10), 2)),
        ("padding should", lambda x: F.fold(x.flatten(2), (5, 9), 2, padding=(-1, 0))),
        ("sliding blocks", lambda x: F.unfold(x, 9)),
    ],
    "losses": [
        ("", lambda x: F.cross_entropy(x, places(2, 8, 7))),
        ("", lambda x: F.cross_entropy(torch.zeros(2, 4, 8, 7), x[:, 0].long())),
    ],
    "norms": [
        ("", lambda x: F.batch_norm(x, None, None, training=True, momentum=None)),
        ("", lambda x: F.group_norm(x, 3)),
        ("", lambda x: F.layer_norm(x, (3, 3))),
        (
            "more than 1 value per channel",
            lambda x: F.batch_norm(F.avg_pool2d(x[:1], 8), None, None, training=True),
        ),
        ("more than 1 ", lambda x: F.instance_norm(F.avg_pool2d(x, 8))),
        ("running", lambda x: F.batch_norm(x, None, None)),
    ],
    "indices": [
        *(
            ("", lambda x, i=index: x[i])
            for index in (
                (5,),
                (ALL, ALL, 8),
                (ALL, ALL, ALL, ALL, 0),
                (..., -9),
                (ALL, ALL, torch.tensor([0, 8])),
                (..., torch.tensor([-9, 1])),
            )
        ),
        ("", lambda x: torch.index_select(x, 2, torch.tensor([-1]))),
        ("", lambda x: x.index_select(7, torch.tensor([1]))),
        ("", lambda x: torch.cat([x, x[..., 1:]], 1)),
        ("", lambda x: F.pixel_shuffle(x, 3)),
    ],
    "products": [
        ("", lambda x: tokens(x) @ ONE(5, 3)),
        ("", lambda x: torch.einsum("nchw,dc->ndhw", x, ONE(3, 5))),
        ("", lambda x: F.linear(flat(x), ONE(3, SIZE + 1))),
    ],
    "views": [
        ("", lambda x: x.reshape(2, 4, 12, 9)),
        ("", lambda x: x.flatten(3, 1)),
    ],
    "reductions": [
        ("", lambda x: x.sum(4)),
    ],
    "pads": [
        ("length must be non-negative", lambda x: F.pad(x, (0, -6))),
        ("Padding size should be less", lambda x: F.pad(x, (0, 0, 5, 0), "reflect")),
        ("wrapping around more than once", lambda x: F.pad(x, (0, 6, 0, 0), "circular")),
    ],
    "others": [
        ("order must be", lambda x: x.diff(n=-1)),
        ("align_corners", lambda x: F.interpolate(x, 3, mode="nearest", align_corners=True)),
        ("", bool),
        ("", lambda x: x + ONE(2, 3, 8, 8)),
        ("between 0 and 1", lambda x: F.dropout(x, 1.5)),
    ],
}


@pytest.mark.parametrize(("shape", "words", "call"), cases(NOT_PYTORCH))
def test_what_pytorch_refuses(shape: tuple[int, ...], words: str, call: Call, meshes: dict) -> None:
    """All ranks raise: one that goes on would wait for the others in the next exchange."""
    whole = torch.rand(shape)
    with pytest.raises(ERRORS) as plain:
        call(whole)
    errors = IndexError if plain.type is IndexError else ERRORS
    for mesh in meshes.values():
        with pytest.raises(errors, match=words or None):
            call(shard(whole, mesh))


def test_what_no_table_sees_finds_no_data(meshes: dict) -> None:
    """As a function of a C++ extension that is no operator."""
    for mesh in several_ranks(meshes):
        x = shard(torch.rand(IMAGE), mesh)
        with pytest.raises(RuntimeError):
            x.untyped_storage().data_ptr()
        with (
            torch._C.DisableTorchFunctionSubclass(),
            pytest.raises(RuntimeError, match="data point"),
        ):
            x.data_ptr()
