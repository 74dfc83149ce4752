"""PyTorch's own operator database as cases for split images.

`torch.testing._internal.common_methods_invocations.op_db` has sample inputs for nearly every
operator. A *case* is one of its samples with a 4-D image as first tensor: as it stands, and with
the image (and all that has its size) redrawn at an odd size. Where the first tensor is no image,
one takes its place: PyTorch tells whether the operator takes that.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.operator_database import invocations

ODD_SIZES = ((7, 5), (5, 9), (11, 3))
IMAGE = (2, 3)  # samples and channels of what was no image
NOT_REDRAWN = {"lu_unpack", "_segment_reduce"}  # lengths that do not fit crash PyTorch
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32)


class Sample(NamedTuple):
    """Arguments of an operator, of which the tensors can be replaced."""

    tensors: list[Tensor]
    others: list[Any]
    places: list[bool]
    spec: Any

    @classmethod
    def of(cls, arguments: Any) -> Sample:
        flat, spec = tree_flatten(arguments)
        places = [isinstance(value, Tensor) for value in flat]
        tensors = [value for value in flat if isinstance(value, Tensor)]
        others = [value for value in flat if not isinstance(value, Tensor)]
        return cls(tensors, others, places, spec)

    def arguments(self, tensors: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """(args, kwargs) with `tensors` in the places of its own."""
        mine, others = iter(tensors), iter(self.others)
        flat = [next(mine) if is_tensor else next(others) for is_tensor in self.places]
        first, args, kwargs = tree_unflatten(flat, self.spec)
        return [first, *args], kwargs

    def describe(self) -> str:
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        return f"shapes {shapes}, others {self.others}"


class Case(NamedTuple):
    """One call of one variant of an operator."""

    operator: str
    variant: str  # function, method, in place, or the name of an alias
    function: Callable[..., Any]
    sample: Sample
    origin: str
    in_place: bool = False

    def __str__(self) -> str:
        return f"{self.operator} ({self.variant}), {self.origin}: {self.sample.describe()}"


def _as_it_is(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# the database seeds the random operators in every call, which would hide that they are random
invocations.wrapper_set_seed = _as_it_is


def operators() -> dict[str, OpInfo]:
    """All operators of the database that run on a CPU, by their full names."""
    return {op.full_name: op for op in invocations.op_db if _dtype(op) is not None}


def _dtype(op: OpInfo) -> torch.dtype | None:
    known = op.supported_dtypes("cpu")
    return next((dtype for dtype in DTYPES if dtype in known), None)


def cases(op: OpInfo, most: int | None = None) -> Iterator[Case]:
    """All cases of an operator, or about `most` samples spread over them, in every variant."""
    found = list(_samples(op))
    if most is not None and len(found) > most:
        found = [found[(2 * i + 1) * len(found) // (2 * most)] for i in range(most)]
    for origin, sample in found:
        for variant, function, in_place in _variants(op):
            yield Case(op.full_name, variant, function, sample, origin, in_place)


def _samples(op: OpInfo) -> Iterator[tuple[str, Sample]]:
    seed_all(0)
    dtype = _dtype(op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # not by sample_inputs(), which reads the source of each frame that it was called from
        drawn = op.sample_inputs_func(op, "cpu", dtype, _differentiable(op, dtype))
        samples = [Sample.of((one.input, one.args, one.kwargs)) for one in drawn]
    with_image = [s for s in samples if s.tensors and s.tensors[0].dim() == 4]
    for number, sample in enumerate(with_image):
        yield f"sample {number}", sample
    for number, sample in enumerate(samples if op.name not in NOT_REDRAWN else []):
        size = ODD_SIZES[number % len(ODD_SIZES)]
        redrawn = _redrawn(sample, size)
        if redrawn is not None:
            yield f"sample {number} at {size[0]}x{size[1]}", redrawn


def _differentiable(op: OpInfo, dtype: torch.dtype | None) -> bool:
    return bool(op.supports_autograd) and dtype in (torch.float64, torch.complex128)


def _redrawn(sample: Sample, size: tuple[int, int]) -> Sample | None:
    """`sample` with an image of `size`, and with all tensors that fitted the first one changed."""
    tensors = sample.tensors
    if not tensors or tensors[0].numel() == 0 or tensors[0].layout != torch.strided:
        return None
    first = tuple(tensors[0].shape)
    if len(first) == 4:
        shapes = [_resized(tuple(tensor.shape), first, size) for tensor in tensors]
    else:
        image = (*IMAGE, *size)
        shapes = [image if tuple(t.shape) == first else tuple(t.shape) for t in tensors]
    drawn = torch.Generator().manual_seed(0)
    whole_numbers = not tensors[0].is_floating_point()
    changed = [
        _drawn(t, shape, drawn, not whole_numbers and t.dtype == torch.int64)
        for t, shape in zip(tensors, shapes, strict=True)
    ]
    return sample._replace(tensors=changed)


def _resized(
    shape: tuple[int, ...], image: tuple[int, ...], size: tuple[int, int]
) -> tuple[int, ...]:
    if len(shape) < 2 or shape[-2:] != image[-2:]:
        return shape
    return (*shape[:-2], *size)


def _drawn(
    tensor: Tensor, shape: tuple[int, ...], generator: torch.Generator, indices: bool
) -> Tensor:
    """Values of `tensor`, which stay within what the operator takes, in another shape.

    Args:
        indices: they choose from an image; PyTorch does not always check that they are inside.
    """
    if tuple(tensor.shape) == shape or tensor.numel() == 0:
        return tensor
    count = torch.Size(shape).numel()
    chosen = torch.randint(tensor.numel(), (count,), generator=generator)
    values = tensor.detach().reshape(-1)[chosen].reshape(shape)
    if indices:
        values = values % min(shape)
    return values.requires_grad_(tensor.requires_grad)


def _variants(op: OpInfo) -> list[tuple[str, Callable[..., Any], bool]]:
    variants = [("function", op.get_op(), False)]
    if op.get_method() is not None:
        variants.append(("method", op.get_method(), False))
    if op.get_inplace() is not None:
        variants.append(("in place", op.get_inplace(), True))
    for alias in op.aliases or ():
        for kind, function in (("", alias.op), ("method ", alias.method_variant)):
            if function is not None:
                variants.append((f"{kind}{alias.name}", function, False))
        if alias.inplace_variant is not None:
            variants.append((f"in place {alias.name}", alias.inplace_variant, True))
    return variants


def seed_all(seed: int) -> None:
    """The same random numbers on every rank."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
