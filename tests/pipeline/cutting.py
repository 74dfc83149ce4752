"""Compares a network with its stages, cut wherever possible, over several training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from spatialdl.pipeline.partition import free_places, joints_of, leftovers
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.stage import OUTPUT, SAMPLES, Stage, run_stage
from spatialdl.pipeline.steps import IMAGE

SIZE = (3, 9, 7)


def stages_of(model: nn.Module, bounds: Sequence[int]) -> list[Stage]:
    network = Forward(model, SIZE)
    recording = network.of(SAMPLES, training=True)
    ends = [0, *bounds, len(recording.steps)]
    owned = leftovers(model, recording, ends)
    return [
        Stage(model, network, start, stop, own)
        for (start, stop), own in zip(pairwise(ends), owned, strict=True)
    ]


def run_stages(stages: Sequence[Stage], x: Tensor) -> Tensor:
    """Each stage gets copies, as from other ranks."""
    values = {IMAGE: x}
    for stage in stages:
        values |= stage({value: values[value].clone() for value in stage.takes}, len(x))
    return values[OUTPUT]


def run_in_turn(stages: Sequence[Stage], x: Tensor) -> Tensor:
    """What the stages give one after the other, without ranks."""
    values = {IMAGE: x}
    for stage in stages:
        values |= run_stage(stage, {v: values[v] for v in stage.takes}, len(x))
    return values[OUTPUT]


def places_of(model: nn.Module) -> tuple[list[int], list[int]]:
    """Where it may be cut in two, and where not."""
    recording = Forward(model, SIZE).of(SAMPLES, training=True)
    steps = len(recording.steps)
    free = free_places(joints_of(model, recording), steps) - {0}
    return sorted(free), sorted(set(range(1, steps)) - free)


def trained(
    model: nn.Module, forward: Callable[[Tensor], Tensor], steps: int = 3
) -> dict[str, Tensor]:
    """Losses, the last gradients, weights and buffers; an evaluation lies between the steps."""
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            x = torch.randn(2 + part, *SIZE, dtype=torch.float64, generator=draw)
            loss = forward(x).square().mean()
            loss.backward()
            found[f"loss {step} {part}"] = loss.detach()
        optimizer.step()
        with torch.no_grad():
            found[f"evaluated {step}"] = forward(x)
    grads = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | grads | {name: value.clone() for name, value in model.state_dict().items()}


def check_cut(model: nn.Module, *places: int) -> None:
    """That the stages are the network itself."""
    whole = copy.deepcopy(model)
    expected = trained(whole, whole)
    stages = stages_of(model, places)
    found = trained(model, lambda x: run_stages(stages, x))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{places} {n}: {m}"
        )
