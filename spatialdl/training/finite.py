"""Stop a run before NaN or infinity reaches the weights, and say where it began.

After each backward only the loss and the averaged gradients are checked: one pass over as many
numbers as the network has weights, and one small all-reduce. If a value is not finite, the step is
repeated from the same weights, samples and random numbers with a `NanWatch`: it records the minimum
and maximum of every activation, loss and gradient, and checks them at the end of the step. So no
host waits for its GPU, no rank leaves a step early, and all ranks agree on the first value.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.weak import WeakIdKeyDictionary

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import shard_of
from spatialdl.errors import NotFinite
from spatialdl.pipeline.own_tile import Criterion
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.simulate import Action
from spatialdl.spatial.channels.tensor import ChannelTensor
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import tree_leaves
from spatialdl.training.checkpoints.content import random_states, restore_random

_MOST_OTHERS = 8
_FORWARD, _LOSS, _BACKWARD, _AVERAGED = range(4)


class Guard:
    """Checks losses, gradients and weights of this rank; collective on all ranks.

    Args:
        pipeline: the network on its ranks.
        world: all ranks.
        gradients: whether to check gradients; not for losses scaled for float16, which may
            overflow and are handled by the update.
    """

    def __init__(
        self, pipeline: PipelineRuntime, world: Communicator, gradients: bool = True
    ) -> None:
        self._pipeline, self._world, self._gradients = pipeline, world, gradients

    def run(self, step: int, work: Callable[[], float]) -> float:
        """Run forward and backward of a step, before its update.

        Args:
            step: number of the step, for messages.
            work: runs them and returns this rank's part of the loss; called again after a failure.

        Returns:
            The result of `work`.

        Raises:
            NotFinite: on all ranks, if a value is not finite on any rank.
        """
        random = random_states(self._pipeline.device)
        loss = work()
        finite = math.isfinite(loss) and (not self._gradients or are_finite(self._grads()))
        failed = torch.tensor([not finite], dtype=torch.float64)
        if float(self._world.all_reduce(failed)) == 0:
            return loss
        ranks = [rank for rank, one in enumerate(self._world.allgather(finite)) if not one]
        watch = NanWatch(self._pipeline, self._world, gradients=self._gradients)
        restore_random(random, self._pipeline.device)
        work()
        watch.check(step)
        raise NotFinite(
            f"step {step}: the loss or a gradient was not finite on rank {ranks[0]}, but was "
            "finite when the step was repeated: a hardware fault, or the network uses its own "
            "random numbers"
        )

    def check_weights(self, step: int) -> None:
        """Check the weights before a checkpoint, since the update itself may overflow.

        Raises:
            NotFinite: on all ranks, if a weight on any rank is not finite.
        """
        own = None
        if not are_finite(shard_of(one) for one in self._pipeline.parameters()):
            own = next(
                name
                for name, one in self._pipeline.named_parameters()
                if not are_finite([shard_of(one)])
            )
        gathered = self._world.allgather((own, socket.gethostname()))
        for rank, (name, host) in enumerate(gathered):
            if name is not None:
                raise NotFinite(
                    f"step {step}: {name} is not finite after the update, rank {rank} on "
                    f"{host}; no checkpoint is written"
                )

    def _grads(self) -> Iterable[Tensor]:
        return (shard_of(p.grad) for p in self._pipeline.parameters() if p.grad is not None)


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite; waits for the device once."""
    nonempty = [one.detach() for one in tensors if one.numel()]
    if math.isfinite(float(get_total_norm(nonempty))):  # much faster, and rarely overflows
        return True
    return all(bool(one.isfinite().all()) for one in nonempty)


# --- where it began


class ComputationOrder(NamedTuple):
    """Sort key of a computation, comparable between ranks.

    The order is that of a single process that runs one micro-batch after another.

    Attributes:
        microbatch: number of the micro-batch.
        phase: forward, loss, backward, averaged gradients.
        stage: number of the stage in forward, its negative in backward.
        number: count of this rank's computations in the step; the same on all ranks of a grid.
    """

    microbatch: int
    phase: int
    stage: int
    number: int


class Finding(NamedTuple):
    """A value that is not finite."""

    moment: ComputationOrder
    rank: int
    host: str
    value: str
    where: str

    def __str__(self) -> str:
        micro = "" if self.moment.phase == _AVERAGED else f", micro-batch {self.moment.microbatch}"
        stage = abs(self.moment.stage)
        return (
            f"{self.value} in {self.where}{micro}, stage {stage}, rank {self.rank} on {self.host}"
        )


class NanWatch:
    """Records the ranges of all values that this rank computes in training.

    Args:
        pipeline: the network; its stages get hooks.
        world: all ranks.
        gradients: whether to record gradients; those of scaled losses may overflow.
    """

    def __init__(
        self, pipeline: PipelineRuntime, world: Communicator, gradients: bool = True
    ) -> None:
        self._pipeline, self._world, self._gradients = pipeline, world, gradients
        self._ranges: list[Tensor] = []  # minimum and maximum
        self._places: list[tuple[ComputationOrder, str]] = []
        self._outputs = WeakIdKeyDictionary()  # outputs of modules that are already recorded
        for module in pipeline.stages.values():
            for name, layer in module.named_modules():
                self._follow(layer, f"{name or 'the network'} ({type(layer).__name__})")
            for name, parameter in module.named_parameters():
                if gradients and parameter.requires_grad:
                    self._follow_gradient(parameter, f"gradient of {name}, backward")
        pipeline.criterion = self._watched(pipeline.criterion)

    def check(self, step: int) -> None:
        """Check the values of a step after its backward; collective, all ranks must call it.

        Raises:
            NotFinite: on all ranks, if a value is not finite on any rank.
        """
        gathered = self._world.allgather(self._first())
        findings = sorted(one for one in gathered if one is not None)
        if not findings:
            return
        others = [str(one) for one in findings[1:] if one.rank != findings[0].rank]
        text = f"step {step}: {findings[0]}"
        if others:
            hidden = len(others) - _MOST_OTHERS
            more = f"; and {hidden} more ranks" if hidden > 0 else ""
            text += f"; first on other ranks: {'; '.join(others[:_MOST_OTHERS])}{more}"
        raise NotFinite(text)

    # --- hooks

    def _follow(self, layer: nn.Module, name: str) -> None:
        is_leaf = next(layer.children(), None) is None

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_forward:
                return
            for tensor in _numbers((args, kwargs)):
                if tensor not in self._outputs:
                    self._note(tensor, f"the input of {name}, forward")
                    self._outputs[tensor] = True
                if is_leaf and self._gradients and tensor.requires_grad:
                    self._follow_gradient(tensor, f"{name}, backward")

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_forward:
                for tensor in _numbers(output):
                    self._note(tensor, f"{name}, forward")
                    self._outputs[tensor] = True

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after)

    @property
    def _is_forward(self) -> bool:
        """Whether a forward action runs, not validation or recomputation in backward."""
        doing = self._pipeline.doing
        return doing is not None and doing.kind == "forward"

    def _follow_gradient(self, tensor: Tensor, where: str) -> None:
        def hook(grad: Tensor) -> None:
            if self._pipeline.doing is not None:
                self._note(grad, where, _BACKWARD)

        own = tensor.part if isinstance(tensor, ChannelTensor) else tensor
        if own.requires_grad:  # otherwise an operation raises a more specific error
            own.register_hook(hook)  # type: ignore[no-untyped-call]

    def _watched(self, criterion: Criterion) -> Criterion:
        def watched(output: Tensor, target: Tensor) -> Tensor:
            if self._gradients and isinstance(output, Tensor) and output.requires_grad:
                self._follow_gradient(output, "the loss, backward")
            loss = criterion(output, target)
            self._note(loss.detach(), "the loss, forward", _LOSS)
            return loss

        return watched

    def _note(self, tensor: Tensor, where: str, phase: int = _FORWARD) -> None:
        doing = self._pipeline.doing
        assert isinstance(doing, Action)
        stage = -doing.stage if phase == _BACKWARD else doing.stage
        self._record(tensor, where, doing.microbatch, phase, stage)

    def _record(self, tensor: Tensor, where: str, microbatch: int, phase: int, stage: int) -> None:
        local = _local(tensor)
        if local.numel():
            order = ComputationOrder(microbatch, phase, stage, len(self._places))
            self._places.append((order, where))
            self._ranges.append(torch.stack(torch.aminmax(local)).double())

    def _first(self) -> Finding | None:
        for stage, module in self._pipeline.stages.items():
            for name, one in module.named_parameters():
                if self._gradients and one.grad is not None:  # averaged, which no hook records
                    where = f"gradient of {name}, averaged"
                    self._record(one.grad, where, 2**31, _AVERAGED, -stage)
        places, ranges = self._places, self._ranges
        self._places, self._ranges = [], []
        if not ranges:
            return None
        values = torch.stack(ranges)
        bad = [int(n) for n in (~values.isfinite()).any(1).nonzero()]
        if not bad:
            return None
        first = min(bad, key=lambda number: places[number][0])
        value = "NaN" if any(map(math.isnan, values[first].tolist())) else "Inf"
        moment, where = places[first]
        return Finding(moment, self._world.rank, socket.gethostname(), value, where)


def _numbers(values: Any) -> Iterator[Tensor]:
    for one in tree_leaves(values):
        if isinstance(one, Tensor) and one.is_floating_point():
            yield one


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    if isinstance(tensor, ChannelTensor):
        tensor = tensor.part
    if isinstance(tensor, SpatialTensor):
        return tensor._tile.detach()
    if hasattr(tensor, "to_local"):
        return tensor.to_local().detach()  # type: ignore[no-any-return]
    return tensor.detach()
