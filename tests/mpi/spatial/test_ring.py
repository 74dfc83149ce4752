"""Attention whose keys come by part after part: memory, recomputation, uneven parts."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spatialdl import Mesh, SpatialTensor, init_mesh, shard
from spatialdl.comm.boxed import Exchange
from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.random import keyed
from spatialdl.spatial import ring
from spatialdl.spatial.recompute import recompute
from tests.mpi.device import DEVICE
from tests.mpi.equality import check, every_mesh, parameter

N, C, H, W = 1, 32, 20, 18
COUNT = H * W
Meshes = dict[tuple[int, ...], Mesh]


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def fused(x: Tensor) -> Tensor:
    t = tokens(x)
    return F.scaled_dot_product_attention(t, t.sin(), t)


def dropped(x: Tensor) -> Tensor:
    t = tokens(x)
    return F.scaled_dot_product_attention(t, t.sin(), t, dropout_p=0.3)


def causal(x: Tensor) -> Tensor:
    t = tokens(x)
    return F.scaled_dot_product_attention(t, t.sin(), t, is_causal=True)


def folded(x: Tensor) -> Tensor:
    t = tokens(x)
    queries = torch.ones(N, 4, C, dtype=t.dtype, device=DEVICE)
    return F.scaled_dot_product_attention(queries, t.sin(), t)


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


@pytest.mark.parametrize("attend", [fused, dropped, causal, folded])
def test_no_rank_holds_all_keys(attend: Callable[[Tensor], Tensor]) -> None:
    """Forward and backward; keys and values of a part are in one message."""
    for mesh in every_mesh(2).values():
        if mesh.grid_comm.size < 3:
            continue
        tile = torch.rand(N, C, H, W, dtype=torch.float64).to(DEVICE)
        with Largest() as largest, keyed(1, 2):
            x, weight = shard(tile, mesh), weights_of(C)
            largest.elements = 0
            attend(x * weight).square().sum().backward()
        assert 0 < largest.elements < N * COUNT * C


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
    own = torch.rand(N, C, 40, 40, dtype=torch.float64).to(DEVICE)
    x = shard(own, mesh)
    q, k, v = (tokens(x).detach().requires_grad_() for _ in range(3))
    y = F.scaled_dot_product_attention(q, k, v)
    grad = y.detach().clone()
    with Most() as most:
        y.backward(grad)
    size = x.to_local().nbytes
    assert 0 < most.bytes < 9.5 * size, most.bytes / size


def test_each_rank_receives_every_key_of_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bytes are not possible: in backward once more, and as many gradients go back."""
    received, returned = [], []
    start = ring.start_exchange

    def counted(comm: Communicator, what: Exchange, name: str) -> Pending:
        (returned if what.adjoint else received).append(math.prod(what.plan.need.shape))
        return start(comm, what, name)

    monkeypatch.setattr(ring, "start_exchange", counted)
    for mesh in every_mesh(2).values():
        received.clear()
        returned.clear()
        x, weight = (
            shard(torch.rand(N, C, H, W, dtype=torch.float64).to(DEVICE), mesh),
            weights_of(C),
        )
        out = fused(x * weight)
        own = x.to_local().numel() // (N * C)
        least = N * 2 * C * (COUNT - own)
        assert (sum(received), sum(returned)) == (least, 0)
        out.square().sum().backward()
        assert (sum(received), sum(returned)) == (2 * least, least)


def attention(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    q, k, v = F.linear(x, weight, bias).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)


def test_the_second_run_of_a_block_takes_the_result_from_the_first() -> None:
    def network(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with keyed(1, 2):
            y: Tensor = recompute(attention, tokens(x), weight, bias, modules=[])
        return y

    draw = random.Random(9)
    values = [parameter(draw, 24, 8), parameter(draw, 24)]
    for mesh in every_mesh(2).values():
        check(network, parameter(draw, 2, 8, 7, 5), values, mesh, f"on {mesh.grid} ")


def test_spelled_out_by_einsum(meshes: Meshes) -> None:
    def network(x: Tensor) -> Tensor:
        t = tokens(x)
        weights = torch.einsum("nlc,nsc->nls", t, t.sin()).softmax(-1)
        return torch.einsum("nls,nsc->nlc", weights, t.cos())

    for mesh in meshes.values():
        check(network, parameter(random.Random(9), 2, 8, 7, 5), [], mesh, f"on {mesh.grid} ")


def test_products_of_all_pairs_hold_no_part_of_others_twice() -> None:
    """Spelled out, weights are held for the own queries; keys come by nevertheless."""
    for mesh in every_mesh(2).values():
        if mesh.grid_comm.size < 3:
            continue
        wide = torch.rand(N, 2048, 6, 5, dtype=torch.float64).to(DEVICE)
        with Largest() as largest:
            x, weight = shard(wide, mesh), weights_of(2048)
            largest.elements = 0
            t = tokens(x * weight)
            ((t @ t.sin().transpose(1, 2)).softmax(-1) @ t).square().sum().backward()
        assert 0 < largest.elements < N * 30 * 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_of_the_device_give_parts_that_can_be_put_together(dtype: torch.dtype) -> None:
    """Fused kernels of accelerators take no float64, in which all else here is compared."""
    for mesh in every_mesh(2).values():
        full = torch.rand(2, 32, 7, 9, generator=torch.Generator().manual_seed(3)) - 0.5
        expected = fused(full.double().requires_grad_())
        with torch.no_grad():
            ours = fused(shard(full.to(DEVICE, dtype), mesh)).full_tensor()
        x = full.to(DEVICE, dtype)
        split = shard(x, mesh).requires_grad_()
        fused(split).float().square().mean().backward()
        plain = full.double().requires_grad_()
        fused(plain).square().mean().backward()
        assert split.grad is not None
        assert plain.grad is not None
        for found, right in ((ours, expected), (split.grad.full_tensor(), plain.grad)):
            close = 1e-5 if dtype == torch.float32 else 2e-2
            error = (found.double().cpu() - right.detach()).norm() / right.detach().norm()
            assert error < close, f"on {mesh.grid}: {error}"


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
