"""Losses of the user, set by ``task.loss._target_``.

A slice of a batch (a micro-batch of a replica) has one loss, and slices are weighted by their
samples. So any loss of a slice equals that of a single process which accumulates over the same
slices. For split images, output and target are `SpatialTensor`, which reduce over the whole image.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import hydra.utils
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from spatialdl.common.configuring.plugins import describe_cause
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.tensor import SpatialTensor

REPLACED = {
    "class_weights": None,
    "pos_weight": None,
    "label_smoothing": 0.0,
    "dice": 0.0,
    "huber_delta": 1.0,
}
"""Settings of the built-in losses, and the values that mean "not set"."""


class OwnLoss:
    """User loss: a scalar from the network's output for a slice of a batch.

    Args:
        name: name of its class or function, for messages.
        function: called with output and target; modules are copied to device and dtype of outputs.

    Raises:
        ValueError: if it has parameters, which the optimizer would not train.
    """

    def __init__(self, name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        if isinstance(function, nn.Module) and next(function.parameters(), None) is not None:
            raise ValueError(
                f"task.loss={name} has parameters, but only those of the network are trained: use "
                "buffers (register_buffer), or move them to the network"
            )
        self._name, self._function = name, function
        self._copies: dict[tuple[torch.device, torch.dtype], Callable[[Tensor, Tensor], Tensor]]
        self._copies = {}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of a slice.

        Args:
            output: output of the network; 16-bit dtypes are converted to float32.
            target: (N,), (N, columns) or (N, H, W), depending on the task.

        Raises:
            ValueError: if the loss is not a scalar.
        """
        if isinstance(output, Tensor):
            output = wide(output)
        loss = self._for(output)(output, target)
        if not isinstance(loss, Tensor) or isinstance(loss, SpatialTensor) or loss.dim() != 0:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"task.loss={self._name} returns {shape}, expected a scalar tensor of shape (), "
                "such as the mean"
            )
        return loss

    def _for(self, output: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Copy of a module whose buffers have device and dtype of the outputs."""
        if not isinstance(self._function, nn.Module) or not isinstance(output, Tensor):
            return self._function
        key = (output.device, output.dtype)
        if key not in self._copies:
            self._copies[key] = copy.deepcopy(self._function).to(*key)
        return self._copies[key]


def own_loss_of(settings: DictConfig) -> OwnLoss | None:
    """Create the loss of ``task.loss._target_``; None if it is not set.

    Args:
        settings: group ``task`` of the configuration.

    Raises:
        ValueError: if it cannot be created, or a setting of the replaced loss is set.
    """
    loss = settings.get("loss")
    if settings.name == "survival" and not isinstance(loss, DictConfig):
        if loss not in (None, "cox"):
            raise ValueError(
                f"task.loss={loss} is unknown for task=survival: use null (discrete-time "
                "likelihood) or cox (partial likelihood)"
            )
        return None
    if loss is not None and not isinstance(loss, DictConfig) and settings.name != "regression":
        raise ValueError(
            f"task.loss={loss} is unknown for task={settings.name}: leave it out, or set your own "
            "class or function, task.loss._target_=package.Loss"
        )
    if not isinstance(loss, DictConfig):
        return None
    target = loss.get("_target_")
    if target is None:
        raise ValueError(
            f"task.loss={OmegaConf.to_container(loss)} has no _target_: set your own class or "
            "function, task.loss._target_=package.Loss"
        )
    for key, default in REPLACED.items():
        if settings.get(key, default) != default:
            raise ValueError(
                f"task.{key}={settings[key]} is a setting of the loss of task={settings.name}, "
                f"which task.loss._target_={target} replaces: leave it out, or pass it to your "
                "loss"
            )
    return OwnLoss(str(target), _made(loss, str(target)))


def _made(settings: DictConfig, target: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Instantiate a class, or bind the arguments of a function."""
    plain: dict[str, Any] = OmegaConf.to_container(settings, resolve=True)  # type: ignore[assignment]
    arguments = {key: value for key, value in plain.items() if key != "_target_"}
    try:
        if not inspect.isclass(resolve_name(target)):
            function = resolve_name(target)
            inspect.signature(function).bind(None, None, **arguments)
            return functools.partial(function, **arguments)
        made = hydra.utils.instantiate(settings, _convert_=settings.get("_convert_", "all"))
    except Exception as error:
        raise ValueError(
            f"task.loss._target_={target} cannot be created: {describe_cause(error)}"
        ) from error
    if not callable(made):
        raise ValueError(f"task.loss._target_={target} is not callable with output and target")
    return made  # type: ignore[no-any-return]
