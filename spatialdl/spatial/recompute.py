"""Activation checkpointing without communication in the recomputation.

Only the inputs of a block are saved, and its forward is recomputed in backward (Chen, Xu, Zhang,
Guestrin: "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174),
by PyTorch's non-reentrant checkpoint. The recomputation replays received data (halos, statistics,
gathers) from a tape of the first run, starts from the same random state, and does not change the
buffers of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl.comm.replay import ReplayTape
from spatialdl.spatial import replicas
from spatialdl.spatial.random.drawing import repeat_later
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import top_saved_tensors_hooks, tree_leaves, tree_map_only

WEIGHTS = 2
"""Minimum number of convolutions or linear layers in a block; one alone saves only its input."""


def recompute(
    function: Callable[..., Any], *args: Any, modules: Iterable[nn.Module], **kwargs: Any
) -> Any:
    """``function(*args, **kwargs)``, saving only the arguments for backward.

    Args:
        function: a part of a network, also on split images.
        modules: its modules; the recomputation does not change their buffers.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    roots = list(modules)
    run = _FirstRun([module for root in roots for module in root.modules()])
    again = partial(
        checkpoint,
        use_reentrant=False,
        context_fn=lambda: (run.tape.record(), _SecondRun(run)),
    )
    # Inside a checkpoint of the network itself, both of its runs must save the same tensors.
    nested = top_saved_tensors_hooks(False) is not None
    if not roots or not (nested or _overwrites.get(roots[0], True)):
        return again(function, *args, **kwargs)
    inputs = _Inputs(args, kwargs)
    devices = [torch.empty(0, device=one.device) for one in inputs.tensors]
    result = again(inputs.runner(function), *devices)
    _overwrites[roots[0]] = inputs.settle()
    return result


_overwrites: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether the first run of a block, by its first module, has modified its inputs in place."""


class _Inputs:
    """The inputs of a block that may modify them; the recomputation gets the original values."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = args, kwargs
        self._again: Any = tree_map_only(Tensor, _copy, self._given)
        self._are_copies = True
        self.tensors = [one for one in tree_leaves(self._given) if isinstance(one, Tensor)]
        self._versions = [_version(one) for one in self.tensors]

    def runner(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` applied to these inputs; the tensors passed to it only give devices."""
        first = [self._given]

        def run(*devices: Tensor) -> Any:
            args, kwargs = first.pop() if first else self._inputs_again()
            return function(*args, **kwargs)

        return run

    def settle(self) -> bool:
        """Drop the copies, or the inputs if these were modified; called after the first run.

        Returns:
            Whether the inputs were modified.
        """
        overwritten = self._versions != [_version(one) for one in self.tensors]
        if not overwritten:
            self._again, self._are_copies = self._given, False
        else:
            self.tensors = []
        del self._given
        return overwritten

    def _inputs_again(self) -> Any:
        if self._are_copies:  # cloned, as it may run several times and must not modify leaves
            return tree_map_only(Tensor, torch.clone, self._again)
        if self._versions != [_version(one) for one in self.tensors]:
            raise RuntimeError(
                "the input of a recomputed block was modified by an inplace operation after its "
                "forward: clone() it there, or remove parallel.recompute"
            )
        return self._again


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _version(x: Tensor) -> int:
    return x._version + (x._tile._version if isinstance(x, SpatialTensor) else 0)


class _FirstRun:
    """The first run's tape, and the random state, buffers and attributes before it.

    All buffers are copied, because BatchNorm updates running statistics without incrementing their
    version.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.tape = ReplayTape()
        self.random = repeat_later()
        self.replicas = replicas.repeat_later()
        self.modules = modules
        self.attributes = [{**vars(module), "_buffers": _copies(module)} for module in modules]


def _copies(module: nn.Module) -> dict[str, Tensor | None]:
    buffers = module._buffers.items()
    return {name: None if one is None else one.detach().clone() for name, one in buffers}


class _SecondRun:
    """The context of a recomputation; re-enterable for backward with ``retain_graph``."""

    def __init__(self, run: _FirstRun) -> None:
        self._run = run
        self._contexts = run.tape.replay(), run.random, run.replicas
        self._real: list[dict[str, Any]] = []
        self._versions: dict[int, int] = {}

    def __enter__(self) -> None:
        self._real = [vars(module).copy() for module in self._run.modules]
        for module, attributes in zip(self._run.modules, self._run.attributes, strict=True):
            _set_attributes(module, attributes)
            module._buffers = _copies(module)
        self._versions = self._weight_versions()
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*raised)
        for module, real in zip(self._run.modules, self._real, strict=True):
            _set_attributes(module, real)
        self._real = []
        now = self._weight_versions()  # different tensors if FSDP2 gathered them in between
        if any(now.get(weight, version) != version for weight, version in self._versions.items()):
            names = sorted({type(module).__name__ for module in self._run.modules})
            raise RuntimeError(
                f"a recomputed forward writes to a weight (of one of {', '.join(names)}): do that "
                "after the optimizer step, or remove parallel.recompute"
            )

    def _weight_versions(self) -> dict[int, int]:
        return {
            id(weight): weight._version
            for module in self._run.modules
            for weight in module._parameters.values()
            if weight is not None
        }


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(attributes)


# --- blocks of a network


def _forward_again(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block, recomputed in backward."""
    return recompute(partial(type(block).forward, block), *args, modules=[block], **kwargs)


def is_recomputed(module: nn.Module) -> bool:
    """Whether a module is a block that is recomputed in backward."""
    return getattr(vars(module).get("forward"), "func", None) is _forward_again


def recompute_block(block: nn.Module) -> None:
    """Recompute a module in backward; a copy of it recomputes itself."""
    if "forward" not in vars(block):
        block.forward = partial(_forward_again, block)


def recompute_blocks(model: nn.Module) -> list[str]:
    """Recompute the blocks of a network in backward instead of saving their activations.

    Results are unchanged, and nothing is communicated twice (after Chen et al., 2016, section 4).

    Args:
        model: the network, modified in place.

    Returns:
        The names of the blocks, see `blocks_of`; empty if there are none. Names and state dict do
        not change.
    """
    blocks = blocks_of(model)
    for block in blocks.values():
        recompute_block(block)
    return list(blocks)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a network by name.

    Blocks are the elements of a ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict`` whose
    class occurs there at least twice and which contain at least two convolutions or linear layers
    each; of nested blocks the inner ones. Examples are residual blocks, the layers of a
    transformer, the double convolutions of a U-Net.
    """
    return dict(_blocks(model, ""))


def _blocks(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    blocks: list[tuple[str, nn.Module]] = []
    is_list = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    kinds = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        within = _blocks(child, full)
        if not within and is_list and kinds[type(child)] > 1 and weight_layers(child) >= WEIGHTS:
            within = [(full, child)]
        blocks += within
    return blocks


def weight_layers(module: nn.Module) -> int:
    """The number of modules with a weight of two dims or more: convolutions, linear layers."""
    return sum(
        any(
            parameter.dim() > 1 for parameter in layer._parameters.values() if parameter is not None
        )
        for layer in module.modules()
    )
