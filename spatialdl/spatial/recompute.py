"""Activation checkpointing that never talks: keep the input of a block, run it again in backward.

Chen, Xu, Zhang, Guestrin: "Training Deep Nets with Sublinear Memory Cost", 2016
(https://arxiv.org/abs/1604.06174), by PyTorch's non-reentrant checkpoint. The second run takes
what came from other ranks (halos, statistics, gathers) from a tape of the first, starts from the
same random state, and leaves the buffers of the block as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl.comm.tape import Tape
from spatialdl.random.drawing import same_again
from spatialdl.spatial import replicas

WEIGHTS = 2
"""Convolutions or linear layers in a block; with one, all that it keeps is its input anyway."""


def recompute(
    function: Callable[..., Any], *args: Any, modules: Iterable[nn.Module], **kwargs: Any
) -> Any:
    """``function(*args, **kwargs)``, of which only the arguments are kept for backward.

    Args:
        function: a part of a network; may be on a split image.
        modules: the modules in it, whose buffers the second run must not change.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    run = _Run([module for root in modules for module in root.modules()])
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (run.tape.record(), _SecondRun(run)),
        **kwargs,
    )


class _Run:
    """What the second run starts from: the tape of the first, random state and buffers before it.

    All buffers: BatchNorm's running statistics change without their version being counted up.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.tape = Tape()
        self.random = same_again()
        self.replicas = replicas.same_again()
        self.buffers = [
            (module, name, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]


class _SecondRun:
    """May be entered several times: with ``retain_graph`` backward comes again."""

    def __init__(self, run: _Run) -> None:
        self._buffers, self._replaying = run.buffers, run.tape.replay()
        self._random, self._replicas = run.random, run.replicas
        self._real: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._real = [(module, name, module._buffers[name]) for module, name, _ in self._buffers]
        for module, name, start in self._buffers:
            module._buffers[name] = start.clone()
        self._replaying.__enter__()
        self._random.__enter__()
        self._replicas.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._replicas.__exit__(kind, error, trace)
        self._random.__exit__(kind, error, trace)
        self._replaying.__exit__(kind, error, trace)
        for module, name, buffer in self._real:
            module._buffers[name] = buffer
        self._real = []


# --- which parts of a network


class Recomputed:
    """Mixed into the class of a block: its forward runs again in backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own_forward = super().forward  # type: ignore[misc]
        return recompute(own_forward, *args, modules=[self], **kwargs)  # type: ignore[list-item]


@cache
def _recomputed_class(kind: Any) -> Any:
    return type(kind.__name__, (Recomputed, kind), {"__module__": kind.__module__})


def recompute_blocks(model: nn.Module) -> list[str]:
    """Let the blocks of a network run again in backward instead of keeping their activations.

    Numbers stay the same, and no rank talks twice (after Chen et al., 2016, section 4).

    Args:
        model: the network, which is changed.

    Returns:
        The names of the blocks, see `blocks_of`; they keep their names and their state dict. Empty
        if there are none, and nothing is done.
    """
    blocks = blocks_of(model)
    for block in blocks.values():
        if not isinstance(block, Recomputed):
            kind: Any = type(block)
            block.__class__ = _recomputed_class(kind)
    return list(blocks)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a network by name.

    They are the elements of a ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict`` whose
    class comes there at least twice, and which hold at least two convolutions or linear layers
    each; of blocks within blocks the inner ones. So it is with residual blocks, the layers of a
    transformer, the double convolutions of a U-Net.
    """
    return dict(_blocks(model, ""))


def _blocks(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    is_list = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    kinds = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        within = _blocks(child, full)
        if not within and is_list and kinds[type(child)] > 1 and weight_layers(child) >= WEIGHTS:
            within = [(full, child)]
        found += within
    return found


def weight_layers(module: nn.Module) -> int:
    """Modules with a weight of their own of two dims or more: convolutions, linear layers."""
    return sum(
        any(
            parameter.dim() > 1 for parameter in layer._parameters.values() if parameter is not None
        )
        for layer in module.modules()
    )
