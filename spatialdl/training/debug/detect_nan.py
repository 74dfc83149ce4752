"""``debug=detect_nan``: where the first number appeared that is NaN or infinite.

Smallest and largest value of every activation, loss and gradient are taken as they come, and looked
at when the step is done, before any weight has changed. So nobody waits for a GPU, no rank leaves
others waiting in the middle of a step, and all of them agree on what came first.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from spatialdl.channels.tensor import ChannelTensor
from spatialdl.comm.communicator import Communicator
from spatialdl.errors import NotFinite
from spatialdl.pipeline.action import Action
from spatialdl.pipeline.own_tile import Criterion
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.spatial.tensor import SpatialTensor

_MOST_OTHERS = 8
_FORWARD, _LOSS, _BACKWARD, _AVERAGED = range(4)


class ComputationOrder(NamedTuple):
    """When something was computed; the earlier, the smaller, on whatever rank.

    What comes first in one process that does micro-batch after micro-batch comes first here.

    Attributes:
        phase: forward, loss, backward, averaged gradients.
        stage: in forward as they are numbered, in backward the other way round.
        number: of what this rank has computed in the step; ranks of one grid count alike.
    """

    microbatch: int
    phase: int
    stage: int
    number: int


class Finding(NamedTuple):
    """Something that is not finite."""

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
    """Looks at all that this rank computes in training.

    Args:
        pipeline: its stages get hooks.
        world: all ranks.
        gradients: whether to look at them, too; where losses are scaled they may overflow.
    """

    def __init__(
        self, pipeline: PipelineRuntime, world: Communicator, gradients: bool = True
    ) -> None:
        self._pipeline, self._world, self._gradients = pipeline, world, gradients
        self._ranges: list[Tensor] = []  # smallest and largest value
        self._places: list[tuple[ComputationOrder, str]] = []
        self._outputs = WeakIdKeyDictionary()  # of modules, looked at already
        for module in pipeline.stages.values():
            for name, layer in module.named_modules():
                self._follow(layer, f"{name or 'the network'} ({type(layer).__name__})")
            for name, parameter in module.named_parameters():
                if gradients and parameter.requires_grad:
                    self._follow_gradient(parameter, f"gradient of {name}, backward")
        pipeline.criterion = self._watched(pipeline.criterion)

    def check(self, step: int) -> None:
        """After the forward and backward of a step; all ranks call it.

        Raises:
            NotFinite: on all ranks, if any of them has found something.
        """
        everybody = self._world.allgather(self._first())
        found = sorted(one for one in everybody if one is not None)
        if not found:
            return
        others = [str(one) for one in found[1:] if one.rank != found[0].rank]
        text = f"step {step}: {found[0]}"
        if others:
            hidden = len(others) - _MOST_OTHERS
            more = f"; and {hidden} more ranks" if hidden > 0 else ""
            text += f"; what other ranks saw first: {'; '.join(others[:_MOST_OTHERS])}{more}"
        raise NotFinite(text)

    # --- what is seen

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
        """Neither validation nor what runs again in backward."""
        doing = self._pipeline.doing
        return doing is not None and doing.kind == "forward"

    def _follow_gradient(self, tensor: Tensor, where: str) -> None:
        def hook(grad: Tensor) -> None:
            if self._pipeline.doing is not None:
                self._note(grad, where, _BACKWARD)

        own = tensor.part if isinstance(tensor, ChannelTensor) else tensor
        if own.requires_grad:  # or an operation refuses it, and says why
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
        local = _local(tensor)
        if local.numel() == 0:
            return
        doing = self._pipeline.doing
        assert isinstance(doing, Action)
        stage = -doing.stage if phase == _BACKWARD else doing.stage
        self._places.append(
            (ComputationOrder(doing.microbatch, phase, stage, len(self._places)), where)
        )
        self._ranges.append(torch.stack(torch.aminmax(local)).double())

    def _averaged(self) -> Iterator[tuple[ComputationOrder, str, Tensor]]:
        """Gradients as the optimizer gets them: what no hook has seen."""
        for stage, module in self._pipeline.stages.items():
            for name, parameter in module.named_parameters():
                if self._gradients and parameter.grad is not None:
                    moment = ComputationOrder(2**31, _AVERAGED, -stage, len(self._places))
                    yield moment, f"gradient of {name}, averaged", parameter.grad

    def _first(self) -> Finding | None:
        for moment, where, grad in self._averaged():
            local = _local(grad)
            if local.numel():
                self._places.append((moment, where))
                self._ranges.append(torch.stack(torch.aminmax(local)).double())
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
    """What this rank has of it."""
    if isinstance(tensor, ChannelTensor):
        tensor = tensor.part
    if isinstance(tensor, SpatialTensor):
        return tensor._tile.detach()
    if hasattr(tensor, "to_local"):
        return tensor.to_local().detach()  # type: ignore[no-any-return]
    return tensor.detach()
