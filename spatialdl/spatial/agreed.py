"""Losses of ranks, compared by the gradient that comes back from them; unaveraged gradients.

What has lost its rows and columns all ranks have whole. What is nearest to the loss has the same
gradient on all of them too, if they have the same labels; it is the first that a backward reaches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from spatialdl.comm.agreement import Agreement
from spatialdl.comm.replay import replaying
from spatialdl.spatial.table import is_spatial


def watched(arguments: Any, result: Any, compares: bool = True) -> Any:
    """`result` of an operation on a split image, in a step that is compared.

    Args:
        arguments: of the operation.
        compares: whether all ranks have the same, if it is no split image.
    """
    flat = tree_leaves(arguments)
    mesh: Any = next((value.mesh for value in flat if is_spatial(value)), None)  # type: ignore[attr-defined]
    agreement: Agreement | None = mesh and mesh.agreement
    in_backward = replaying() or torch._C._current_graph_task_id() != -1  # what runs again
    if agreement is None or not agreement.compares or in_backward:
        return result
    if mesh.size > 1:  # or there is nobody to average with
        _note_parameters(flat, agreement.rank)
    for value in tree_leaves(result):
        is_whole = isinstance(value, Tensor) and not is_spatial(value)
        if is_whole and value.requires_grad and not value.is_leaf:
            _hook(value, agreement, compares)
    return result


def leave_alone(roots: Iterable[Any]) -> None:
    """Compare nothing in a backward that begins at split images."""
    for root in roots:
        if is_spatial(root):
            agreement = root.mesh.agreement  # type: ignore[attr-defined]
            runs = torch._C._current_graph_task_id() != -1
            if agreement is not None and agreement.compares and not runs:
                _hook(root, agreement, compares=False)  # type: ignore[arg-type]


def _hook(value: Tensor, agreement: Agreement, compares: bool) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        value.register_hook(lambda grad: agreement.gradient(grad, compares))  # type: ignore[no-untyped-call]


# --- gradients that were never averaged


class _Noted:
    unaveraged: Any = WeakIdKeyDictionary()
    """By parameter of a split operation, whether its gradient is one rank's own."""

    is_hooked = has_warned = False


def _note_parameters(arguments: Iterable[Any], rank: int) -> None:
    for value in arguments:
        is_trained = isinstance(value, nn.Parameter) and value.requires_grad
        if is_trained and not is_spatial(value) and value not in _Noted.unaveraged:
            _Noted.unaveraged[value] = False
            value.register_post_accumulate_grad_hook(_note_gradient)
    if not _Noted.is_hooked and rank == 0:  # one warning is enough
        _Noted.is_hooked = True
        register_optimizer_step_pre_hook(_look_before_step)
        register_optimizer_step_post_hook(_look_after_step)


def _note_gradient(parameter: Tensor) -> None:
    _Noted.unaveraged[parameter] = True


def note_averaged(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients of these parameters have been averaged."""
    for parameter in parameters:
        if _Noted.unaveraged.get(parameter):
            _Noted.unaveraged[parameter] = False


def _look_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _has_closure(args, kwargs):
        _look_at_gradients(optimizer)


def _look_after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """With a closure, as Lightning gives always, the last backward is part of the step."""
    if _has_closure(args, kwargs):
        _look_at_gradients(optimizer)


def _has_closure(args: Any, kwargs: Any) -> bool:
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _look_at_gradients(optimizer: Optimizer) -> None:
    if _Noted.has_warned:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and _Noted.unaveraged.get(parameter):
                _Noted.has_warned = True
                warnings.warn(
                    f"{type(optimizer).__name__} steps on gradients of a split image that were "
                    "never averaged over the ranks: call spatialdl.average_gradients(model, mesh) "
                    "after backward, or wrap the network in spatialdl.SpatialParallel",
                    stacklevel=3,
                )
                return
