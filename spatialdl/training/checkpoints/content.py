"""What a checkpoint contains, under names that do not depend on the layout.

Weights and buffers have the names of the network's own state dict. What an optimizer keeps of a
parameter is `optimizer/PARAMETER/KEY`, or `number/PARAMETER/KEY` if it is a number of Python's; the
average of a parameter over the steps is `average/PARAMETER`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from spatialdl.channels.weights import Weight, weights_of
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import shard_of
from spatialdl.errors import CheckpointError
from spatialdl.parallel.placement import Position
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.training.checkpoints.folder import RANDOM, stage_file
from spatialdl.training.optimization.update import Update

STATE, NUMBER, AVERAGE = "optimizer/", "number/", "average/"

Files = dict[str, dict[str, Tensor]]
"""By the name of a file its tensors, in memory of their own."""


class TensorSource(Protocol):
    """Where tensors are read from."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None if there is no such tensor."""

    def names(self, prefix: str) -> list[str]:
        """Of all tensors that begin so."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows."""


def copies(pipeline: PipelineRuntime, update: Update, rank: int) -> Files:
    """What this rank writes; where state is sharded, or channels are divided, all ranks must ask.

    Of every stage the first rank that holds it writes all.

    Args:
        rank: of this process in the world.

    Raises:
        CheckpointError: for state that is no tensor.
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
            weight = weights.get(_of_what(name))
            if weight is not None and name in weights and sharded is None:
                whole = weight.whole()  # its forward may have put something whole there
            elif weight is not None and value.shape == weight.part.shape:
                whole = weight.whole(whole)
            if writes:
                kept[name] = whole.detach().to("cpu", copy=True).contiguous()
        if writes:
            files[stage_file(stage)] = kept
    return files


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the network keeps '{name}', a {type(value).__name__}, in its state dict; "
                "checkpoints hold tensors only: make it a buffer, or set trainer.checkpoint.keep=0"
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
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as '{key}' of "
                    f"{name}; checkpoints hold numbers, tensors, and shards like those of the "
                    "parameters: take another optimizer, or set trainer.checkpoint.keep=0"
                )


def _averages(module: nn.Module, update: Update) -> Iterator[tuple[str, Tensor]]:
    averages = {} if update.average is None else update.average.state_dict()
    for name in _parameters(module):
        if name in averages:
            yield AVERAGE + name, averages[name]


def _of_what(name: str) -> str:
    """The parameter or buffer that something in a checkpoint belongs to."""
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


# --- the way back


@torch.no_grad()
def restore(
    pipeline: PipelineRuntime, update: Update, source: TensorSource, world: Communicator
) -> None:
    """Fill this rank's stages and its part of the optimizer's state; all ranks must call it.

    Averages that the checkpoint does not have begin with its weights.

    Raises:
        CheckpointError: if the network or the optimizer is another one; nothing was changed then.
    """
    check_network(pipeline.stages.values(), source, world)
    _restore_network(pipeline, source)
    for stage, module in pipeline.stages.items():
        weights = weights_of(module)
        for name, value in _averages(module, update):
            weight = weights.get(_of_what(name))
            _fill(pipeline, stage, value, source, _or_weight(source, name), weight)
    _restore_optimizer(pipeline, update.optimizer, source)


@torch.no_grad()
def restore_network(
    pipeline: PipelineRuntime, source: TensorSource, world: Communicator, *, averaged: bool
) -> None:
    """Fill this rank's stages; all ranks must call it.

    Args:
        averaged: whether to take the averages of weights, of those that have one.

    Raises:
        CheckpointError: if the network is another one; nothing was changed then.
    """
    check_network(pipeline.stages.values(), source, world)
    _restore_network(pipeline, source, AVERAGE if averaged else "")


def check_network(modules: Iterable[nn.Module], source: TensorSource, world: Communicator) -> None:
    """Compare names and shapes of a network with a checkpoint; all ranks must call it.

    Args:
        modules: what this rank has of the network.

    Raises:
        CheckpointError: if the network is another one.
    """
    own = list(modules)
    wrong = [_unlike(own, source), *_left_over(own, source, world)]
    found = [text for text in world.allgather(next(filter(None, wrong), None)) if text]
    if found:
        raise CheckpointError(found[0])


def _restore_network(pipeline: PipelineRuntime, source: TensorSource, prefix: str = "") -> None:
    for stage, module in pipeline.stages.items():
        weights = weights_of(module)
        for name, value in module.state_dict().items():
            _fill(
                *(pipeline, stage, value, source, _or_weight(source, prefix + name)),
                weights.get(name),
            )


def _or_weight(source: TensorSource, name: str) -> str:
    """An average, or the weight itself where there is none."""
    return name if source.shape(name) is not None else name.removeprefix(AVERAGE)


def _unlike(modules: Iterable[nn.Module], source: TensorSource) -> str | None:
    for module in modules:
        weights = weights_of(module)
        for name, value in _state(module):
            there, here = source.shape(name), tuple(weights.get(name, value).shape)
            if there is None:
                return f"the checkpoint is of another network: it has no '{name}'"
            if there != here:
                return (
                    f"the checkpoint is of another network: its '{name}' is {_sizes(there)}, that "
                    f"of model._target_ is {_sizes(here)}"
                )
    return None


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _left_over(
    modules: Iterable[nn.Module], source: TensorSource, world: Communicator
) -> Iterator[str]:
    own = [name for module in modules for name in module.state_dict()]
    everybody = {name for names in world.allgather(own) for name in names}
    for name in source.names(""):
        if not name.startswith((STATE, NUMBER, AVERAGE)) and name not in everybody:
            yield f"the checkpoint is of another network: this one has no '{name}'"


def _fill(
    pipeline: PipelineRuntime,
    stage: int,
    value: Tensor,
    source: TensorSource,
    name: str,
    weight: Weight | None = None,
) -> None:
    """Copy a tensor, or this rank's shard or channels of it, to where it belongs."""
    own = shard_of(value)
    if own is value or weight is not None:
        given = source.read(name)
        given = given if weight is None else weight.own(given)
        own.copy_(given if own is value else given[pipeline.sharded[stage].rows(len(value))])
    elif len(own):
        own.copy_(source.read(name, pipeline.sharded[stage].rows(len(value))))


def _restore_optimizer(
    pipeline: PipelineRuntime, optimizer: torch.optim.Optimizer, source: TensorSource
) -> None:
    """Its numbers, such as learning rates, are those of the configuration already."""
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
            given = _own_state(pipeline, stage, parameter, source, full, weights.get(name))
            own[full.rpartition("/")[2]] = given
    whole = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict({**whole, "state": {n: one for n, one in state.items() if one}})
    for number, own in state.items():
        for key, value in own.items():
            if isinstance(value, Tensor) and value.dim() == 0:  # of which PyTorch changes the type
                now = optimizer.state[parameters[number]]
                now[key] = now[key].to(value.dtype)


def _own_state(
    pipeline: PipelineRuntime,
    stage: int,
    parameter: nn.Parameter,
    source: TensorSource,
    full: str,
    weight: Weight | None,
) -> Any:
    """What the optimizer keeps of a parameter; like it, sharded, if it is of the same size."""
    if full.startswith(NUMBER):
        return source.read(full).item()
    alike = source.shape(full) == tuple(parameter.shape if weight is None else weight.shape)
    if alike and weight is not None and shard_of(parameter) is parameter:
        return weight.own(source.read(full)).clone()  # or it would keep all of it
    if not alike or shard_of(parameter) is parameter:
        return source.read(full)
    value = torch.zeros_like(parameter)
    _fill(pipeline, stage, value, source, full, weight)
    return value


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


# --- random generators


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The default generators of PyTorch, NumPy and Python, of this rank."""
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
    """Have the generators go on as those of `random_states`.

    Raises:
        CheckpointError: these are none.
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


def random_file(everybody: list[dict[str, Tensor]]) -> Files:
    """The states of all ranks as one file: a file a rank would be many."""
    named = (
        (f"{rank}/{name}", value)
        for rank, states in enumerate(everybody)
        for name, value in states.items()
    )
    return {RANDOM: dict(named)}
