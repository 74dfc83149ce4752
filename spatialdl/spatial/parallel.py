"""Networks on a mesh: averaged gradients, and weights divided over the tensor axis."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spatialdl.comm.agreement import Agreement, broadcast_state
from spatialdl.comm.gradients import Reducer, Replicated, average_, lane_of
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.reduce import max_over_ranks, sum_over_ranks
from spatialdl.spatial.channels.weights import (
    Plan,
    check_plan,
    divide,
    full_outputs,
    full_state,
    local_state,
    renew,
    uses_of,
    weights_of,
    without_data,
)
from spatialdl.spatial.gradient_checks import hook_result, note_averaged
from spatialdl.spatial.random import keyed
from spatialdl.spatial.random.streams import thread
from spatialdl.torch_internals import (
    current_graph_task_id,
    queue_callback,
    will_engine_execute_node,
)


def average_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Average the gradients of all parameters over all ranks of the mesh, after backward.

    Collective over the mesh. A parameter without a gradient on all ranks keeps none. If some ranks
    have no gradient, it counts as zero there. Clip or inspect gradients afterwards.

    Args:
        model: the network, the same on every rank.
        mesh: the ranks: those of the grid and of all data replicas.

    Raises:
        ValueError: a parameter is trained on some ranks only, or the ranks' weights differ, which
            is checked in the first steps and then occasionally.
    """
    Averaging(mesh.replicated(model), mesh.agreement).average()


def full_state_dict(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """The state dict of the whole network under its own names, on every rank.

    Collective over the mesh.

    Args:
        model: a network, or a `SpatialParallel` of one.
        mesh: its ranks.
    """
    return full_state(model.module if isinstance(model, SpatialParallel) else model)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, mesh: Mesh, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip averaged gradients by their norm over the whole network, divided weights included.

    Use it instead of ``torch.nn.utils.clip_grad_norm_``, which on a mesh with a tensor axis
    computes the norm of one rank's part. Collective over the mesh.

    Args:
        model: a network, or a `SpatialParallel` of one.
        mesh: its ranks.
        max_norm: the maximum norm of all gradients together.
        norm_type: p of the norm, above 0; ``math.inf`` for the largest gradient.

    Returns:
        The norm before clipping, a scalar, the same on every rank.
    """
    divided = {id(one.part) for one in weights_of(model).values() if not one.is_whole}
    parameters = [one for one in model.parameters() if one.grad is not None]
    parts = [one.grad for one in parameters if id(one) in divided and one.grad is not None]
    wholes = [one.grad for one in parameters if id(one) not in divided and one.grad is not None]
    of_parts, of_wholes = get_total_norm(parts, norm_type), get_total_norm(wholes, norm_type)
    if norm_type == math.inf:
        total = torch.maximum(max_over_ranks(mesh.tensor_comm, of_parts), of_wholes)
    else:
        powers = sum_over_ranks(mesh.tensor_comm, of_parts**norm_type) + of_wholes**norm_type
        total = powers ** (1 / norm_type)
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


class Averaging:
    """Averages gradients of a network over the ranks that hold copies of it.

    Either once, by `average`; or in each backward from `follow` on, those that are accumulated and
    those that ``torch.autograd.grad`` returns.

    Args:
        network: the network with the trained parameters.
        agreement: of its mesh.

    Attributes:
        accumulates: whether backwards accumulate local gradients, which the next backward with
            False averages.
    """

    accumulates = False

    def __init__(self, network: Replicated, agreement: Agreement | None) -> None:
        self._network, self._agreement = network, agreement
        self._reducer = Reducer([network])
        self._handles: list[Any] = []
        self._running = False
        self._returned: dict[int, Tensor] = {}
        self._task = -1
        self._returns = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Averaging:
        """Averages a copy of the network over the same ranks; creates no communicator."""
        module = copy.deepcopy(self._network.module, memo)
        return Averaging(replace(self._network, module=module), self._agreement)

    def follow(self) -> None:
        """Hook all parameters that are trained now.

        Raises:
            RuntimeError: the last backward raised an error.
        """
        if self._running:
            if current_graph_task_id() == -1:
                raise RuntimeError(
                    "the last backward raised an error before its gradients were averaged, and "
                    "ranks have sent different numbers of them: restart the program"
                )
        elif self._reducer.follow():
            for handle in self._handles:
                handle.remove()
            self._handles = [
                parameter.register_hook(partial(self._on_gradient, number))  # type: ignore[no-untyped-call]
                for number, parameter in enumerate(self._reducer.trained)
            ]

    def close(self) -> None:
        """Remove the hooks and stop averaging."""
        self._reducer.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def average(self) -> None:
        """Average the gradients that are not averaged yet; collective."""
        parameters = list(self._network.module.parameters())
        if self._agreement is not None:
            self._agreement.weights(parameters)
        self._reducer.reduce()
        self._running = False
        note_averaged(parameters)

    def _on_gradient(self, number: int, grad: Tensor) -> Tensor | None:
        """Hook of a gradient before it is accumulated or returned by ``torch.autograd.grad``."""
        task = current_graph_task_id()
        if task != self._task:
            self._task, self._returns = task, _is_returned(self._reducer.trained[number])
            self._returned = {}
        if not self._returns:
            if not self._running and not self.accumulates:
                self._running = True
                self._reducer.last_backward(self._network.module)
                queue_callback(self.average)
            return None
        if not self._returned:
            queue_callback(self._average_returned)
        self._returned[number] = grad.clone()
        return self._returned[number]

    @torch.no_grad()
    def _average_returned(self) -> None:
        returned, self._returned = self._returned, {}
        own = [number in returned for number in range(len(self._reducer.trained))]
        comm = self._network.comm
        counts = sum_over_ranks(comm, torch.tensor(own, dtype=torch.int32), "gradients returned")
        if bool(((counts > 0) & (counts < comm.size)).any()):
            raise RuntimeError(
                "torch.autograd.grad returned gradients of some parameters on some ranks only, "
                "which cannot be averaged: call backward(), which counts a missing gradient as zero"
            )
        average_((returned[n] for n in sorted(returned)), comm, self._network.copies)


def _is_returned(parameter: nn.Parameter) -> bool:
    """Whether the current backward returns the gradient of a leaf (``autograd.grad``)."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        will_engine_execute_node(node)
    except RuntimeError:  # PyTorch raises for such leaves
        return True
    return False


class SpatialParallel(nn.Module):
    """A network whose backward averages gradients over the ranks of a mesh.

    Weights and buffers of rank 0 are broadcast to all ranks. After ``loss.backward()`` gradients
    are averaged as by `spatialdl.average_gradients`, and so are those that ``torch.autograd.grad``
    returns for parameters. They are reduced in buckets, the last layers first, in the same order on
    all ranks: during backward with NCCL, else at its end, which is faster there. Changes of
    ``requires_grad`` take effect at the next forward.

    The state dict has the network's own names. Pickling (``torch.save``) stores the network itself,
    to be wrapped again. ``copy.deepcopy`` returns a copy over the same ranks.

    On a mesh with a tensor axis, the first forward determines how the network uses its weights, and
    divides them over the ranks of the axis. From then on parameters, their gradients and optimizer
    states are this rank's part. (Create an optimizer that allocates states before its first step,
    such as Adagrad, after the first forward.) `spatialdl.full_state_dict` returns whole weights.
    Outputs are whole, on every rank.

    Every rank must run backward the same number of times. Gradients that are accumulated over
    several backwards are averaged after each, which results in the same sum.

    Args:
        module: the network, with the same parameters and buffers on every rank.
        mesh: the ranks, all of which must wrap it.
        tensor_plan: overrides how weights are divided over the tensor axis. Keys are names of
            modules, with ``*`` and ``?``, which include submodules; the last match applies. Values
            are "output" or "input", the channels that are divided, or "replicate".

    Raises:
        ValueError: networks differ between ranks or have uninitialized weights; or the plan has
            unknown modules or values.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, *, tensor_plan: Plan = MappingProxyType({})
    ) -> None:
        super().__init__()
        check_plan(module, tensor_plan)
        self.module, self._plan = module, dict(tensor_plan)
        self._mesh, self._forwards = mesh, 0
        if mesh.tensor > 1:
            broadcast_state(module, mesh.tensor_comm)
            self._seed = mesh.comm.bcast(mesh.tensor_comm.bcast(torch.initial_seed()))
        broadcast_state(module, mesh.comm)
        network = replace(mesh.replicated(module), lane=lane_of(mesh.comm))
        self._averaging = Averaging(network, mesh.agreement)
        if mesh.tensor == 1:  # else weights are divided at the first forward
            self._averaging.follow()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._mesh.tensor > 1 and not self._forwards:
            comm = self._mesh.tensor_comm
            inputs, named = without_data((args, kwargs))
            uses = uses_of(self.module, comm, lambda shadow: shadow(*inputs, **named), self._plan)
            divide(self.module, uses, comm)
        self._forwards += 1
        if torch.is_grad_enabled():
            self._averaging.follow()
        if self._mesh.tensor == 1:
            return self.module(*args, **kwargs)
        with self._drawing():
            return hook_result((args, kwargs), full_outputs(self.module(*args, **kwargs)))

    def _drawing(self) -> AbstractContextManager[object]:
        """The context in which ranks of the tensor axis draw equal random numbers."""
        if thread.stream is not None:
            return nullcontext()
        return keyed(self._seed, self._forwards, self._mesh.replica)

    def _apply(self, fn: Any, recurse: bool = True) -> SpatialParallel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        renew(weights_of(self.module).values())
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The network's own state dict, without a prefix; divided weights are this rank's part."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load into the network itself; divided weights may be whole or this rank's part."""
        weights = weights_of(self.module).values()
        result = self.module.load_state_dict(local_state(self.module, state_dict), *args, **kwargs)
        renew(weights)  # assign=True replaces parameters
        return result

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load as a submodule, under the names of `state_dict`, without ``module.``."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpatialParallel:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._averaging.follow()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The network itself, so that loading it does not need this package.
        return operator.itemgetter(0), ((self.module,),)
