"""Moves a stage to a device; parameters keep hooks and attributes."""

from __future__ import annotations

import torch
from torch import nn


def moved(stage: nn.Module, device: torch.device) -> nn.Module:
    """Move a stage in place; parameters stay shared, and keep hooks and attributes.

    For out-of-tree devices ``Module.to`` makes new parameters, one for each module that uses a
    shared one, and without the hooks of the old ones.
    """
    before = [(module, dict(module._parameters)) for module in stage.modules()]
    stage.to(device)
    made: dict[int, nn.Parameter] = {}
    for module, parameters in before:
        for name, old in parameters.items():
            new = module._parameters[name]
            if old is None or new is None or new is old:
                continue
            if id(old) not in made:
                made[id(old)] = _with_all_of(old, new)
            module._parameters[name] = made[id(old)]
    return stage


def _with_all_of(old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    new.__dict__.update(old.__dict__)
    hooks, late_hooks = old._backward_hooks or {}, old._post_accumulate_grad_hooks or {}
    if hooks or late_hooks:
        new.requires_grad_()  # frozen ones take no hooks
        for hook in hooks.values():
            new.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in late_hooks.values():
            new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        new.requires_grad_(old.requires_grad)
    return new
