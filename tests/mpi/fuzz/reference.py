"""The same run on one process: plain PyTorch in a loop, with nothing of ours but LARS and LAMB.

It accumulates over the slices of a batch: micro-batch by micro-batch, within it replica by replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from pkgutil import resolve_name
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spatialdl.training.optimization.layer_wise import LAMB, LARS
from tests.mpi.fuzz.cases import CLASSES, Case
from tests.mpi.fuzz.networks import network

UNKNOWN = 255
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Data:
    """What a run trains on: images uint8 (N, *spatial, 3), targets, and the same to validate on."""

    images: np.ndarray
    targets: np.ndarray
    validation_images: np.ndarray
    validation_targets: np.ndarray


class Outcome(NamedTuple):
    """Losses by step; weights, buffers and optimizer state by name; metrics of the validation."""

    losses: list[float]
    state: dict[str, Tensor]
    metrics: dict[str, float]


def data_of(case: Case) -> Data:
    """Random images with targets; some pixels have no class, and some targets are unknown.

    One sample in seven has nothing that is known.
    """
    draw = np.random.default_rng(case.model["seed"])

    def images(count: int) -> np.ndarray:
        return draw.integers(0, 256, (count, *case.size, 3), dtype=np.uint8)

    def targets(count: int) -> np.ndarray:
        name = case.task["name"]
        if name == "classification":
            return np.arange(count) % CLASSES
        if name == "segmentation":
            masks = draw.integers(0, CLASSES, (count, *case.size)).astype(np.uint8)
            masks[draw.random(masks.shape) < 0.1] = UNKNOWN
            masks[draw.random(count) < 1 / 7] = UNKNOWN
            return masks
        found = draw.random((count, CLASSES)).round(3)
        if name == "multilabel":
            found = found.round()
        unknown = draw.random(found.shape) < 0.1
        unknown[draw.random(count) < 1 / 7] = True
        found[unknown] = np.nan
        return found

    validated = 5
    return Data(images(case.samples), targets(case.samples), images(validated), targets(validated))


def loss_of(case: Case) -> Loss:
    """The mean over what has a label of a slice; 0 where nothing has, or counts."""
    function = _loss_of(case)

    def or_zero(output: Tensor, target: Tensor) -> Tensor:
        loss = function(output, target)
        return loss if loss.isfinite() else 0.0 * output.sum()

    return or_zero


def _loss_of(case: Case) -> Loss:
    task = case.task
    weight = None
    if task.get("class_weights"):
        weight = torch.tensor(task["class_weights"], dtype=torch.float64)

    def segmentation(output: Tensor, target: Tensor) -> Tensor:
        smoothing = task.get("label_smoothing", 0.0)
        loss = F.cross_entropy(
            output, target, weight, ignore_index=UNKNOWN, label_smoothing=smoothing
        )
        if not task.get("dice"):
            return loss
        known = (target != UNKNOWN).unsqueeze(1)
        shares = output.softmax(1) * known
        classes = torch.arange(CLASSES).view(-1, *(1,) * case.dims)
        is_class = (target.unsqueeze(1) == classes).double()
        both, told, count = ((shares * is_class), shares, is_class)
        sums = [one.sum((0, *range(2, 2 + case.dims))) for one in (both, told, count)]
        coefficients = 2 * sums[0] / (sums[1] + sums[2])
        return loss + task["dice"] * (1 - coefficients)[sums[2] > 0].mean()

    def multilabel(output: Tensor, target: Tensor) -> Tensor:
        known = ~target.isnan()
        positive = torch.tensor(task["pos_weight"], dtype=torch.float64).expand_as(target)
        return F.binary_cross_entropy_with_logits(
            output[known], target[known], pos_weight=positive[known]
        )

    def regression(output: Tensor, target: Tensor) -> Tensor:
        known = ~target.isnan()
        if task["loss"] == "mse":
            return F.mse_loss(output[known], target[known])
        return F.huber_loss(output[known], target[known], delta=task["huber_delta"])

    def classification(output: Tensor, target: Tensor) -> Tensor:
        smoothing = task.get("label_smoothing", 0.0)
        return F.cross_entropy(output, target, weight, label_smoothing=smoothing)

    if "loss._target_" in task:
        function, gamma = resolve_name(task["loss._target_"]), task.get("loss.gamma")
        return function if gamma is None else partial(function, gamma=gamma)
    known = (segmentation, multilabel, regression, classification)
    return {one.__name__: one for one in known}[task["name"]]


def alone(case: Case, data: Data) -> Outcome:
    """The run."""
    model = network(CLASSES, 3, **case.model).double()
    at_rest = freeze(model, case.trainer["freeze"])
    optimizer = optimizer_of(case, model)
    loss_function = loss_of(case)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses: list[float] = []
    for images, targets in batches(case, data):
        model.train()
        for layer in at_rest:
            layer.eval()
        optimizer.zero_grad()
        total = 0.0
        for pieces in slices(case, len(images)):
            together = [pieces] if case.parallel["sync_batchnorm"] else [[one] for one in pieces]
            for group in together:
                start, stop = group[0][0], group[-1][1]
                if start == stop:
                    continue
                output = model(images[start:stop])
                parts = [
                    loss_function(output[a - start : b - start], targets[a:b])
                    * ((b - a) / len(images))
                    for a, b in group
                    if b > a
                ]
                loss = torch.stack(parts).sum()
                loss.backward()
                total += loss.item()
        if case.trainer["clip_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), case.trainer["clip_norm"])
        optimizer.step()
        losses.append(total)
        for name, parameter in model.named_parameters() if case.trainer["ema"] else ():
            kept = case.trainer["ema"] * averages[name]
            averages[name] = kept + (1 - case.trainer["ema"]) * parameter.detach()
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if case.trainer["ema"]:
        model.load_state_dict(averages, strict=False)
    metrics = metrics_of(case, model, data)
    state = state_of(model, optimizer)
    if case.trainer["ema"]:  # also what validation writes into weights stays with the averages
        averages = {name: p.detach() for name, p in model.named_parameters()}
        state |= own | {f"average/{name}": value for name, value in averages.items()}
    return Outcome(losses, state, metrics)


def freeze(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    """The BatchNorm layers that stay in evaluation mode."""
    frozen = set()
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
            frozen.add(parameter)
    norms = [one for one in model.modules() if isinstance(one, _BatchNorm)]
    return [one for one in norms if set(one.parameters()) <= frozen]


def batches(case: Case, data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """Of all steps, in the order that a seed gives the samples of each epoch."""
    steps, epoch = 0, 0
    while steps < case.steps:
        order = np.random.default_rng([0, epoch]).permutation(case.samples)
        for start in range(0, case.samples, case.step):
            if steps == case.steps:
                return
            some = order[start : start + case.step]
            yield pixels(data.images[some]), as_target(case, data.targets[some])
            steps += 1
        epoch += 1


def pixels(images: np.ndarray) -> Tensor:
    return (torch.from_numpy(images).movedim(-1, 1).double() / 255 - 0.5) / 0.25


def as_target(case: Case, targets: np.ndarray) -> Tensor:
    found = torch.from_numpy(targets)
    return found.long() if case.task["name"] in ("classification", "segmentation") else found


def slices(case: Case, samples: int) -> Iterator[list[tuple[int, int]]]:
    """Per micro-batch, per replica: the samples [start, stop) of the batch."""

    def cut(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
        size = stop - start
        bounds = [start + size * n // parts for n in range(parts + 1)]
        return list(pairwise(bounds))

    for start, stop in cut(0, samples, case.microbatches):
        yield cut(start, stop, case.data)


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Norms and biases do not decay."""
    learns = [p for p in model.parameters() if p.requires_grad]
    name, settings = case.optimizer["name"], {**case.optimizer}
    del settings["name"]
    decay = {"sgd": 1e-4, "adamw": 0.01, "lars": 1e-4, "lamb": 0.01}[name]
    groups = [
        {"params": [p for p in learns if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in learns if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, **settings)
    if name == "adamw":
        return torch.optim.AdamW(groups, **settings)
    return (LARS if name == "lars" else LAMB)(groups, **settings)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{name}/{key}"] = value
    return found


@torch.no_grad()
def metrics_of(case: Case, model: nn.Module, data: Data) -> dict[str, float]:
    """The loss of all validation samples together, and a metric."""
    model.eval()
    outputs = model(pixels(data.validation_images))
    targets = as_target(case, data.validation_targets)
    found = {"loss": float(loss_of(case)(outputs, targets))}
    name = case.task["name"]
    if name in ("classification", "segmentation"):
        known = targets != UNKNOWN
        found["accuracy"] = float((outputs.argmax(1) == targets)[known].double().mean())
    elif name == "multilabel":
        known = ~targets.isnan()
        found["accuracy"] = float(((outputs >= 0) == (targets > 0.5))[known].double().mean())
    return found
