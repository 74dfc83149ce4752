"""A loss of the user's, named by ``task.loss._target_``.

A slice of a batch (a micro-batch of a replica) has one loss, and slices count by their samples: so
whatever is computed of a slice is what one process computes that accumulates over the same slices.
On a split image output and target are `SpatialTensor`, whose sums and means are those of the whole.
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

from spatialdl.spatial.autocast import wide
from spatialdl.spatial.tensor import SpatialTensor

REPLACED = {
    "class_weights": None,
    "pos_weight": None,
    "label_smoothing": 0.0,
    "dice": 0.0,
    "huber_delta": 1.0,
}
"""What belongs to the losses that come along, and stands for nothing in another one."""


class OwnLoss:
    """A loss that says one number of what the network gives for a slice of a batch.

    Args:
        name: of its class or function, for messages.
        function: gets output and target; of a module copies are kept that fit the outputs.

    Raises:
        ValueError: if it has parameters, which no optimizer would see.
    """

    def __init__(self, name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        if isinstance(function, nn.Module) and next(function.parameters(), None) is not None:
            raise ValueError(
                f"task.loss={name} has parameters, but only those of the network are trained: make "
                "them buffers (register_buffer), or part of the network"
            )
        self._name, self._function = name, function
        self._copies: dict[tuple[torch.device, torch.dtype], Callable[[Tensor, Tensor], Tensor]]
        self._copies = {}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a slice.

        Args:
            output: what the network gives; 16 bits come as float32.
            target: (N,), (N, columns) or (N, H, W), as the task has it.

        Raises:
            ValueError: if it is not one number.
        """
        if isinstance(output, Tensor):
            output = wide(output)
        loss = self._for(output)(output, target)
        if not isinstance(loss, Tensor) or isinstance(loss, SpatialTensor) or loss.dim() != 0:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"task.loss={self._name} gives {shape}: it must give one number, a tensor of shape "
                "(), such as the mean"
            )
        return loss

    def _for(self, output: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Weights of classes and the like must lie where the outputs do, and be of their type."""
        if not isinstance(self._function, nn.Module) or not isinstance(output, Tensor):
            return self._function
        key = (output.device, output.dtype)
        if key not in self._copies:
            self._copies[key] = copy.deepcopy(self._function).to(*key)
        return self._copies[key]


def own_loss_of(settings: DictConfig) -> OwnLoss | None:
    """The loss that ``task.loss._target_`` names, if it names any.

    Args:
        settings: the group ``task``.

    Raises:
        ValueError: if it cannot be made, or a setting belongs to the loss it takes the place of.
    """
    given = settings.get("loss")
    if settings.name == "survival" and not isinstance(given, DictConfig):
        if given not in (None, "cox"):
            raise ValueError(
                f"task.loss={given} is unknown to task=survival: take null, the likelihood of "
                "discrete times, or cox, the partial likelihood"
            )
        return None
    if given is not None and not isinstance(given, DictConfig) and settings.name != "regression":
        raise ValueError(
            f"task.loss={given} is unknown to task={settings.name}: leave it out, or name a class "
            "or function of yours, task.loss._target_=package.Loss"
        )
    if not isinstance(given, DictConfig):
        return None
    target = given.get("_target_")
    if target is None:
        raise ValueError(
            f"task.loss={OmegaConf.to_container(given)} has no _target_: name a class or function "
            "of yours, task.loss._target_=package.Loss"
        )
    for key, default in REPLACED.items():
        if settings.get(key, default) != default:
            raise ValueError(
                f"task.{key}={settings[key]} belongs to the loss of task={settings.name}, which "
                f"task.loss._target_={target} takes the place of: leave it out, or hand it to "
                "your loss"
            )
    return OwnLoss(str(target), _made(given, str(target)))


def _made(given: DictConfig, target: str) -> Callable[[Tensor, Tensor], Tensor]:
    """An object of a class, or a function with its other arguments filled in."""
    plain: dict[str, Any] = OmegaConf.to_container(given, resolve=True)  # type: ignore[assignment]
    arguments = {key: value for key, value in plain.items() if key != "_target_"}
    try:
        if not inspect.isclass(resolve_name(target)):
            function = resolve_name(target)
            inspect.signature(function).bind(None, None, **arguments)
            return functools.partial(function, **arguments)
        made = hydra.utils.instantiate(given, _convert_=given.get("_convert_", "all"))
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"task.loss._target_={target} cannot be made: {said}") from error
    if not callable(made):
        raise ValueError(f"task.loss._target_={target} cannot be called with output and target")
    return made  # type: ignore[no-any-return]
