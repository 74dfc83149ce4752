"""Averages gradients of a network over ranks during backward."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.comm.agreement import Agreement
from spatialdl.comm.gradients import Reducer, Replicated, average_
from spatialdl.comm.reduce import sum_over_ranks
from spatialdl.spatial.agreed import note_averaged
from spatialdl.torch_internals import (
    current_graph_task_id,
    queue_callback,
    will_engine_execute_node,
)


class Averaging:
    """Averages accumulated gradients and those returned by ``torch.autograd.grad``.

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
                parameter.register_hook(partial(self._seen, number))  # type: ignore[no-untyped-call]
                for number, parameter in enumerate(self._reducer.trained)
            ]

    def close(self) -> None:
        """Remove the hooks and stop averaging."""
        self._reducer.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _finish(self) -> None:
        """Average the remaining gradients at the end of backward."""
        self._reducer.reduce()
        self._running = False
        note_averaged(self._reducer.trained)
        if self._agreement is not None:
            self._agreement.weights(self._reducer.trained)

    def _seen(self, number: int, grad: Tensor) -> Tensor | None:
        """Hook of a gradient before it is accumulated or returned by ``torch.autograd.grad``."""
        task = current_graph_task_id()
        if task != self._task:
            self._task, self._returns = task, _is_returned(self._reducer.trained[number])
            self._returned = {}
        if not self._returns:
            if not self._running and not self.accumulates:
                self._running = True
                self._reducer.last_backward(self._network.module)
                queue_callback(self._finish)
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
