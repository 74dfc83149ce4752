"""Ring attention: keys and values circulate, one part of the grid after the other.

After Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023,
https://arxiv.org/abs/2310.01889: queries stay, and no rank ever holds all keys. Partial results are
combined by log-sum-exp (Dao et al., "FlashAttention", 2022, section 3.1). Backward fetches keys and
values again and sends their gradients back. Each part is received directly from its owner, and the
transfer of the next part overlaps with the computation of the current one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.communicator import Pending
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.comm.repartition import add_up, rooms_back
from spatialdl.comm.replay import aside, once
from spatialdl.comm.single_process import Completed
from spatialdl.layout.layout import Box
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.blockwise import Scores, backward_block, combine_results, forward_block


class Ring(NamedTuple):
    """The distribution of the keys.

    Attributes:
        mesh: the ranks.
        counts: number of keys of each part.
    """

    mesh: Mesh
    counts: tuple[int, ...]

    def hop(self, number: int, elements: int) -> Plan:
        """The plan by which each rank receives the keys of the part `number` after its own.

        Args:
            elements: per token, in all samples and heads.
        """
        return _hop(self.counts, elements, number, self.mesh.part)

    def part(self, number: int) -> int:
        return (self.mesh.part + number) % len(self.counts)


@lru_cache(maxsize=4096)
def _hop(counts: tuple[int, ...], elements: int, number: int, part: int) -> Plan:
    edges = accumulate((count * elements for count in counts), initial=0)
    owned = tuple(Box(((0, 1), interval)) for interval in pairwise(edges))
    needed = tuple(owned[(rank + number) % len(owned)] for rank in range(len(owned)))
    return plan_for(owned, needed, part)


class _Packing(NamedTuple):
    """Packs keys (..., S, E) and values (..., S, F) of a part into a message (1, elements)."""

    keys: torch.Size
    values: torch.Size

    @property
    def elements(self) -> int:
        """Elements per key and value."""
        return (
            math.prod(self.keys[:-2]) * self.keys[-1]
            + math.prod(self.values[:-2]) * self.values[-1]
        )

    def pack_message(self, keys: Tensor, values: Tensor) -> Tensor:
        message = keys.new_empty(1, keys.numel() + values.numel())
        of_keys, of_values = self.unpack(message, keys.shape[-2])
        of_keys.copy_(keys)
        of_values.copy_(values)
        return message

    def unpack(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        of_keys = (*self.keys[:-2], count, self.keys[-1])
        size = math.prod(of_keys)
        of_values = (*self.values[:-2], count, self.values[-1])
        return message[0, :size].view(of_keys), message[0, size:].view(of_values)


def circulate(ring: Ring, own: Tensor, elements: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the messages of all parts and their distances, the own part first.

    No message is referenced here after it is yielded, so that the caller can free it.
    """
    hops = len(ring.counts)
    arriving: list[tuple[Tensor, Pending]] = [(own, Completed())]
    for number in range(hops):
        if number + 1 < hops:
            arriving.append(_start_receive(ring, number + 1, own, elements))
        else:
            del own  # the last pending exchange references it until it completes
        yield number, _wait_for_first(arriving)


def _start_receive(ring: Ring, number: int, own: Tensor, elements: int) -> tuple[Tensor, Pending]:
    """The buffer of the message of the part `number` after the own one, and its receive."""
    plan = ring.hop(number, elements)
    buffer = own.new_empty(plan.need.shape)
    exchange = Exchange(
        plan,
        [BoxedTensor(own, plan.own)],
        [BoxedTensor(buffer, plan.need)],
        own.device,
        name="attention",
    )
    return buffer, start_exchange(ring.mesh.grid_comm, exchange)


def _wait_for_first(arriving: list[tuple[Tensor, Pending]]) -> Tensor:
    message, pending = arriving.pop(0)
    pending.wait()
    return message


class GradientReturn:
    """Sends gradients of keys and values back to the owners of these."""

    def __init__(self, ring: Ring, elements: int) -> None:
        self._ring, self._elements = ring, elements
        self._total: Tensor | None = None
        self._under_way: tuple[Plan, list[BoxedTensor], Pending, Tensor] | None = None

    @property
    def total(self) -> Tensor:
        """The sum of the received gradients; float32 for half precision."""
        assert self._total is not None
        return self._total

    def send(self, number: int, grad: Tensor) -> None:
        """Send a gradient to the owner of the part `number` after the own one.

        The own part comes first.

        Args:
            grad: not used by the caller afterwards; the sum is accumulated in that of the own part.
        """
        if self._total is None:
            self._total = wide(grad)
            return
        plan = self._ring.hop(number, self._elements)
        rooms = rooms_back(grad, plan)
        held = [BoxedTensor(grad, plan.need)]
        exchange = Exchange(plan, held, rooms, grad.device, adjoint=True, name="attention")
        pending = start_exchange(self._ring.mesh.grid_comm, exchange)
        self.wait()
        self._under_way = plan, rooms, pending, grad

    def wait(self) -> None:
        if self._under_way is not None:
            plan, rooms, pending, _ = self._under_way
            pending.wait()
            add_up(self.total, plan, rooms)
            self._under_way = None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: Any
    ) -> Tensor:
        ring, scores = options
        ctx.ring, ctx.scores = ring, scores
        kept: list[Tensor] = []

        def attend() -> Tensor:
            with aside():  # a replay takes the result from the tape and receives no keys
                out, spread = _forward(ring, scores, query, key, value, bias)
            kept.append(spread)
            return out

        out = once(attend)
        spread = once(kept.pop)
        ctx.save_for_backward(query, key, value, bias, out, spread)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, spread = ctx.saved_tensors
        ring, scores = ctx.ring, ctx.scores
        pack = _Packing(key.shape, value.shape)
        returning = GradientReturn(ring, pack.elements)
        grad_query: Tensor | None = None
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[3]:
            grad_bias = torch.zeros_like(bias)
        options = grad, out, spread
        for number, message in circulate(ring, pack.pack_message(key, value), pack.elements):
            part = ring.part(number)
            keys, values = pack.unpack(message, ring.counts[part])
            grads = backward_block(scores.of(part), query, keys, values, bias, options, grad_bias)
            del message, keys, values  # else memory peaks here in backward's first layers
            of_query, returned = wide(grads[0]), pack.pack_message(*grads[1:])
            del grads
            grad_query = of_query if grad_query is None else grad_query.add_(of_query)
            returning.send(number, returned)
            del returned
        assert grad_query is not None
        returning.wait()
        total = returning.total.to(key.dtype)
        grad_key, grad_value = pack.unpack(total, ring.counts[ring.mesh.part])
        return grad_query.to(query.dtype), grad_key, grad_value, grad_bias, None


def _forward(
    ring: Ring, scores: Scores, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    pack = _Packing(key.shape, value.shape)
    result: tuple[Tensor, Tensor] | None = None
    for number, message in circulate(ring, pack.pack_message(key, value), pack.elements):
        part = ring.part(number)
        keys, values = pack.unpack(message, ring.counts[part])
        result = combine_results(result, forward_block(scores.of(part), query, keys, values, bias))
    assert result is not None
    out, spread = result
    return out.to(query.dtype), spread


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    ring: Ring,
    scores: Scores,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks; differentiable.

    Args:
        query: (..., l, E), this rank's.
        key, value: (..., s, E) and (..., s, F), this rank's; leading dims as those of `query`,
            except for shared heads.
        bias: (..., l or 1, S or 1) in the global order of keys, added to the products; or None.
        ring: the distribution of the keys.
        scores: the processing of the products.

    Returns:
        (..., l, F).
    """
    options = ring, scores
    out: Tensor = _RingAttention.apply(query, key, value, bias, options)  # type: ignore[no-untyped-call]
    return out


# --- few queries, equal on all ranks


class _FoldedAttention(torch.autograd.Function):
    """Attention to each rank's own keys, with the results combined over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: Any
    ) -> Tensor:
        mesh, scores = options
        ctx.options = options
        out, spread = forward_block(scores.of(mesh.part), query, key, value, bias)
        own = torch.cat([out, spread.unsqueeze(-1)], -1)
        result: tuple[Tensor, Tensor] | None = None
        for part in gather_over_ranks(mesh.grid_comm, own, "attention"):
            result = combine_results(result, (part[..., :-1], part[..., -1]))
        assert result is not None
        out, spread = result[0].to(query.dtype), result[1]
        ctx.save_for_backward(query, key, value, bias, out, spread)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, spread = ctx.saved_tensors
        mesh, scores = ctx.options
        grad = sum_over_ranks(mesh.grid_comm, grad, "attention backward")
        learns = bias is not None and ctx.needs_input_grad[3]
        grad_bias = torch.zeros_like(bias) if learns else None
        options = grad, out, spread
        grads = backward_block(scores.of(mesh.part), query, key, value, bias, options, grad_bias)
        return *grads, grad_bias, None


def folded_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mesh: Mesh, scores: Scores
) -> Tensor:
    """Attention of replicated queries over the keys of all ranks; differentiable.

    Args:
        query: (..., L, E), the same on every rank.
        key, value, bias, scores: as for `ring_attention`.

    Returns:
        (..., L, F), the same on every rank.
    """
    options = mesh, scores
    out: Tensor = _FoldedAttention.apply(query, key, value, bias, options)  # type: ignore[no-untyped-call]
    return out
