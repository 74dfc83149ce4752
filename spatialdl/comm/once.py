"""`once_differentiable`: backward without second derivatives, stricter than PyTorch's decorator."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

from spatialdl.errors import UnsupportedSpatialOp

Context = TypeVar("Context")
Grads = ParamSpec("Grads")
Result = TypeVar("Result")


def once_differentiable(
    backward: Callable[Concatenate[Context, Grads], Result],
) -> Callable[Concatenate[Context, Grads], Result]:
    """Reject ``create_graph=True`` in the `backward` of an `autograd.Function`.

    PyTorch's decorator of this name raises only if an incoming gradient is differentiable itself.
    The first gradient of ``y.sum()`` is not: there the backward of a convolution counts as
    constant, and a gradient penalty loses its derivative without an error.

    Raises:
        UnsupportedSpatialOp: if backward records a graph.
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", backward.__qualname__.split(".")[-2])
    operation = words.strip("_").lower()

    @functools.wraps(backward)
    def once(ctx: Context, /, *grads: Grads.args, **named: Grads.kwargs) -> Result:
        if torch.is_grad_enabled():
            raise UnsupportedSpatialOp(
                f"backward of {operation} with create_graph=True is not supported on a split "
                "image: there are no second derivatives; omit create_graph, or compute what needs "
                "them, such as a gradient penalty, on whole images as plain tensors "
                "(parallel=none)"
            )
        return backward(ctx, *grads, **named)

    return once
