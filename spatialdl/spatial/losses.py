"""Losses on dense outputs, equal to those of the whole image.

Numerators and denominators are summed over the ranks in float64, so that tiles of different sizes
are weighted correctly. Without a reduction the losses of the pixels are split as the image is. The
functions of ``torch.nn.functional`` are written in Python; the functions that they call are
registered here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.layout.layout import image_shape
from spatialdl.spatial.autocast import HALF
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.operands import lift, on_one_layout, own_box_of
from spatialdl.spatial.random.composite import by_name, inside
from spatialdl.spatial.span import split_dims, without_dims
from spatialdl.spatial.table import spatial_in
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile
from spatialdl.torch_internals import nn_functions

Function = Callable[..., Any]
_NONE, _MEAN, _SUM = 0, 1, 2  # PyTorch's numbers for reductions


def _sum_loss(function: Function, tile: Tensor, *others: Any) -> tuple[Tensor, torch.dtype]:
    """The sum of a loss over this tile in float64, and its dtype in PyTorch.

    The dtype may depend on autocast. `function` takes the reduction as its last argument.
    """
    if tile.dtype in HALF:  # a sum may overflow half precision
        pixels: Tensor = function(tile, *others, _NONE)
        return pixels.sum(dtype=torch.float64), pixels.dtype
    total: Tensor = function(tile, *others, _SUM)
    return total.double(), total.dtype


def _divide_sums(mesh: Mesh, total: Tensor, weight: Tensor | float, name: str) -> Tensor:
    """The quotient of the sums over all ranks of `total` and `weight`."""
    if not isinstance(weight, Tensor):
        return differentiable_sum(mesh.grid_comm, total, name) / weight
    both = differentiable_sum(mesh.grid_comm, torch.stack([total, weight.double()]), name)
    return both[0] / both[1]


# --- pixel by pixel


_PIXELWISE: dict[Function, str] = {
    nn_functions.mse_loss: "input target reduction",
    nn_functions.l1_loss: "input target reduction",
    nn_functions.soft_margin_loss: "input target reduction",
    nn_functions.smooth_l1_loss: "input target reduction beta",
    nn_functions.huber_loss: "input target reduction delta",
    nn_functions.binary_cross_entropy: "input target weight reduction",
    torch.binary_cross_entropy_with_logits: "input target weight pos_weight reduction",
    torch.kl_div: "input target reduction log_target",
    torch.poisson_nll_loss: "input target log_input full eps reduction",
    torch.hinge_embedding_loss: "input target margin reduction",
    torch.margin_ranking_loss: "input1 input2 target margin reduction",
}
"""The parameters of losses of tensors that broadcast to one image."""
_TENSORS = ("input", "target", "weight", "pos_weight", "input1", "input2")


def _register_pixelwise(func: Function, names: Sequence[str]) -> None:
    @register_op(func)
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        given = by_name(names, args, kwargs)
        reduction = given.pop("reduction", _MEAN)
        tensors = {name: given.pop(name) for name in _TENSORS if name in given}

        def call(*arguments: Any) -> Tensor:
            *operands, reduction = arguments
            by_name = {**dict(zip(tensors, operands, strict=True)), **given}
            pixels: Tensor = func(**by_name, reduction=reduction)
            return pixels

        meta_result(call, *tensors.values(), reduction)  # raises PyTorch's errors on all ranks
        (lifted, _) = on_one_layout(func, list(tensors.values()), {})
        first = next(x for x in lifted if isinstance(x, SpatialTensor))
        tiles = [to_tile(x) if isinstance(x, SpatialTensor) else x for x in lifted]
        if reduction == _NONE:
            return without_dims(first, call(*tiles, _NONE), ())
        total, dtype = _sum_loss(call, *tiles)
        count = first.numel() if reduction == _MEAN else 1
        return _divide_sums(first.mesh, total, count, func.__name__).to(dtype)


for _func, _names in _PIXELWISE.items():
    _register_pixelwise(_func, _names.split())


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
    meta_result(func, input, target, weight, reduction, ignore_index, *options)
    if not isinstance(input, SpatialTensor):
        if not isinstance(target, SpatialTensor):
            raise refusal(func, spatial_in([weight]), "its class weights must not be split")
        input = split_as_target(func, input, target)
    tile, classes = to_tile(input), _class_map(func, input, target)
    if reduction == _NONE:
        pixels = func(tile, classes, weight, _NONE, ignore_index, *options)
        return without_dims(input, pixels, (1,))

    def call(tile: Tensor, reduction: int) -> Tensor:
        loss: Tensor = func(tile, classes, weight, reduction, ignore_index, *options)
        return loss

    total, dtype = _sum_loss(call, tile)
    whole: Tensor | float = 1.0
    if reduction == _MEAN and target.shape == input.shape:
        whole = input.numel() / input.shape[1]
    elif reduction == _MEAN:
        whole = _weight_of_classes(classes, weight, ignore_index)
    return _divide_sums(input.mesh, total, whole, func.__name__).to(dtype)


def _register_over_classes(func: Function) -> None:
    @register_op(func)
    def loss(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = _MEAN,
        ignore_index: int = -100,
        *options: float,
    ) -> Tensor:
        return _over_classes(func, input, target, weight, reduction, ignore_index, *options)


_register_over_classes(nn_functions.cross_entropy_loss)  # its option: label_smoothing
_register_over_classes(nn_functions.nll_loss_nd)
