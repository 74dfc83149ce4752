"""Losses on dense outputs, equal to those of the whole image.

Numerators and denominators are summed over the ranks in float64, so that tiles of different sizes
are weighted correctly. Without a reduction the losses of the pixels are split as the image is. The
functions of ``torch.nn.functional`` are written in Python; the functions that they call are
registered here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.parallel.layout import image_shape
from spatialdl.random.composite import inside
from spatialdl.spatial.autocast import HALF
from spatialdl.spatial.operands import lift, on_one_layout, own_box_of
from spatialdl.spatial.span import on_meta, split_dims, without_dims
from spatialdl.spatial.table import spatial_in
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile
from spatialdl.torch_internals import nn_functions

Function = Callable[..., Any]
_NONE, _MEAN, _SUM = 0, 1, 2  # PyTorch's numbers for reductions


def _added_up(function: Function, tile: Tensor, *others: Any) -> tuple[Tensor, torch.dtype]:
    """The sum of a loss over this tile in float64, and its dtype in PyTorch.

    The dtype may depend on autocast. `function` takes the reduction as its last argument.
    """
    if tile.dtype in HALF:  # a sum may overflow half precision
        pixels: Tensor = function(tile, *others, _NONE)
        return pixels.sum(dtype=torch.float64), pixels.dtype
    total: Tensor = function(tile, *others, _SUM)
    return total.double(), total.dtype


def _over_ranks(mesh: Mesh, total: Tensor, weight: Tensor | float, name: str) -> Tensor:
    """The quotient of the sums over all ranks of `total` and `weight`."""
    if not isinstance(weight, Tensor):
        return differentiable_sum(mesh.grid_comm, total, name) / weight
    both = differentiable_sum(mesh.grid_comm, torch.stack([total, weight.double()]), name)
    return both[0] / both[1]


# --- pixel by pixel


def _pixelwise(func: Function, operands: list[Any], reduction: int, *options: Any) -> Tensor:
    """A loss of tensors that broadcast to one image; `options` follow the reduction."""
    on_meta(func, *operands, reduction, *options)  # raises PyTorch's errors on all ranks
    (lifted, _) = on_one_layout(func, operands, {})
    first = next(x for x in lifted if isinstance(x, SpatialTensor))
    tiles = [to_tile(x) if isinstance(x, SpatialTensor) else x for x in lifted]
    if reduction == _NONE:
        return without_dims(first, func(*tiles, reduction, *options), ())

    def called(*arguments: Any) -> Tensor:
        pixels: Tensor = func(*arguments, *options)
        return pixels

    total, dtype = _added_up(called, tiles[0], *tiles[1:])
    count = first.numel() if reduction == _MEAN else 1
    return _over_ranks(first.mesh, total, count, func.__name__).to(dtype)


@register_op(nn_functions.mse_loss)
def mse_loss(input: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    return _pixelwise(nn_functions.mse_loss, [input, target], reduction)


@register_op(nn_functions.l1_loss)
def l1_loss(input: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    return _pixelwise(nn_functions.l1_loss, [input, target], reduction)


@register_op(nn_functions.soft_margin_loss)
def soft_margin_loss(input: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    return _pixelwise(nn_functions.soft_margin_loss, [input, target], reduction)


@register_op(nn_functions.smooth_l1_loss)
def smooth_l1_loss(
    input: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0
) -> Tensor:
    return _pixelwise(nn_functions.smooth_l1_loss, [input, target], reduction, beta)


@register_op(nn_functions.huber_loss)
def huber_loss(input: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    return _pixelwise(nn_functions.huber_loss, [input, target], reduction, delta)


@register_op(nn_functions.binary_cross_entropy)
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    return _pixelwise(nn_functions.binary_cross_entropy, [input, target, weight], reduction)


@register_op(torch.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    operands = [input, target, weight, pos_weight]
    return _pixelwise(torch.binary_cross_entropy_with_logits, operands, reduction)


@register_op(torch.kl_div)
def kl_div(
    input: Tensor, target: Tensor, reduction: int = _MEAN, log_target: bool = False
) -> Tensor:
    def divergence(input: Tensor, target: Tensor, reduction: int) -> Tensor:
        return torch.kl_div(input, target, reduction, log_target=log_target)

    return _pixelwise(divergence, [input, target], reduction)


@register_op(torch.poisson_nll_loss)
def poisson_nll_loss(
    input: Tensor, target: Tensor, log_input: bool, full: bool, eps: float, reduction: int
) -> Tensor:
    def likelihood(input: Tensor, target: Tensor, reduction: int) -> Tensor:
        return torch.poisson_nll_loss(input, target, log_input, full, eps, reduction)

    return _pixelwise(likelihood, [input, target], reduction)


@register_op(torch.hinge_embedding_loss)
def hinge_embedding_loss(
    input: Tensor, target: Tensor, margin: float = 1.0, reduction: int = _MEAN
) -> Tensor:
    def hinge(input: Tensor, target: Tensor, reduction: int) -> Tensor:
        return torch.hinge_embedding_loss(input, target, margin, reduction)

    return _pixelwise(hinge, [input, target], reduction)


@register_op(torch.margin_ranking_loss)
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _MEAN
) -> Tensor:
    def ranking(input1: Tensor, input2: Tensor, target: Tensor, reduction: int) -> Tensor:
        return torch.margin_ranking_loss(input1, input2, target, margin, reduction)

    return _pixelwise(ranking, [input1, input2, target], reduction)


@register_op(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        tensors = tuple(tensors[0])
    lifted: tuple[Tensor, ...] = tuple(on_one_layout(torch.broadcast_tensors, list(tensors), {})[0])
    return lifted


@register_op(F.l1_loss)
def weighted_l1_loss(*args: Any, **kwargs: Any) -> Tensor:
    """Read the weight from the caller's frame: PyTorch does not pass it to handlers."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    if frame.f_code is F.l1_loss.__code__:
        kwargs.setdefault("weight", frame.f_locals.get("weight"))
    function = inside(F.l1_loss)
    assert function is not None
    loss: Tensor = function(*args, **kwargs)
    return loss


# --- over classes


def _class_map(func: Function, logits: SpatialTensor, target: Tensor) -> Tensor:
    """The tile of a target: classes (N, H, W), or probabilities with the logits' shape."""
    if target.shape == logits.shape:
        lifted = lift(func, target, logits, logits.shape)
    else:
        template = without_dims(logits, to_tile(logits).detach().select(1, 0).clone(), (1,))
        lifted = lift(func, target, template, template.shape)
    return to_tile(lifted)  # type: ignore[arg-type]


def split_as_target(func: Function, input: Tensor, target: SpatialTensor) -> SpatialTensor:
    """Whole logits, the same on every rank of the grid, split as their target is.

    Each rank takes its own box. In backward the gradient of the whole tensor is 0 outside of this
    box. Its sum over the ranks is the gradient of the loss times the number of ranks, as for any
    other tensor.

    Args:
        input: (N, C, *spatial).
        target: (N, *spatial), or as `input`.
    """
    like = target if target.shape == input.shape else target.unsqueeze(1)
    return own_box_of(func, input, like, input.shape)  # type: ignore[arg-type]


def _check_classes(func: Function, input: SpatialTensor) -> None:
    if input.dim() < 2 or 1 in split_dims(input):
        shape = image_shape(len(input.mesh.grid))
        raise refusal(func, [input], f"it takes {shape}, with the classes in dim 1")


def _weight_of_classes(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The total class weight of the pixels of this tile."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum(dtype=torch.float64)
    return weight[target.where(counts, 0)].where(counts, 0).sum(dtype=torch.float64)


def _over_classes(
    func: Function,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    *options: Any,
) -> Tensor:
    if isinstance(input, SpatialTensor):
        _check_classes(func, input)
    on_meta(func, input, target, weight, reduction, ignore_index, *options)
    if not isinstance(input, SpatialTensor):
        if not isinstance(target, SpatialTensor):
            raise refusal(func, spatial_in([weight]), "its class weights must not be split")
        input = split_as_target(func, input, target)
    tile, classes = to_tile(input), _class_map(func, input, target)
    if reduction == _NONE:
        pixels = func(tile, classes, weight, _NONE, ignore_index, *options)
        return without_dims(input, pixels, (1,))

    def called(tile: Tensor, reduction: int) -> Tensor:
        loss: Tensor = func(tile, classes, weight, reduction, ignore_index, *options)
        return loss

    total, dtype = _added_up(called, tile)
    whole: Tensor | float = 1.0
    if reduction == _MEAN and target.shape == input.shape:
        whole = input.numel() / input.shape[1]
    elif reduction == _MEAN:
        whole = _weight_of_classes(classes, weight, ignore_index)
    return _over_ranks(input.mesh, total, whole, func.__name__).to(dtype)


@register_op(nn_functions.cross_entropy_loss)
def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    return _over_classes(
        nn_functions.cross_entropy_loss,
        input,
        target,
        weight,
        reduction,
        ignore_index,
        label_smoothing,
    )


@register_op(nn_functions.nll_loss_nd)
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> Tensor:
    return _over_classes(nn_functions.nll_loss_nd, input, target, weight, reduction, ignore_index)
