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
    """One deferred gradient of `weight`.

    Attributes:
        kept: the tensors that `compute` reads, with their versions.
    """

    weight: Tensor
    kept: list[tuple[Tensor, int]]
    compute: Callable[[], Tensor]


class DeferredGradients:
    """A queue of deferred weight gradients, which `add_all` computes and releases."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    @contextmanager
    def gather(self) -> Iterator[None]:
        """The context of a backward whose weight gradients are deferred here."""
        around, _Gathering.now = _Gathering.now, self
        try:
            yield
        finally:
            _Gathering.now = around

    def leave(self, weight: Tensor, kept: Sequence[Tensor], compute: Callable[[], Tensor]) -> None:
        """Defer a gradient.

        Args:
            weight: the weight for which `deferred` returned this object.
            kept: the tensors that `compute` reads and that might be modified.
            compute: computes the gradient, without communication.
        """
        self._entries.append(_Entry(weight, [(one, one._version) for one in kept], compute))

    def add_all(self) -> None:
        """Compute all gradients in order of deferral, and accumulate them into ``.grad``.

        Raises:
            RuntimeError: a tensor needed for a gradient was modified in place.
        """
        entries, self._entries = self._entries[::-1], []
        while entries:
            weight, kept, compute = entries.pop()
            for one, version in kept:
                if one._version != version:
                    raise RuntimeError(
                        f"a tensor of {tuple(one.shape)} was modified by an inplace operation "
                        "after backward, but the deferred gradient of a weight of "
                        f"{tuple(weight.shape)} still needs it: do not modify gradients and "
                        "activations, or use parallel.schedule=1f1b"
                    )
            with torch.no_grad():
                grad = compute()
            # Accumulated by autograd, in its memory format and with the hooks of its nodes.
            torch.autograd.backward(weight, grad)


class _Gathering:
    """The active queue: per process, as backward on a GPU runs in another thread."""

    now: DeferredGradients | None = None


def can_be_deferred(weight: Tensor) -> bool:
    """Whether a weight's gradient can be deferred: a trained leaf without hooks."""
    hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and weight.requires_grad and not hooked


def deferred(weight: Tensor) -> DeferredGradients | None:
    """The queue for the gradient of a weight in this backward; None if not deferred.

    Args:
        weight: the argument of forward, not the saved tensor, which is a copy if recomputed.
    """
    if _Gathering.now is None or torch.is_grad_enabled() or not can_be_deferred(weight):
        return None  # gradients enabled in backward: higher-order gradients
    return _Gathering.now
