"""Finds the cut of a list of steps that minimizes the cost of the heaviest stage.

Inputs and outputs of a stage add to its cost, so that of equally good cuts the one with less
traffic wins.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from math import inf
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from spatialdl.comm.communicator import Communicator
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.steps import Recording, Value, run_step
from spatialdl.random import keyed
from spatialdl.spatial.meta import computed_attributes, meta_copy, on_meta
from spatialdl.torch_internals import BatchNormBase, tree_leaves

OPERATIONS_PER_ELEMENT = 20
"""Cost of a memory-bound operation per element of its output, in multiply-adds."""

REPEATS = 3
"""Timed runs of a step, after one warm-up run."""


MOST = 1024
"""Maximum side, in pixels, of the images on which steps are timed."""


@dataclass(frozen=True)
class StepCosts:
    """Costs of a network's steps, and of passing their values between stages.

    Attributes:
        steps: in any unit.
        values: for both sides, in the same unit; values without an entry cost 0.
    """

    steps: Sequence[float]
    values: dict[Value, float]


Weigh = Callable[[nn.Module, Recording, tuple[int, ...]], StepCosts]
"""Computes costs from a network, its recording, and the image shape (N, C, *spatial) of it."""


def estimated(model: nn.Module, recording: Recording, image: tuple[int, ...]) -> StepCosts:
    """Estimate time by operation counts; memory-bound operations cost by the element."""
    counts = []
    values = _image(model, image, torch.device("meta"))
    shadow = meta_copy(model)
    with torch.no_grad(), on_meta(), keyed(0, 0):
        for step in recording.steps:
            with FlopCounterMode(display=False) as counter:
                run_step(step, shadow, values, torch.device("meta"))
            elements = sum(values[value].numel() for value in step.gives)
            counts.append(counter.get_total_flops() / 2 + OPERATIONS_PER_ELEMENT * elements)
    return StepCosts(
        counts, {v: float(OPERATIONS_PER_ELEMENT * n) for v, n in recording.sizes.items()}
    )


def memory(
    model: nn.Module, recording: Recording, image: tuple[int, ...], samples: int
) -> StepCosts:
    """Bytes that each step saves for backward, and three times its weights.

    Args:
        samples: number of samples whose activations are held at the same time.
    """
    shadow = meta_copy(model)
    shadow.train()
    for layer in shadow.modules():
        if isinstance(layer, BatchNormBase):  # in training it refuses a single value
            layer.eval()
    values = _image(shadow, image, torch.device("meta"))
    kept: list[float] = []

    held: dict[int, Tensor] = {
        weight.untyped_storage()._cdata: weight for weight in shadow.parameters()
    }

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            held[storage._cdata] = tensor
            kept[-1] += storage.nbytes() * samples / image[0]
        return tensor

    with on_meta(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for step in recording.steps:
            kept.append(0.0)
            with keyed(0, 0):
                run_step(step, shadow, values, torch.device("meta"))
            module = shadow.get_submodule(step.call) if isinstance(step.call, str) else None
            weights = module.parameters() if module is not None else ()
            kept[-1] += 3 * sum(weight.nbytes for weight in weights)
    return StepCosts(kept, {})


def measured(
    model: nn.Module, recording: Recording, image: tuple[int, ...], device: torch.device
) -> StepCosts:
    """Measure seconds of forward and backward of each step on this device, one by one.

    Images have at most `MOST` pixels a side, as whole ones may exceed device memory.

    Raises:
        ValueError: if the network has a different number of steps at this size.
    """
    small = (*image[:2], *(min(side, MOST) for side in image[2:]))
    if small != image:
        steps, image = len(recording.steps), small
        recording = Forward(model, small[1:]).of(small[0], training=True)
        if len(recording.steps) != steps:
            raise ValueError(
                f"parallel.balance=measured times the layers at {small[2]}x{small[3]} pixels, but "
                f"there the network has {len(recording.steps)} steps instead of {steps}: take "
                "parallel.balance=time"
            )
    memo: dict[int, object] = {
        id(attribute): attribute.detach() for attribute in computed_attributes(model)
    }
    model = copy.deepcopy(model, memo).to(device)
    values = _image(model, image, device)
    seconds = []
    for step in recording.steps:
        times = []
        for _ in range(1 + REPEATS):
            inputs = {value: _leaf(values[value]) for value in step.takes}
            _wait(device)
            started = time.perf_counter()
            with keyed(0, 0):
                run_step(step, model, inputs, device)
            outputs = [output for value in step.gives if (output := inputs[value]).requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            _wait(device)
            times.append(time.perf_counter() - started)
        seconds.append(median(times[1:]))
        values |= {value: inputs[value].detach() for value in step.gives}
    return StepCosts(seconds, {})


def weighing(kind: str, comm: Communicator, device: torch.device, microbatches: int) -> Weigh:
    """Return a cost function with the same result on all ranks.

    Args:
        kind: "time" by operation counts, "measured" on the device of rank 0, or "memory".
        microbatches: whose activations a stage may hold, of a sample each or more.

    Raises:
        ValueError: if `kind` is unknown.
    """
    if kind == "time":
        return estimated
    if kind == "memory":
        return partial(memory, samples=microbatches)
    if kind != "measured":
        raise ValueError(f"parallel.balance={kind} is unknown: take time, measured or memory")

    def together(model: nn.Module, recording: Recording, image: tuple[int, ...]) -> StepCosts:
        costs = measured(model, recording, image, device) if comm.rank == 0 else None
        shared: StepCosts = comm.bcast(costs)
        return shared

    return together


def _leaf(value: Tensor) -> Tensor:
    """A leaf that requires grad, times 1 so that the step may write into it."""
    return value.clone().requires_grad_(value.is_floating_point()) * 1


def _image(model: nn.Module, size: tuple[int, ...], device: torch.device) -> dict[Value, Tensor]:
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    return {Value(-1): torch.zeros(size, dtype=dtype, device=device)}


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def balance(
    costs: StepCosts,
    recording: Recording,
    widths: Sequence[int],
    places: Container[int] | None = None,
) -> list[int]:
    """Minimize the largest ``cost / width`` of a stage; exact.

    Args:
        widths: ranks of each stage.
        places: steps at which a stage may begin, at least as many as stages; by default any.

    Returns:
        Bounds: stage s has the steps ``[bounds[s], bounds[s + 1])``, at least one.
    """
    steps, table = len(costs.steps), _stage_costs(costs, recording)

    @cache
    def best(stage: int, stop: int) -> tuple[float, tuple[int, ...]]:
        """Cost of the heaviest stage, and bounds, of stages 0 to `stage` over `stop` steps."""
        if stage == 0:
            return table[0][stop] / widths[0], (0, stop)
        options = [(inf, (0,) * (stage + 2))]
        for start in range(stage, stop):
            if places is not None and start not in places:
                continue
            heaviest, bounds = best(stage - 1, start)
            own = table[start][stop] / widths[stage]
            options.append((max(heaviest, own), (*bounds, stop)))
        return min(options)

    return list(best(len(widths) - 1, steps)[1])


def _stage_costs(costs: StepCosts, recording: Recording) -> list[list[float]]:
    """``[start][stop]``: cost of the steps between them, with their inputs and outputs."""
    sums = [0.0, *accumulate(costs.steps)]
    uses: dict[Value, list[int]] = defaultdict(list)
    for number, step in enumerate(recording.steps):
        for value in set(step.takes):
            uses[value].append(number)
    for value in tree_leaves(recording.output, is_leaf=lambda leaf: isinstance(leaf, Value)):
        if isinstance(value, Value):
            uses[value].append(len(recording.steps) - 1)
    table = []
    for start in range(len(recording.steps)):
        changes = [0.0] * (len(recording.steps) + 2)
        for value, numbers in uses.items():
            cost = costs.values.get(value, 0.0)
            if value.step < start:  # an input, if any step of the stage takes it
                first = next((n for n in numbers if n >= start), None)
                if first is not None and value.step >= 0:
                    changes[first + 1] += cost
            elif numbers[-1] > value.step:  # an output, if a later step takes it
                changes[value.step + 1] += cost
                changes[numbers[-1] + 1] -= cost
        passing = list(accumulate(changes))[: len(sums)]
        rows = zip(sums, passing, strict=True)
        table.append([total - sums[start] + more for total, more in rows])
    return table
