"""Checks that ranks have equal losses, and that gradients were averaged.

A tensor without spatial dims is whole on all ranks. If the ranks have the same labels, the whole
tensor nearest to the loss, the first that a backward reaches, has the same gradient on all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from spatialdl.comm.agreement import Agreement
from spatialdl.comm.replay import replaying
from spatialdl.spatial.table import is_spatial
from spatialdl.torch_internals import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    tree_leaves,
)


def hook_result(arguments: Any, result: Any, compares: bool = True) -> Any:
    """Hook the result of an operation on a split image, in a step that is compared.

    Args:
        arguments: of the operation.
        compares: whether a result that is not split is equal on all ranks.
    """
    flat = tree_leaves(arguments)
    mesh: Any = next((value.mesh for value in flat if is_spatial(value)), None)  # type: ignore[attr-defined]
    agreement: Agreement | None = mesh and mesh.agreement
    in_backward = replaying() or current_graph_task_id() != -1  # recomputation
    if agreement is None or not agreement.compares or in_backward:
        return result
    if mesh.size > 1:  # else there is nothing to average
        _note_parameters(flat, agreement)
    for value in tree_leaves(result):
        is_whole = isinstance(value, Tensor) and not is_spatial(value)
        if is_whole and value.requires_grad and not value.is_leaf:
            _hook(value, agreement, compares)
    return result


def skip_comparison(roots: Iterable[Any]) -> None:
    """Disable the comparison in a backward that begins at split images."""
    for root in roots:
        if is_spatial(root):
            agreement = root.mesh.agreement  # type: ignore[attr-defined]
            runs = current_graph_task_id() != -1
            if agreement is not None and agreement.compares and not runs:
                _hook(root, agreement, compares=False)  # type: ignore[arg-type]


def _hook(value: Tensor, agreement: Agreement, compares: bool) -> None:
    with DisableTorchFunctionSubclass():
        value.register_hook(lambda grad: agreement.gradient(grad, compares))  # type: ignore[no-untyped-call]


# --- gradients that were not averaged


class _Gradients:
    agreements: Any = WeakIdKeyDictionary()
    """Of the meshes of images that met a parameter."""

    averaged: Any = WeakIdKeyDictionary()
    """Whether a parameter's gradient was averaged after it was accumulated."""

    is_hooked = has_warned = False


def _note_parameters(arguments: Iterable[Any], agreement: Agreement) -> None:
    for value in arguments:
        is_trained = isinstance(value, nn.Parameter) and value.requires_grad
        if is_trained and not is_spatial(value) and value not in _Gradients.agreements:
            _Gradients.agreements[value] = agreement
            value.register_post_accumulate_grad_hook(_note_gradient)
    if not _Gradients.is_hooked:
        _Gradients.is_hooked = True
        register_optimizer_step_post_hook(_look_at_gradients)


def _note_gradient(parameter: Tensor) -> None:
    _Gradients.averaged[parameter] = False


def note_averaged(parameters: Iterable[nn.Parameter]) -> None:
    """Record that the gradients of these parameters were averaged."""
    for parameter in parameters:
        _Gradients.averaged[parameter] = True


def _look_at_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Compare gradients that were not averaged, in an optimizer with parameters of split images.

    After a step, which may include the backward (always in Lightning). Others of its parameters
    need not meet split images, such as the weights of a loss.
    """
    if _Gradients.has_warned:
        return
    own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    met = (agreement for p in own if (agreement := _Gradients.agreements.get(p)) is not None)
    agreement, local = next(met, None), [p for p in own if not _Gradients.averaged.get(p)]
    if agreement is None or not local:
        return
    found = agreement.gradients(local)
    if found:
        _Gradients.has_warned = True
    if found and agreement.rank == 0:  # one warning is enough
        warnings.warn(
            f"{type(optimizer).__name__} steps on gradients that were never averaged over the "
            f"ranks: {found}; call spatialdl.average_gradients(module, mesh) after backward, or "
            "wrap the module in spatialdl.SpatialParallel, also a loss that has parameters",
            stacklevel=3,
        )
