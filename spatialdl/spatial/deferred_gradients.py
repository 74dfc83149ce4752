"""Weight gradients that are computed after the gradients of activations.

Backward of a convolution or a linear layer computes two gradients, and only the optimizer waits for
that of the weight. While gradients are deferred, these layers store what they need for it in a
`DeferredGradients`, and autograd sees no gradient of the weight. Stored tensors are not copied;
writing into one of them before its gradient is computed raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class _Entry(NamedTuple):
    """How to work out one gradient of `weight`.

    Attributes:
        kept: what `compute` reads, with the version that each of them had.
    """

    weight: Tensor
    kept: list[tuple[Tensor, int]]
    compute: Callable[[], Tensor]


class DeferredGradients:
    """What the gradients of weights wait for; `add_all` works them out and lets go of it."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    @contextmanager
    def gather(self) -> Iterator[None]:
        """A context for a backward, of which the gradients of weights wait here."""
        around, _Gathering.now = _Gathering.now, self
        try:
            yield
        finally:
            _Gathering.now = around

    def leave(self, weight: Tensor, kept: Sequence[Tensor], compute: Callable[[], Tensor]) -> None:
        """Leave a gradient for later.

        Args:
            weight: for which `deferred` gave this object.
            kept: all that `compute` reads and others might write into.
            compute: works it out, without talking to other ranks.
        """
        self._entries.append(_Entry(weight, [(one, one._version) for one in kept], compute))

    def add_all(self) -> None:
        """Work out all gradients in the order in which they were left, and add them to ``.grad``.

        Raises:
            RuntimeError: if something that one of them is worked out from was written into.
        """
        entries, self._entries = self._entries[::-1], []
        while entries:
            weight, kept, compute = entries.pop()
            for one, version in kept:
                if one._version != version:
                    raise RuntimeError(
                        f"a tensor of {tuple(one.shape)} was written into after backward, but the "
                        f"gradient of a weight of {tuple(weight.shape)} is still to be worked out "
                        "from it: leave gradients and activations as they are, or take "
                        "parallel.schedule=1f1b"
                    )
            with torch.no_grad():
                grad = compute()
            # by autograd: in its memory format, and past the hooks of its own nodes
            torch.autograd.backward(weight, grad)


class _Gathering:
    """Of the process, not of a thread: on a GPU, backward runs in a thread of its own."""

    now: DeferredGradients | None = None


def can_be_deferred(weight: Tensor) -> bool:
    """Whether a weight gets its gradient by itself: it has no history, and nobody listens."""
    hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and weight.requires_grad and not hooked


def deferred(weight: Tensor) -> DeferredGradients | None:
    """Within a backward: where to leave the gradient of a weight; None if it is wanted now.

    Args:
        weight: as it was given to forward, not as it was saved: what is recomputed has copies.
    """
    if _Gathering.now is None or torch.is_grad_enabled() or not can_be_deferred(weight):
        return None  # with gradients enabled, somebody wants gradients of gradients
    return _Gathering.now
