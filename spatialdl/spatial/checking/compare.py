"""Compare a training step on a split image with the same step in a single process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.mesh import Mesh
from spatialdl.spatial import SpatialTensor
from spatialdl.spatial.parallel import average_gradients
from spatialdl.spatial.split import shard

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Tolerance relative to the largest absolute value of a tensor."""

_FLOOR = 1e-2
"""Smallest scale of a tensor, relative to the largest value of its kind in the network: smaller
values may be rounding errors, such as the gradient of a bias before a normalisation."""


class Numbers(NamedTuple):
    """Outputs, loss, gradients and buffers of one step, by name."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


class Difference(NamedTuple):
    """A tensor that differs from the single-process result."""

    kind: str  # output, loss, gradient or buffer
    name: str
    what: str

    def __str__(self) -> str:
        space = " " if self.kind in ("gradient", "buffer") else ""
        return f"{self.kind}{space}{self.name}: {self.what}"


def one_step(
    model: nn.Module, image: Tensor, arguments: tuple[Any, ...] = (), mesh: Mesh | None = None
) -> Numbers:
    """Run forward and backward with a loss over all outputs; no optimizer.

    The loss is the sum, over all floating point outputs, of the mean of (output + fixed noise)
    squared. Without the noise it would not depend on layers before a final normalisation.

    Args:
        model: keeps the buffers and gradients of this step.
        image: (N, C, *spatial), whole and the same on every rank; its gradient is compared too.
        arguments: arguments of the model after the image.
        mesh: mesh to split the image over; None for a single process.

    Raises:
        ValueError: no floating point output depends on the input.
    """
    leaf = image.detach().clone().requires_grad_()
    model.zero_grad()
    result = model(leaf if mesh is None else shard(leaf, mesh), *arguments)
    outputs = {name: whole(value) for name, value in tensors_in(result)}
    terms = [
        (output + _noise(output, number)).square().mean()
        for number, output in enumerate(outputs.values())
        if output.is_floating_point() and output.requires_grad
    ]
    if not terms:
        raise ValueError("the network returns no floating point tensor that depends on its input")
    loss = torch.stack([term.double() for term in terms]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    if mesh is not None:
        average_gradients(model, mesh)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    detached = {name: output.detach() for name, output in outputs.items()}
    return Numbers(
        detached, loss.detach(), {"image": leaf.grad, **gradients}, dict(model.named_buffers())
    )


def _noise(like: Tensor, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)


def whole(value: Tensor) -> Tensor:
    """Gather a split tensor; return any other tensor unchanged."""
    return value.full_tensor() if isinstance(value, SpatialTensor) else value


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in the output of a network, with their paths: ``.logits``, ``[0]`` ..."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), f"{name}.{field.name}")


def differences(ours: Numbers, plain: Numbers) -> list[Difference]:
    """All tensors that are not equal, outputs first."""
    unequal = _named_differences("output", ours.outputs, plain.outputs)
    unequal += _named_differences("loss", {"": ours.loss}, {"": plain.loss})
    unequal += _named_differences("gradient", ours.gradients, plain.gradients)
    return unequal + _named_differences("buffer", ours.buffers, plain.buffers)


def _named_differences(
    kind: str, ours: Mapping[str, Tensor | None], plain: Mapping[str, Tensor | None]
) -> list[Difference]:
    floor = _FLOOR * max((_largest(value) for value in plain.values()), default=0.0)
    unequal = []
    for name in dict.fromkeys((*plain, *ours)):
        what = _difference(ours.get(name), plain.get(name), floor)
        if what:
            unequal.append(Difference(kind, name, what))
    return unequal


def _largest(value: Tensor | None) -> float:
    """Largest finite absolute value of a floating point tensor, otherwise 0."""
    if value is None or value.numel() == 0 or not value.is_floating_point():
        return 0.0
    return float(value.double().abs().nan_to_num(0, 0, 0).max())


def _difference(ours: Tensor | None, plain: Tensor | None, floor: float) -> str:
    if ours is None or plain is None:
        missing = "missing" if ours is None else "present, but missing in a single process"
        return "" if ours is plain else missing
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return (
            f"{tuple(ours.shape)} {ours.dtype} instead of {tuple(plain.shape)} {plain.dtype}"
        ).replace("torch.", "")
    if not plain.is_floating_point():
        return "" if torch.equal(ours, plain) else "differs"
    return _error(ours.double(), plain.double(), TOLERANCES.get(plain.dtype, 1e-2), floor)


def _error(ours: Tensor, plain: Tensor, tolerance: float, floor: float) -> str:
    if plain.numel() == 0:
        return ""
    same = (ours == plain) | (ours.isnan() & plain.isnan())
    error = (ours - plain).abs().masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)
    scale = max(_largest(plain), floor)
    largest = float(error.max())
    if largest <= tolerance * scale:
        return ""
    count = int((error > tolerance * scale).sum())
    return f"off by up to {largest:.2g} where the largest value is {scale:.2g}, {count} values"
