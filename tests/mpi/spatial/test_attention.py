"""Attention over the tokens of a split image: everywhere, in windows, along one axis.

Keys come by part after part: memory, recomputation, uneven parts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spatialdl import SpatialTensor, init_mesh, shard
from spatialdl.comm.boxed import Exchange
from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.spatial import ring
from spatialdl.spatial.random import keyed
from spatialdl.spatial.recompute import recompute
from tests.mpi.device import DEVICE
from tests.mpi.equality import Operation, check_keyed, every_mesh
from tests.mpi.spatial.shared import Cases, tokens

N, C, H, W = 2, 8, 12, 4
HEADS = 2
sdpa = F.scaled_dot_product_attention


def heads(x: Tensor) -> Tensor:
    """(N, L, C) to (N, heads, L, features)."""
    return x.reshape(x.shape[0], -1, HEADS, C // HEADS).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    y = sdpa(heads(q), heads(k), heads(v), mask, scale=0.7)
    return y.transpose(1, 2).reshape(q.shape[0], -1, C)


def fewer(x: Tensor) -> Tensor:
    """Keys of a reduced image, as in SegFormer and PVT."""
    return tokens(F.avg_pool2d(x, 2))


def in_windows(x: Tensor, size: int, mask: Tensor | None = None) -> Tensor:
    x = x.permute(0, 2, 3, 1).view(N, H // size, size, W // size, size, C)
    x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, C)
    return attend(x, x.sin(), x.cos(), mask)


def weighed(channels: int = C, **options: Any) -> Operation:
    """Attention whose weights are kept; dropout draws the same ones in every layout."""

    def run(x: Tensor) -> Tensor:
        q, k = heads(tokens(x)), heads(tokens(x))[:, : channels * HEADS // C]
        return sdpa(q, k, k.sin(), **{k: _beside(v, x) for k, v in options.items()})

    return run


def _beside(value: Any, x: Tensor) -> Any:
    return value.to(x.device) if isinstance(value, Tensor) else value


def half_seen() -> Tensor:
    """A mask of which the first row sees nothing."""
    mask = torch.rand(H * W, H * W, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[0] = False
    return mask


def of_channels(**options: Any) -> Operation:
    """Channels attend to channels: products of queries and keys are sums over all tokens."""

    def run(x: Tensor) -> Tensor:
        q, k = (F.normalize(x.flatten(2), dim=-1) for x in (x, x.sin()))
        return sdpa(q, k, x.cos().flatten(2), **options)

    return run


def module(batch_first: bool, need_weights: bool) -> tuple[Operation, tuple[int, ...], list]:
    layer = nn.MultiheadAttention(C, HEADS, batch_first=batch_first).double()
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        t = tokens(x) if batch_first else tokens(x).transpose(0, 1)
        given = dict(zip(names, values, strict=True))
        options = {"need_weights": need_weights}
        y, weights = torch.func.functional_call(layer, given, (t, t, t), options)
        return y + 0 * weights.sum() if need_weights else y

    return run, (N, C, H, W), [value.shape for value in values]


def encoder(dropout: float) -> Operation:
    layer = nn.TransformerEncoderLayer(C, HEADS, 16, dropout=dropout, batch_first=True).double()
    return lambda x: layer(tokens(x))


def few_queries(x: Tensor, q: Tensor) -> Tensor:
    return sdpa(q, tokens(x), tokens(x).sin(), dropout_p=0.4) + 0 * x.sum()


def recomputed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The second run of a block takes the result from the first."""

    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sdpa(*F.linear(x, weight, bias).chunk(3, -1), dropout_p=0.2)

    y: Tensor = recompute(block, tokens(x), weight, bias, modules=[])
    return y


def by_einsum(x: Tensor) -> Tensor:
    t = tokens(x)
    weights = torch.einsum("nlc,nsc->nls", t, t.sin()).softmax(-1)
    return torch.einsum("nls,nsc->nlc", weights, t.cos())


IMAGE, ODD = (N, C, H, W), (2, 8, 7, 5)
CASES: Cases = {
    "everywhere": (lambda x: attend(tokens(x), tokens(x).sin(), tokens(x)), IMAGE, []),
    "with a bias of positions": (
        lambda x, b: attend(tokens(x), tokens(x), tokens(x), b),
        IMAGE,
        [(1, HEADS, H * W, H * W)],
    ),
    **{
        f"with a bias of {name}": (
            lambda x, b: attend(tokens(x), tokens(x), tokens(x), b),
            IMAGE,
            [shape],
        )
        for name, shape in (("keys", (N, 1, 1, H * W)), ("queries", (H * W, 1)))
    },
    "fewer keys": (lambda x: attend(tokens(x), fewer(x), fewer(x)), IMAGE, []),
    "whole keys": (lambda x, k: attend(tokens(x), k, k), IMAGE, [(N, 5, C)]),
    "a few whole queries": (lambda x, q: attend(q, tokens(x), tokens(x)), IMAGE, [(N, 5, C)]),
    "a few whole queries with dropout": (few_queries, IMAGE, [(N, 5, C)]),
    "in windows larger than some tiles": (lambda x: in_windows(x, 4), IMAGE, []),
    "in windows with a mask each": (
        lambda x, b: in_windows(x, 4, b),
        IMAGE,
        [(N * 3, 1, 16, 16)],
    ),
    **{
        f"module, {first}, {weights}": module(first, weights)
        for first, weights in ((True, False), (False, True))
    },
    "a layer with dropout": (encoder(0.2), IMAGE, []),
    **{
        name: (operation, IMAGE, [])
        for name, operation in {
            "dropout": weighed(dropout_p=0.5),
            "dropout and a bias": weighed(dropout_p=0.3, attn_mask=half_seen() * 2.0, scale=0.3),
            "dropout, causal, shared heads": weighed(
                C // 2, dropout_p=0.3, is_causal=True, enable_gqa=True
            ),
            "dropout of all": weighed(dropout_p=1.0),
            "keys of some ranks": lambda x: attend(tokens(x), *2 * [tokens(F.max_pool2d(x, 4))]),
            "channels": of_channels(),
        }.items()
    },
    "recomputed": (recomputed, ODD, [(24, 8), (24,)]),
    "by einsum": (by_einsum, ODD, []),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


# --- keys come by part after part

SIZE = 1, 32, 20, 18
COUNT = 20 * 18


def fused(x: Tensor, **options: Any) -> Tensor:
    t = tokens(x)
    return sdpa(t, t.sin(), t, **options)


def folded(x: Tensor) -> Tensor:
    t = tokens(x)
    return sdpa(torch.ones(1, 4, 32, dtype=t.dtype, device=DEVICE), t.sin(), t)


def spelled_out(x: Tensor) -> Tensor:
    """Weights are held for the own queries; keys come by nevertheless."""
    t = tokens(x)
    return (t @ t.sin().transpose(1, 2)).softmax(-1) @ t


class Largest(TorchDispatchMode):
    """The most elements that an operator gave a tensor of memory of its own."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in _plain((args, kwargs))}
        for one in _plain(out):
            if one.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, one.numel())
        return out


class Most(TorchDispatchMode):
    """The most bytes that tensors made meanwhile had at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._now = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, SpatialTensor) for one in types):
            return NotImplemented  # what is done with its tile comes here again
        given = {one.untyped_storage()._cdata for one in _plain((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for one in _plain(out):
            if one.untyped_storage()._cdata not in given:
                self._born(one.untyped_storage())
        return out

    def _born(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def died(_: Any) -> None:
            self._now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, died)
        self._now += size
        self.bytes = max(self.bytes, self._now)


def _plain(values: Any) -> list[Tensor]:
    found = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return [
        one for one in found if not isinstance(one, SpatialTensor) and one.device.type != "meta"
    ]


def weights_of(channels: int) -> Tensor:
    return torch.ones(1, channels, 1, 1, dtype=torch.float64, device=DEVICE, requires_grad=True)


HELD: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "fused": (fused, SIZE),
    "dropped": (lambda x: fused(x, dropout_p=0.3), SIZE),
    "causal": (lambda x: fused(x, is_causal=True), SIZE),
    "folded": (folded, SIZE),
    "spelled out": (spelled_out, (1, 2048, 6, 5)),
}


@pytest.mark.parametrize("name", HELD)
def test_no_rank_holds_all_keys(name: str, meshes: dict) -> None:
    """Forward and backward; keys and values of a part are in one message."""
    attend, size = HELD[name]
    for mesh in meshes.values():
        if mesh.grid_comm.size < 3:
            continue
        whole = torch.rand(size, dtype=torch.float64).to(DEVICE)
        with Largest() as largest, keyed(1, 2):
            x, weight = shard(whole, mesh), weights_of(size[1])
            largest.elements = 0
            attend(x * weight).square().sum().backward()
        assert 0 < largest.elements < whole.numel()


@pytest.mark.world(2, 4)
def test_backward_holds_each_message_no_longer_than_it_needs_it(
    monkeypatch: pytest.MonkeyPatch, world: Communicator
) -> None:
    """Several were held at once, by names that nothing read any more, at the peak of a ViT's step.

    Of the size of the own queries: keys and values of a part 2, their gradients 2 and 2 that were
    added up before, gradients of the queries 2; of the projections and their gradients 3 each.
    """
    if DEVICE.type != "cpu":
        pytest.skip("scores of a block are larger than all messages where blocks are large")
    mesh = init_mesh((2, 1), data=world.size // 2)
    # packed pieces, which may be the fastest here, are copies
    monkeypatch.setattr(mesh.grid_comm, "strategy", "a message for each piece", raising=False)
    own = torch.rand(1, 32, 40, 40, dtype=torch.float64).to(DEVICE)
    x = shard(own, mesh)
    q, k, v = (tokens(x).detach().requires_grad_() for _ in range(3))
    y = sdpa(q, k, v)
    grad = y.detach().clone()
    with Most() as most:
        y.backward(grad)
    size = x.to_local().nbytes
    assert 0 < most.bytes < 9.5 * size, most.bytes / size


def test_each_rank_receives_every_key_of_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bytes are not possible: in backward once more, and as many gradients go back."""
    received, returned = [], []
    start = ring.start_exchange

    def counted(comm: Communicator, what: Exchange) -> Pending:
        (returned if what.adjoint else received).append(math.prod(what.plan.need.shape))
        return start(comm, what)

    monkeypatch.setattr(ring, "start_exchange", counted)
    for mesh in every_mesh(2).values():
        received.clear()
        returned.clear()
        x, weight = (
            shard(torch.rand(SIZE, dtype=torch.float64).to(DEVICE), mesh),
            weights_of(32),
        )
        out = fused(x * weight)
        own = x.to_local().numel() // 32
        least = 2 * 32 * (COUNT - own)
        assert (sum(received), sum(returned)) == (least, 0)
        out.square().sum().backward()
        assert (sum(received), sum(returned)) == (2 * least, least)


def test_parts_of_half_precision_are_added_up_in_float32() -> None:
    """In bfloat16 256 + 1 is 256, and would stay so however many parts came."""
    for mesh in every_mesh(2).values():
        image = torch.zeros(1, 1, 6, 7, dtype=torch.float64)
        for part, corner in enumerate(mesh.grid_comm.allgather(mesh.box((6, 7))[::2])):
            image[0, 0, corner[0], corner[1]] = 256 if part == 0 else 1
        values = image.flatten()
        weight = values[:, None].expand(42, 42)
        full = image.clone().requires_grad_()
        expected = F.linear(full.flatten(2), weight)
        expected.sum().backward()
        split = shard(image.bfloat16(), mesh).to(DEVICE).requires_grad_()
        y = F.linear(split.flatten(2), weight.bfloat16().to(DEVICE))
        y.sum().backward()
        assert full.grad is not None
        assert split.grad is not None
        for ours, right in ((y, expected), (split.grad, full.grad)):
            assert torch.equal(ours.detach().full_tensor().cpu(), right.detach().bfloat16())
