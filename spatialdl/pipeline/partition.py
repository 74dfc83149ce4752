"""Cutting a network into stages, at named places or so that they are balanced."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spatialdl.pipeline.balance import StepCosts, Weigh, balance, estimated
from spatialdl.pipeline.recording import CannotRecord, Forward
from spatialdl.pipeline.stage import SAMPLES, Stage, is_chain, scope_by_name
from spatialdl.pipeline.steps import Joint, Recording, Step
from spatialdl.spatial.gather import Names, module_names
from spatialdl.spatial.recompute import recompute_blocks


def cut(
    model: nn.Module,
    widths: Sequence[int],
    names: Names = None,
    image_size: tuple[int, ...] = (3, 224, 224),
    recompute: bool = False,
    weigh: Weigh = estimated,
    divided: bool = False,
    compiled: bool = False,
) -> list[nn.Module]:
    """Cut `model` into as many stages as there are `widths`.

    State-dict names do not change by cutting. What no step uses, as a head that is left out, goes
    with what stands before it in the network.

    Args:
        model: a network whose forward can be recorded; with one stage, any network.
        widths: ranks of each stage, between which its work is divided.
        names: modules with which the second and later stages begin; if not given, the cut that
            makes the heaviest stage lightest.
        image_size: (C, H, W).
        recompute: whether blocks, and the loose layers of a chain, run again in backward.
        weigh: what is balanced.
        divided: whether ranks run it on samples of their own.
        compiled: whether to cut a network of one stage, too, see `pipeline.compiled`.

    Returns:
        For several stages each is a `Stage`; for one the network itself, unless it is a chain with
        layers to recompute, writes into its weights, or is to be compiled.

    Raises:
        ValueError: if the network cannot be cut so, or has no blocks to recompute.
    """
    blocks = recompute_blocks(model) if recompute else []
    network = Forward(model, image_size)
    try:
        recording = network.of(SAMPLES, training=True)
        evaluated = network.of(SAMPLES, training=False)
    except CannotRecord as reason:
        _check_divided(model, network, divided)
        if len(widths) == 1 and (blocks or not recompute) and not compiled:
            return [model]
        if len(widths) == 1 and compiled:
            raise _cannot_compile(model, str(reason)) from reason
        raise cannot_cut(model, len(widths), str(reason)) from reason
    _check_divided(model, network, divided)
    if len(widths) == 1 and not compiled:
        return [_whole(model, network, recording, blocks, recompute)]
    if len(widths) == 1:
        bounds = _one_stage(model, recording)
    else:
        bounds = cut_bounds(
            model, recording, widths, names, lambda: weigh(model, evaluated, (SAMPLES, *image_size))
        )
    owned = leftovers(model, recording, bounds)
    return [
        Stage(model, network, start, stop, own, recompute)
        for (start, stop), own in zip(pairwise(bounds), owned, strict=True)
    ]


def _one_stage(model: nn.Module, recording: Recording) -> list[int]:
    """The bounds of a stage that is to be compiled, of the whole network."""
    if recording.loose:
        raise _cannot_compile(
            model,
            f"its forward draws random numbers by '{recording.loose}' outside of a module: use "
            "nn.Dropout or the like",
        )
    if any(step.call == "" for step in recording.steps):
        raise _cannot_compile(model, "it is one layer, or has hooks of its own")
    return [0, len(recording.steps)]


def _cannot_compile(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"trainer.compile=true cannot tell the steps of {type(model).__name__} apart: {reason}; "
        "leave it out"
    )


def _check_divided(model: nn.Module, network: Forward, divided: bool) -> None:
    """Ranks with samples of their own would each count for themselves."""
    if divided and network.kept:
        names = ", ".join(sorted(map(str, network.kept)))
        raise ValueError(
            f"the forward of {type(model).__name__} changes {names} each time, which replicas, "
            "GEMS and parallel.local_dp cannot keep alike: make it a buffer that is changed in "
            "place, or take parallel=sp, lp or pp"
        )


def cut_bounds(
    model: nn.Module,
    recording: Recording,
    widths: Sequence[int],
    names: Names,
    costs: Callable[[], StepCosts],
) -> list[int]:
    """The steps with which the stages begin, and the end.

    Args:
        recording: of `model` in training.
        widths, names: see `cut`.
        costs: of the steps, asked for where no names are given.

    Raises:
        ValueError: if the network cannot be cut so.
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
    """That there are enough, which draw the same random numbers in every layout."""
    if recording.loose:
        raise cannot_cut(
            model,
            stages,
            f"its forward draws random numbers by '{recording.loose}' outside of a module: use "
            "nn.Dropout or the like, which draws the same numbers in every layout",
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
    writes_weights = recording.written_state & {name for name, _ in model.named_parameters()}
    if recompute and len(steps) > 1 and is_chain(recording):
        (owned,) = leftovers(model, recording, [0, len(steps)])
        return Stage(model, network, 0, len(steps), owned, recompute)
    if recompute and not blocks:
        raise ValueError(
            f"parallel.recompute=block finds no blocks in {type(model).__name__}: blocks are the "
            "elements of an nn.Sequential or nn.ModuleList whose class comes there twice or more, "
            "with at least two convolutions or linear layers each; leave it out, or call "
            "torch.utils.checkpoint in the network"
        )
    if writes_weights and not recording.loose:
        return Stage(model, network, 0, len(steps), leftovers(model, recording, [0, len(steps)])[0])
    if recording.drawing and not recording.loose and "" not in recording.drawing:
        scope_by_name(model, recording)
    return model


def cannot_cut(model: nn.Module, stages: int, reason: str) -> ValueError:
    """The refusal of a network that cannot be cut into so many stages."""
    return ValueError(
        f"{type(model).__name__} cannot be cut into {stages} stages: {reason}; use fewer stages, "
        "or take parallel=sp or dp, which cut no network"
    )


def joints_of(model: nn.Module, recording: Recording) -> list[Joint]:
    """Steps that must be in one stage: they share a weight, or memory that is written to.

    A weight in two stages would be trained apart in each of them. Buffers that no step changes may
    be in several.
    """
    constant = {id(buffer) for buffer in model.buffers()}
    for path, buffer in model.named_buffers():
        if path in recording.written_state:
            constant.discard(id(buffer))
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            constant -= {id(buffer) for buffer in module.buffers()}
    found = list(recording.joints)
    users: dict[int, tuple[int, str]] = {}
    for number, step in enumerate(recording.steps):
        for path, one in state_of(model, step):
            first, where = users.get(id(one), (number, path))
            if first != number and id(one) not in constant:
                found.append(Joint(first, number, f"'{where}' and '{path}' share a weight"))
            users[id(one)] = number, path
    return found


def _check_together(joints: Sequence[Joint], bounds: Sequence[int]) -> None:
    for first, last, reason in joints:
        one, two = (bisect_right(bounds, step) - 1 for step in (first, last))
        if one != two:
            raise ValueError(
                f"{reason}, but lie in stages {one} and {two}: choose parallel.cut so that one "
                "stage holds both"
            )


def free_places(joints: Sequence[Joint], steps: int) -> set[int]:
    """The steps with which a stage may begin."""
    taken = {place for joint in joints for place in range(joint.first + 1, joint.last + 1)}
    return set(range(steps)) - taken


def state_of(model: nn.Module, step: Step) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that a step uses, by the path of the module or of themselves."""
    found: list[tuple[str, Tensor]] = []
    if isinstance(step.call, str):
        module = model.get_submodule(step.call)
        found = [(step.call, one) for one in (*module.parameters(), *module.buffers())]
    for path in step.attributes:
        holder, _, name = path.rpartition(".")
        found.append((path, getattr(model.get_submodule(holder), name)))
    return found


def leftovers(model: nn.Module, recording: Recording, bounds: Sequence[int]) -> list[list[str]]:
    """Per stage the parameters and buffers that no step uses: with the one that comes before."""
    stage_of: dict[int, int] = {}
    for number, (start, stop) in enumerate(pairwise(bounds)):
        for step in recording.steps[start:stop]:
            for _, one in state_of(model, step):
                stage_of[id(one)] = number
    found: list[list[str]] = [[] for _ in bounds[1:]]
    stage = 0
    everything = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for path, one in everything:
        if id(one) in stage_of:
            stage = stage_of[id(one)]
        else:
            found[stage].append(path)
    return found


def named_bounds(recording: Recording, names: Sequence[str], stages: int) -> list[int]:
    """The steps with which stages begin, and the end.

    Raises:
        ValueError: if the network does not call modules of these names, or not in this order.
    """
    if len(names) != stages - 1:
        raise ValueError(
            f"parallel.cut names {len(names)} places ({', '.join(names)}), but {stages} stages "
            f"need {stages - 1}"
        )
    paths = [step.path for step in recording.steps]
    bounds = [0]
    for name in names:
        found = [i for i, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
        if not found:
            known = dict.fromkeys(path for path in paths[1:] if path)
            raise ValueError(
                f"parallel.cut: the network calls no module '{name}'; it can be cut before "
                f"{', '.join(known)}"
            )
        bounds.append(found[0])
    bounds.append(len(paths))
    if any(stop <= start for start, stop in pairwise(bounds)):
        raise ValueError(
            f"parallel.cut={list(names)} leaves a stage without layers: name places in the order "
            f"of the network, none of them its first layer '{paths[0]}'"
        )
    return bounds
