"""Cuts a network into stages: at named places, or so that the slowest stage is as fast as possible.

Inputs and outputs of a stage add to its cost, so that of equally good cuts the one with less
traffic wins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import inf

import torch
from torch import Tensor, nn

from spatialdl.pipeline.recorder import CannotRecord
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.stage import SAMPLES, Stage, is_chain, scope_by_name
from spatialdl.pipeline.steps import IMAGE, Joint, Recording, Step, Value, run_step
from spatialdl.spatial.meta import dtype_of, meta_copy
from spatialdl.spatial.random import keyed
from spatialdl.spatial.recompute import recompute_blocks
from spatialdl.spatial.split import Names, module_names
from spatialdl.spatial.streaming.ledger import Ledger
from spatialdl.torch_internals import BatchNormBase, tree_leaves


def cut(
    model: nn.Module,
    widths: Sequence[int],
    names: Names = None,
    image_size: tuple[int, ...] = (3, 224, 224),
    recompute: bool = False,
    divided: bool = False,
) -> list[nn.Module]:
    """Cut `model` into as many stages as there are `widths`.

    State-dict names do not depend on the cut. Parameters that no step uses stay with the stage of
    those before them.

    Args:
        model: a network whose forward can be recorded; with one stage, any network.
        widths: number of ranks per stage, between which its work is divided.
        names: modules at which the second and later stages begin; by default the cut that
            minimizes the estimated time of the slowest stage.
        image_size: (C, H, W).
        recompute: whether blocks, and loose layers of a chain, are recomputed in backward.
        divided: whether ranks run the network on different samples.

    Returns:
        A `Stage` each. A single stage is the network itself unless it is a chain with layers to
        recompute, or writes into its weights or buffers.

    Raises:
        ValueError: if the network cannot be cut this way, or has no blocks to recompute.
    """
    blocks = recompute_blocks(model) if recompute else []
    network = Forward(model, image_size)
    try:
        recording = network.of(SAMPLES, training=True)
        evaluated = network.of(SAMPLES, training=False)
    except CannotRecord as reason:
        _check_divided(model, network, divided)
        if len(widths) == 1 and (blocks or not recompute):
            return [model]
        raise cannot_cut(model, len(widths), str(reason)) from reason
    _check_divided(model, network, divided)
    if len(widths) == 1:
        return [_whole(model, network, recording, blocks, recompute)]
    bounds = cut_bounds(
        model, recording, widths, names, lambda: estimated(model, evaluated, (SAMPLES, *image_size))
    )
    owned = leftovers(model, recording, bounds)
    return [
        Stage(model, network, start, stop, own, recompute)
        for (start, stop), own in zip(pairwise(bounds), owned, strict=True)
    ]


def _check_divided(model: nn.Module, network: Forward, divided: bool) -> None:
    """Refuse networks that change attributes: ranks with different samples would diverge."""
    if divided and network.kept:
        names = ", ".join(sorted(map(str, network.kept)))
        raise ValueError(
            f"the forward of {type(model).__name__} changes {names} each time, which replicas, "
            "GEMS and parallel.local_dp cannot synchronize: make it a buffer modified in place, "
            "or take parallel=sp, lp or pp"
        )


def cut_bounds(
    model: nn.Module,
    recording: Recording,
    widths: Sequence[int],
    names: Names,
    costs: Callable[[], StepCosts],
) -> list[int]:
    """Step numbers at which the stages begin, and the end.

    Args:
        recording: of `model` in training.
        widths, names: see `cut`.
        costs: of the steps; called only without names.

    Raises:
        ValueError: if the network cannot be cut this way.
    """
    _check_steps(model, recording, len(widths))
    joints = joints_of(model, recording)
    if named := module_names(names):
        bounds = named_bounds(recording, named, len(widths))
    else:
        places = free_places(joints, len(recording.steps))
        if len(places) < len(widths):
            reasons = dict.fromkeys(joint.reason for joint in joints)
            raise cannot_cut(model, len(widths), "; ".join(list(reasons)[:3]))
        bounds = balance(costs(), recording, widths, places)
    _check_together(joints, bounds)
    return bounds


def _check_steps(model: nn.Module, recording: Recording, stages: int) -> None:
    """Check that there are enough steps and that random numbers do not depend on the layout."""
    if recording.loose:
        raise cannot_cut(
            model,
            stages,
            f"its forward draws random numbers by '{recording.loose}' outside of a module: use "
            "nn.Dropout or similar, which draws the same numbers in every layout",
        )
    if len(recording.steps) < stages:
        count = len(recording.steps)
        raise cannot_cut(
            model,
            stages,
            f"its forward has only {count} step{'s' * (count != 1)} "
            f"({', '.join(step.name or type(model).__name__ for step in recording.steps)})",
        )


def _whole(
    model: nn.Module, network: Forward, recording: Recording, blocks: list[str], recompute: bool
) -> nn.Module:
    steps = recording.steps
    if recompute and len(steps) > 1 and is_chain(recording):
        (owned,) = leftovers(model, recording, [0, len(steps)])
        return Stage(model, network, 0, len(steps), owned, recompute)
    if recompute and not blocks:
        raise ValueError(
            f"parallel.recompute=block finds no blocks in {type(model).__name__}: a block is an "
            "element of an nn.Sequential or nn.ModuleList whose class occurs there at least twice, "
            "with at least two convolutions or linear layers; leave it out, or call "
            "torch.utils.checkpoint in the network"
        )
    if recording.written_state and not recording.loose:  # it saves copies for backward
        return Stage(model, network, 0, len(steps), leftovers(model, recording, [0, len(steps)])[0])
    if recording.drawing and not recording.loose and "" not in recording.drawing:
        scope_by_name(model, recording)
    return model


def cannot_cut(model: nn.Module, stages: int, reason: str) -> ValueError:
    """The error for a network that cannot be cut into `stages` stages."""
    return ValueError(
        f"{type(model).__name__} cannot be cut into {stages} stages: {reason}; use fewer stages, "
        "or take parallel=sp or dp, which do not cut the network"
    )


def joints_of(model: nn.Module, recording: Recording) -> list[Joint]:
    """Find steps that must be in the same stage: they share a weight, or memory written to.

    Two stages would train copies of a weight separately. Buffers that no step changes may be in
    several stages.
    """
    constant = {id(buffer) for buffer in model.buffers()}
    for path, buffer in model.named_buffers():
        if path in recording.written_state:
            constant.discard(id(buffer))
    for module in model.modules():
        if isinstance(module, BatchNormBase):
            constant -= {id(buffer) for buffer in module.buffers()}
    joints = list(recording.joints)
    users: dict[int, tuple[int, str]] = {}
    for number, step in enumerate(recording.steps):
        for path, tensor in state_of(model, step):
            first, where = users.get(id(tensor), (number, path))
            if first != number and id(tensor) not in constant:
                joints.append(Joint(first, number, f"'{where}' and '{path}' share a weight"))
            users[id(tensor)] = number, path
    return joints


def _check_together(joints: Sequence[Joint], bounds: Sequence[int]) -> None:
    for first, last, reason in joints:
        stage_of_first, stage_of_last = (bisect_right(bounds, step) - 1 for step in (first, last))
        if stage_of_first != stage_of_last:
            raise ValueError(
                f"{reason}, but are in stages {stage_of_first} and {stage_of_last}: choose "
                "parallel.cut so that one stage holds both"
            )


def free_places(joints: Sequence[Joint], steps: int) -> set[int]:
    """Step numbers at which a stage may begin."""
    taken = {place for joint in joints for place in range(joint.first + 1, joint.last + 1)}
    return set(range(steps)) - taken


def state_of(model: nn.Module, step: Step) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that a step uses, each with the module's path or its own."""
    state: list[tuple[str, Tensor]] = []
    if isinstance(step.call, str):
        module = model.get_submodule(step.call)
        state = [(step.call, tensor) for tensor in (*module.parameters(), *module.buffers())]
    for path in step.attributes:
        holder, _, name = path.rpartition(".")
        state.append((path, getattr(model.get_submodule(holder), name)))
    return state


def leftovers(model: nn.Module, recording: Recording, bounds: Sequence[int]) -> list[list[str]]:
    """Per stage, the parameters and buffers without a step; they follow the one before them."""
    stage_of: dict[int, int] = {}
    for number, (start, stop) in enumerate(pairwise(bounds)):
        for step in recording.steps[start:stop]:
            for _, tensor in state_of(model, step):
                stage_of[id(tensor)] = number
    leftover: list[list[str]] = [[] for _ in bounds[1:]]
    stage = 0
    everything = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for path, tensor in everything:
        if id(tensor) in stage_of:
            stage = stage_of[id(tensor)]
        else:
            leftover[stage].append(path)
    return leftover


def named_bounds(recording: Recording, names: Sequence[str], stages: int) -> list[int]:
    """Step numbers at which the named stages begin, and the end.

    Raises:
        ValueError: if the network does not call modules of these names, or in another order.
    """
    if len(names) != stages - 1:
        raise ValueError(
            f"parallel.cut names {len(names)} places ({', '.join(names)}), but {stages} stages "
            f"need {stages - 1}"
        )
    paths = [step.path for step in recording.steps]
    bounds = [0]
    for name in names:
        places = [i for i, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
        if not places:
            known = dict.fromkeys(path for path in paths[1:] if path)
            raise ValueError(
                f"parallel.cut: the network calls no module '{name}'; it can be cut before "
                f"{', '.join(known)}"
            )
        bounds.append(places[0])
    bounds.append(len(paths))
    if any(stop <= start for start, stop in pairwise(bounds)):
        raise ValueError(
            f"parallel.cut={list(names)} leaves a stage without layers: name places in the order "
            f"of the network, none of them its first layer '{paths[0]}'"
        )
    return bounds


OPERATIONS_PER_ELEMENT = 20
"""Cost of a memory-bound operation per element of its output, in multiply-adds."""


@dataclass(frozen=True)
class StepCosts:
    """Costs of a network's steps, and of passing their values between stages.

    Attributes:
        steps: in any unit.
        values: for both sides, in the same unit; values without an entry cost 0.
    """

    steps: Sequence[float]
    values: dict[Value, float]


def estimated(model: nn.Module, recording: Recording, image: tuple[int, ...]) -> StepCosts:
    """Estimate time by operation counts; memory-bound operations cost by the element.

    Args:
        recording: of the network in evaluation, for images of shape `image`.
        image: (N, C, *spatial).
    """
    counts, passing = [], dict[Value, float]()
    values = {IMAGE: torch.zeros(image, dtype=dtype_of(model), device="meta")}
    shadow, ledger = meta_copy(model), Ledger()
    with torch.no_grad(), ledger.watch(), keyed(0, 0):
        for ledger.part, step in enumerate(recording.steps):
            run_step(step, shadow, values, torch.device("meta"))
            flops = sum(one.flops for one in ledger.work.get(("forward", ledger.part), ()))
            own = {v: float(OPERATIONS_PER_ELEMENT * values[v].numel()) for v in step.gives}
            counts.append(flops / 2 + sum(own.values()))
            passing |= own
    return StepCosts(counts, passing)


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
