"""Tensors of a checkpoint, under names that do not depend on the layout.

Weights and buffers have the names of the network's state dict. Optimizer state of a parameter is
`optimizer/PARAMETER/KEY`, or `number/PARAMETER/KEY` for a Python number. The average of a
parameter over the steps is `average/PARAMETER`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import shard_of
from spatialdl.errors import CheckpointError
from spatialdl.layout.placement import Position
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.spatial.channels.weights import Weight, weights_of
from spatialdl.training.checkpoints.folder import RANDOM, stage_file
from spatialdl.training.checkpoints.reading import Checkpoint
from spatialdl.training.optimization.update import Update

STATE, NUMBER, AVERAGE = "optimizer/", "number/", "average/"

Files = dict[str, dict[str, Tensor]]
"""Copied tensors by file name and tensor name."""


def copies(pipeline: PipelineRuntime, update: Update, rank: int) -> Files:
    """Copy the tensors that this rank writes; collective if state or channels are sharded.

    The first rank of each stage writes the whole stage.

    Args:
        pipeline: the network on its ranks.
        update: optimizer and averages.
        rank: rank of this process in the world.

    Raises:
        CheckpointError: for state that is not a tensor.
    """
    files: Files = {}
    for stage, module in pipeline.stages.items():
        gives = rank in pipeline.placement.tensor_ranks(Position(0, stage, 0))
        writes = rank == pipeline.placement.ranks(stage, 0)[0]
        sharded = pipeline.sharded.get(stage)
        if not gives and sharded is None:
            continue
        kept, weights = {}, weights_of(module)
        state = (*_state(module), *_optimizer_state(module, update.optimizer))
        for name, value in (*state, *_averages(module, update)):
            whole = value if sharded is None else sharded.full(value)
            weight = weights.get(_owner(name))
            if weight is not None and name in weights and sharded is None:
                whole = weight.full()  # a forward may have replaced the part by a whole tensor
            elif weight is not None and value.shape == weight.part.shape:
                whole = weight.full(whole)
            if writes:
                kept[name] = whole.detach().to("cpu", copy=True).contiguous()
        if writes:
            files[stage_file(stage)] = kept
    return files


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the network has '{name}', a {type(value).__name__}, in its state dict, but "
                "checkpoints store tensors only: make it a buffer, or set trainer.checkpoint.keep=0"
            )
        yield name, value


def _optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor) and _sharded_alike(value, parameter):
                yield f"{STATE}{name}/{key}", value
            elif isinstance(value, bool | int | float):
                yield f"{NUMBER}{name}/{key}", torch.tensor(value, dtype=_type_of(value))
            elif value is not None:
                raise CheckpointError(
                    f"{type(optimizer).__name__} has a {type(value).__name__} as '{key}' of "
                    f"{name}, but checkpoints store numbers, tensors, and shards like those of the "
                    "parameters: use another optimizer, or set trainer.checkpoint.keep=0"
                )


def _averages(module: nn.Module, update: Update) -> Iterator[tuple[str, Tensor]]:
    averages = {} if update.average is None else update.average.state_dict()
    for name in _parameters(module):
        if name in averages:
            yield AVERAGE + name, averages[name]


def _owner(name: str) -> str:
    """The parameter or buffer that a tensor of a checkpoint belongs to."""
    if name.startswith((STATE, NUMBER)):
        return name.split("/", 1)[1].rpartition("/")[0]
    return name.removeprefix(AVERAGE)


def _sharded_alike(value: Tensor, parameter: nn.Parameter) -> bool:
    if shard_of(value) is value:
        return True
    placements = getattr(value, "placements", None), getattr(parameter, "placements", None)
    return value.shape == parameter.shape and placements[0] == placements[1]


def _type_of(value: float) -> torch.dtype:
    kinds = {bool: torch.bool, int: torch.int64}
    return kinds.get(type(value), torch.float64)


# --- restoring


@torch.no_grad()
def restore(
    pipeline: PipelineRuntime, update: Update, source: Checkpoint, world: Communicator
) -> None:
    """Restore this rank's stages and optimizer state; collective.

    Averages missing in the checkpoint are initialised with its weights.

    Raises:
        CheckpointError: if the network or the optimizer differs; then nothing is changed.
    """
    check_network(pipeline.stages.values(), source, world)
    _restore_network(pipeline, source)
    for stage, module in pipeline.stages.items():
        weights = weights_of(module)
        for name, value in _averages(module, update):
            weight = weights.get(_owner(name))
            _fill(pipeline, stage, value, source, _or_weight(source, name), weight)
    _restore_optimizer(pipeline, update.optimizer, source)


@torch.no_grad()
def restore_network(
    pipeline: PipelineRuntime, source: Checkpoint, world: Communicator, *, averaged: bool
) -> None:
    """Restore this rank's stages; collective.

    Args:
        pipeline: the network on its ranks.
        source: the checkpoint.
        world: all ranks.
        averaged: whether to use averaged weights where there are any.

    Raises:
        CheckpointError: if the network differs; then nothing is changed.
    """
    check_network(pipeline.stages.values(), source, world)
    _restore_network(pipeline, source, AVERAGE if averaged else "")


def check_network(modules: Iterable[nn.Module], source: Checkpoint, world: Communicator) -> None:
    """Compare names and shapes of a network with a checkpoint; collective.

    Args:
        modules: this rank's modules of the network.
        source: the checkpoint.
        world: all ranks.

    Raises:
        CheckpointError: if the network differs.
    """
    own = list(modules)
    wrong = [_mismatch(own, source), *_left_over(own, source, world)]
    texts = [text for text in world.allgather(next(filter(None, wrong), None)) if text]
    if texts:
        raise CheckpointError(texts[0])


def _restore_network(pipeline: PipelineRuntime, source: Checkpoint, prefix: str = "") -> None:
    for stage, module in pipeline.stages.items():
        weights = weights_of(module)
        for name, value in module.state_dict().items():
            _fill(
                *(pipeline, stage, value, source, _or_weight(source, prefix + name)),
                weights.get(name),
            )


def _or_weight(source: Checkpoint, name: str) -> str:
    """Name of an average, or of the weight if there is no average."""
    return name if source.shape(name) is not None else name.removeprefix(AVERAGE)


def _mismatch(modules: Iterable[nn.Module], source: Checkpoint) -> str | None:
    for module in modules:
        weights = weights_of(module)
        for name, value in _state(module):
            there, here = source.shape(name), tuple(weights.get(name, value).shape)
            if there is None:
                return f"the checkpoint is of another network: it has no '{name}'"
            if there != here:
                return (
                    f"the checkpoint is of another network: its '{name}' is {_sizes(there)}, but "
                    f"that of model._target_ is {_sizes(here)}"
                )
    return None


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _left_over(
    modules: Iterable[nn.Module], source: Checkpoint, world: Communicator
) -> Iterator[str]:
    own = [name for module in modules for name in module.state_dict()]
    all_names = {name for names in world.allgather(own) for name in names}
    for name in source.names(""):
        if not name.startswith((STATE, NUMBER, AVERAGE)) and name not in all_names:
            yield f"the checkpoint is of another network: this one has no '{name}'"


def _fill(
    pipeline: PipelineRuntime,
    stage: int,
    value: Tensor,
    source: Checkpoint,
    name: str,
    weight: Weight | None = None,
) -> None:
    """Copy a tensor, or this rank's shard or channels of it, into `value`."""
    own = shard_of(value)
    if own is value or weight is not None:
        stored = source.read(name)
        stored = stored if weight is None else weight.local(stored)
        own.copy_(stored if own is value else stored[pipeline.sharded[stage].rows(len(value))])
    elif len(own):
        own.copy_(source.read(name, pipeline.sharded[stage].rows(len(value))))


def _restore_optimizer(
    pipeline: PipelineRuntime, optimizer: torch.optim.Optimizer, source: Checkpoint
) -> None:
    """Restore the state of parameters; hyperparameters stay as configured."""
    names = {name: stage for stage, one in pipeline.stages.items() for name in _parameters(one)}
    keys: dict[str, list[str]] = {}
    for full in (*source.names(STATE), *source.names(NUMBER)):
        keys.setdefault(full.split("/", 1)[1].rpartition("/")[0], []).append(full)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Any]] = {}
    weights = {
        name: weight for one in pipeline.stages.values() for name, weight in weights_of(one).items()
    }
    parameters_of = {
        stage: dict(one.named_parameters(remove_duplicate=False))
        for stage, one in pipeline.stages.items()
    }
    for name, stage in names.items():
        parameter = parameters_of[stage][name]
        if id(parameter) not in number_of:  # frozen
            continue
        state[number_of[id(parameter)]] = own = {}
        for full in keys.get(name, ()):
            value = _own_state(pipeline, stage, parameter, source, full, weights.get(name))
            own[full.rpartition("/")[2]] = value
    whole = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict({**whole, "state": {n: one for n, one in state.items() if one}})
    for number, own in state.items():
        for key, value in own.items():
            if isinstance(value, Tensor) and value.dim() == 0:  # PyTorch has changed its dtype
                now = optimizer.state[parameters[number]]
                now[key] = now[key].to(value.dtype)


def _own_state(
    pipeline: PipelineRuntime,
    stage: int,
    parameter: nn.Parameter,
    source: Checkpoint,
    full: str,
    weight: Weight | None,
) -> Any:
    """Optimizer state of a parameter, sharded like it if it has the same shape."""
    if full.startswith(NUMBER):
        return source.read(full).item()
    alike = source.shape(full) == tuple(parameter.shape if weight is None else weight.shape)
    if alike and weight is not None and shard_of(parameter) is parameter:
        return weight.local(source.read(full)).clone()  # a view would keep the whole tensor alive
    if not alike or shard_of(parameter) is parameter:
        return source.read(full)
    value = torch.zeros_like(parameter)
    _fill(pipeline, stage, value, source, full, weight)
    return value


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


# --- random generators


def random_states(device: torch.device) -> dict[str, Tensor]:
    """States of this rank's default generators of PyTorch, NumPy and Python."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, following = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, np.int64)),
        "numpy.gauss": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor([version, *words], dtype=torch.int64),
    }
    if following is not None:
        states["python.gauss"] = torch.tensor(following, dtype=torch.float64)
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore generators from `random_states`.

    Raises:
        CheckpointError: if the states are invalid.
    """
    try:
        _set_generators(states, device)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the random states of the checkpoint are damaged: {error}"
        ) from error


def _set_generators(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    position, has_gauss, gauss = states["numpy.gauss"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, *words = states["python"].tolist()
    following = states["python.gauss"].item() if "python.gauss" in states else None
    random.setstate((version, tuple(words), following))
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def random_file(by_place: list[dict[str, Tensor]]) -> Files:
    """Collect the random states of all ranks in one file, to avoid one file per rank."""
    named = (
        (f"{rank}/{name}", value)
        for rank, states in enumerate(by_place)
        for name, value in states.items()
    )
    return {RANDOM: dict(named)}
