"""Cutting a network into stages.

A network can be cut where its forward is a chain: nested ``nn.Sequential`` without a forward of
their own. State-dict names do not change by cutting.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from spatialdl.random import scope
from spatialdl.spatial.recompute import (
    WEIGHTS,
    Recomputed,
    recompute,
    recompute_blocks,
    weight_layers,
)

OPERATIONS_PER_ELEMENT = 20
"""What a memory-bound operation costs per element of its output, in multiply-adds."""

Layer = tuple[str, nn.Module]


class Stage(nn.Module):
    """Consecutive layers of a network, under the names that they have in it.

    Each layer draws random numbers by its name, so that they are the same in every stage.

    Attributes:
        recompute: whether loose layers run again in backward, see `pieces`.
    """

    def __init__(self, layers: Sequence[Layer], recompute: bool = False) -> None:
        super().__init__()
        self.paths = [path for path, _ in layers]
        self.recompute = recompute
        for path, layer in layers:
            *parents, name = path.split(".")
            holder: nn.Module = self
            for parent in parents:
                if not hasattr(holder, parent):
                    holder.add_module(parent, nn.Module())
                holder = getattr(holder, parent)
            holder.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        layers = [(path, self.get_submodule(path)) for path in self.paths]
        if not self.recompute:
            return _run(layers, x)
        for piece in pieces(layers):
            modules = [layer for _, layer in piece]
            saves = len(piece) > 1 or weight_layers(modules[0]) >= WEIGHTS
            again = saves and not isinstance(modules[0], Recomputed)
            x = recompute(_run, piece, x, modules=modules) if again else _run(piece, x)
        return x


def _run(layers: Sequence[Layer], x: Tensor) -> Tensor:
    for path, layer in layers:
        with scope(path):
            x = layer(x)
    return x


def pieces(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Layers of a chain in pieces that run again in backward together; or alone, as they are.

    A piece begins at a convolution or linear layer, so that its input is not written into, and
    holds two of them and what follows them. Blocks, which run again by themselves, stay alone.
    """
    found: list[list[Layer]] = []
    weights = WEIGHTS  # of the piece at the end of `found`
    for path, layer in layers:
        own = weight_layers(layer)
        is_block = isinstance(layer, Recomputed)
        begins = own > 0 and weights + own > WEIGHTS
        if is_block or begins or not found or weights == 0:
            found.append([(path, layer)])
            weights = 0 if is_block else own
        else:
            found[-1].append((path, layer))
            weights += own
    return found


def chain(model: nn.Module, prefix: str = "") -> list[Layer]:
    """The layers of a network in the order in which it calls them, as fine as it can be cut."""
    if not _only_calls_its_layers(model):
        return [(prefix, model)]
    layers: list[Layer] = []
    for name, child in model._modules.items():  # named_children leaves out what comes twice
        if child is not None:
            layers += chain(child, f"{prefix}.{name}" if prefix else name)
    return layers


def _only_calls_its_layers(model: nn.Module) -> bool:
    """A stage calls the layers alone: hooks and weights of what held them would be lost."""
    before = model._forward_pre_hooks or model._backward_pre_hooks
    after = model._forward_hooks or model._backward_hooks
    own = before or after or model._parameters or model._buffers
    return type(model).forward is nn.Sequential.forward and not own


def cut(
    model: nn.Module,
    widths: Sequence[int],
    names: Sequence[str] | None = None,
    input_shape: tuple[int, ...] = (1, 3, 224, 224),
    recompute: bool = False,
) -> list[nn.Module]:
    """Cut `model` into as many stages as there are `widths`.

    Args:
        model: a chain of layers; with one stage, any network.
        widths: ranks of each stage, between which its work is divided.
        names: layers with which the second and later stages begin; if not given, the cut that
            makes the slowest stage fastest, by operation counts at `input_shape`.
        input_shape: (N, C, H, W).
        recompute: whether blocks, and the loose layers of a chain, run again in backward.

    Raises:
        ValueError: if the network cannot be cut so, or has no blocks to recompute.
    """
    blocks = recompute_blocks(model) if recompute else []
    layers = chain(model)
    if len(widths) == 1:
        if recompute and len(layers) == 1 and not blocks:
            raise _no_blocks(model)
        if not layers or layers[0][0] == "":
            return [model]
        return [Stage(layers, recompute and len(layers) > 1)]
    if len(layers) < len(widths):
        raise ValueError(
            f"{type(model).__name__} cannot be cut into {len(widths)} stages: its forward is no "
            f"chain of nn.Sequential with as many layers (found {len(layers)}); write it as "
            "nn.Sequential, use fewer stages, or take parallel=sp or dp, which cut no network"
        )
    if names is not None:
        names = [names] if isinstance(names, str) else [str(name) for name in names]
    if names:
        bounds = _named_bounds(layers, names, len(widths))
    else:
        bounds = balance(layer_costs(model, layers, input_shape), widths)
    stages = [layers[start:stop] for start, stop in pairwise(bounds)]
    _refuse_shared(stages)
    return [Stage(stage, recompute) for stage in stages]


def _no_blocks(model: nn.Module) -> ValueError:
    return ValueError(
        f"parallel.recompute=block finds no blocks in {type(model).__name__}: blocks are the "
        "elements of an nn.Sequential or nn.ModuleList whose class comes there twice or more, "
        "with at least two convolutions or linear layers each; leave it out, or call "
        "torch.utils.checkpoint in the network"
    )


def _refuse_shared(stages: Sequence[Sequence[Layer]]) -> None:
    """A weight in two stages would be trained apart in each of them."""
    owner: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for path, layer in stage:
            for parameter in layer.parameters():
                first, where = owner.setdefault(id(parameter), (number, path))
                if first != number:
                    raise ValueError(
                        f"layers '{where}' and '{path}' share a weight, but lie in stages {first} "
                        f"and {number}: choose parallel.cut so that one stage holds both"
                    )


def _named_bounds(layers: Sequence[Layer], names: Sequence[str], stages: int) -> list[int]:
    if len(names) != stages - 1:
        raise ValueError(
            f"parallel.cut names {len(names)} places ({', '.join(names)}), but {stages} stages "
            f"need {stages - 1}"
        )
    paths = [path for path, _ in layers]
    bounds = [0]
    for name in names:
        found = [i for i, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
        if not found:
            raise ValueError(
                f"parallel.cut: the network has no layer '{name}'; it can be cut before "
                f"{', '.join(paths[1:])}"
            )
        bounds.append(found[0])
    bounds.append(len(layers))
    if any(stop <= start for start, stop in pairwise(bounds)):
        raise ValueError(
            f"parallel.cut={list(names)} leaves a stage without layers: name places in the order "
            f"of the network, none of them its first layer '{paths[0]}'"
        )
    return bounds


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy without memory, to find out shapes and costs; in evaluation, which takes any batch."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    shadow = copy.deepcopy(model, memo).eval()
    for layer in shadow.modules():
        if isinstance(layer, _BatchNorm) and layer.momentum is None:
            layer.momentum = 0.1  # a cumulative average would read a counter that has no value
    return shadow


def layer_costs(
    model: nn.Module, layers: Sequence[Layer], input_shape: tuple[int, ...]
) -> list[float]:
    """An estimate of each layer's time: operations counted on the meta device."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x: object = torch.empty(input_shape, dtype=dtype, device="meta")
    costs = []
    with torch.no_grad(), torch.device("meta"):  # where layers make tensors of their own, too
        for _, layer in layers:
            with FlopCounterMode(display=False) as counter:
                x = meta_copy(layer)(x)
            given = x if isinstance(x, tuple) else (x,)
            elements = sum(one.numel() for one in given if isinstance(one, Tensor))
            costs.append(counter.get_total_flops() / 2 + OPERATIONS_PER_ELEMENT * elements)
    return costs


def balance(costs: Sequence[float], widths: Sequence[int]) -> list[int]:
    """Cut a chain so that the largest ``cost / width`` of a stage is smallest; exact.

    Returns:
        Bounds: stage s has the layers ``[bounds[s], bounds[s + 1])``, at least one.
    """
    sums = [0.0, *accumulate(costs)]
    layers = len(costs)

    @cache
    def best(stage: int, stop: int) -> tuple[float, tuple[int, ...]]:
        """Slowest stage, and bounds, of the first `stage` + 1 stages over `stop` layers."""
        if stage == 0:
            return sums[stop] / widths[0], (0, stop)
        options = []
        for start in range(stage, stop):
            slowest, bounds = best(stage - 1, start)
            own = (sums[stop] - sums[start]) / widths[stage]
            options.append((max(slowest, own), (*bounds, stop)))
        return min(options)

    return list(best(len(widths) - 1, layers)[1])
