"""One training step of a network, on a split image and in one process, number by number."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.channels.parallel import average_gradients
from spatialdl.comm.mesh import Mesh
from spatialdl.spatial import SpatialTensor
from spatialdl.spatial.split import shard

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest error that counts as equal, as a part of the largest value."""

_FLOOR = 1e-2
"""Values this much smaller than the network's largest of their kind may be rounding alone, such as
the gradient of a bias before a normalisation."""


class Numbers(NamedTuple):
    """What one step gives, by name."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


class Difference(NamedTuple):
    """A number that is not what one process gives."""

    kind: str  # output, loss, gradient or buffer
    name: str
    what: str

    def __str__(self) -> str:
        space = " " if self.kind in ("gradient", "buffer") else ""
        return f"{self.kind}{space}{self.name}: {self.what}"


def one_step(
    model: nn.Module, image: Tensor, arguments: tuple[Any, ...] = (), mesh: Mesh | None = None
) -> Numbers:
    """Forward, a loss that reads every output, backward; no optimiser.

    The loss is the sum, over all floating point outputs, of the mean of (output + fixed noise)
    squared; without the noise it would not depend on what is before a last normalisation.

    Args:
        model: left with the buffers and gradients of this step.
        image: (N, C, *spatial), whole and the same on every rank; its gradient is a number too.
        arguments: what the model takes after the image.
        mesh: split the image over it; in one process if None.
    """
    leaf = image.detach().clone().requires_grad_()
    model.zero_grad()
    given = model(leaf if mesh is None else shard(leaf, mesh), *arguments)
    outputs = {name: whole(value) for name, value in tensors_in(given)}
    terms = [
        (output + _noise(output, number)).square().mean()
        for number, output in enumerate(outputs.values())
        if output.is_floating_point() and output.requires_grad
    ]
    if not terms:
        raise ValueError("the network gives no floating point tensor that depends on its input")
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
    """A split tensor gathered, any other as it is."""
    return value.full_tensor() if isinstance(value, SpatialTensor) else value


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in what a network returns, and where each is: ``.logits``, ``[0]`` ..."""
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
    """Everything that is not equal, outputs first; empty if all is."""
    found = _named_differences("output", ours.outputs, plain.outputs)
    found += _named_differences("loss", {"": ours.loss}, {"": plain.loss})
    found += _named_differences("gradient", ours.gradients, plain.gradients)
    return found + _named_differences("buffer", ours.buffers, plain.buffers)


def _named_differences(
    kind: str, ours: Mapping[str, Tensor | None], plain: Mapping[str, Tensor | None]
) -> list[Difference]:
    floor = _FLOOR * max((_largest(value) for value in plain.values()), default=0.0)
    found = []
    for name in dict.fromkeys((*plain, *ours)):
        what = _difference(ours.get(name), plain.get(name), floor)
        if what:
            found.append(Difference(kind, name, what))
    return found


def _largest(value: Tensor | None) -> float:
    """The largest finite absolute value of floating point numbers."""
    if value is None or value.numel() == 0 or not value.is_floating_point():
        return 0.0
    return float(value.double().abs().nan_to_num(0, 0, 0).max())


def _difference(ours: Tensor | None, plain: Tensor | None, floor: float) -> str:
    if ours is None or plain is None:
        missing = "missing" if ours is None else "present, but one process has none"
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
