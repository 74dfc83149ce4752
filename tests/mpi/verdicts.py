"""One operator on a split image and in one process: exact, refused, wrong, or skipped.

The ranks agree on each verdict, also when one of them has failed where the others wait for it.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from spatialdl import CommMismatch, Mesh, SpatialTensor, UnsupportedSpatialOp, shard
from spatialdl.comm import check
from spatialdl.comm.reduce import sum_over_ranks
from tests.mpi.operators import Case, seed_all

# what these give is not determined, or nothing but memory
UNDETERMINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
UNDETERMINED |= {"new_empty_strided", "resize_", "resize_as_"}
TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
TOLERANCES |= {torch.complex64: 1e-4}


class Kind(IntEnum):
    """The worst verdict of any rank is the verdict."""

    SKIPPED = 0
    EXACT = 1
    REFUSED = 2
    WRONG = 3


class Verdict(NamedTuple):
    kind: Kind
    message: str = ""


class Split(NamedTuple):
    """Which tensors of a case are split, by their numbers, and where.

    Attributes:
        tensors: their numbers.
        middle: their rows and columns are dims 1 and 2, as in (N, H, W, C), not the last two.
    """

    tensors: tuple[int, ...]
    middle: bool = False

    def up(self, tensor: Tensor, mesh: Mesh) -> Tensor:
        """`tensor` split over the mesh."""
        if not self.middle:
            return shard(tensor, mesh)
        return shard(tensor.permute(0, 3, 1, 2), mesh).permute(0, 2, 3, 1)


class Result(NamedTuple):
    outputs: list[Any]
    gradients: list[Tensor | None]


class DifferentError(AssertionError):
    """Ours is not what one process gives."""


def splits(case: Case, mesh: Mesh) -> list[Split]:
    """The first image, all images, all but the first; the first with its channels last."""
    tensors = case.sample.tensors
    fitting = tuple(i for i, tensor in enumerate(tensors) if _fits(tensor, mesh, middle=False))
    ways: dict[Split, None] = {}
    if 0 in fitting:
        ways = {Split((0,)): None, Split(fitting): None}
        if len(fitting) > 1 and not case.in_place:
            ways[Split(fitting[1:])] = None
    if tensors and _fits(tensors[0], mesh, middle=True):
        ways[Split((0,), middle=True)] = None
    return list(ways)


def _fits(tensor: Tensor, mesh: Mesh, middle: bool) -> bool:
    if tensor.layout != torch.strided or tensor.dim() != 4 or tensor.is_quantized:
        return False
    image = tensor.shape[1:3] if middle else tensor.shape[2:]
    return all(n >= parts for n, parts in zip(image, mesh.grid, strict=True))


def judge(case: Case, split: Split, mesh: Mesh) -> Verdict:
    """Compare one call, with some of its tensors split over the mesh, and all as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _plain(case)
        if expected is None:
            return Verdict(Kind.SKIPPED)
        return agree_on(mesh, _compared(case, split, mesh, expected))


def _plain(case: Case) -> Result | None:
    """What one process gives; None where PyTorch itself takes no such arguments."""
    try:
        return _run(case, [_copy(tensor) for tensor in case.sample.tensors], lambda x: x)
    except Exception:  # whatever PyTorch raises
        return None


def _compared(case: Case, split: Split, mesh: Mesh, expected: Result) -> Verdict:
    leaves = [_copy(tensor) for tensor in case.sample.tensors]
    try:
        ours = _run(case, leaves, lambda x: split.up(x, mesh), split.tensors)
        averaged = [
            gradient if index in split.tensors or gradient is None else _mean(gradient, mesh)
            for index, gradient in enumerate(ours.gradients)
        ]
        ours = ours._replace(gradients=averaged)
        _compare(case, ours, expected)
    except CommMismatch as error:
        return Verdict(Kind.WRONG, f"ranks differ: {error}")
    except UnsupportedSpatialOp as error:
        return Verdict(Kind.REFUSED, str(error))
    except DifferentError as error:
        return Verdict(Kind.WRONG, str(error))
    except Exception as error:  # anything else is a fault of ours
        return Verdict(Kind.WRONG, f"{type(error).__name__}: {error} at {_lines(error)}")
    return Verdict(Kind.EXACT)


def _lines(error: Exception) -> str:
    """The innermost lines of this package in which it came up."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/spatialdl/" in frame.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in ours[:-4:-1])


def agree_on(mesh: Mesh, verdict: Verdict) -> Verdict:
    """The worst verdict of all ranks.

    A rank may have failed alone while others wait for its part of an operation. Their check of
    what is said (`comm.check`, which must be on) meets this message, and fails too; so all come
    here in the end, some after others.
    """
    comm = mesh.grid_comm
    arrived = False
    while not arrived:
        with suppress(CommMismatch):
            check.agree(comm, "verdict")
            arrived = True
    verdicts = [Verdict(*one) for one in comm.allgather(tuple(verdict))]
    kinds = {one.kind for one in verdicts}
    if len(kinds) > 1:
        rank, worst = max(enumerate(verdicts), key=lambda pair: (pair[1].kind, pair[0]))
        names = [one.kind.name.lower() for one in verdicts]
        told = next((v.message for v in verdicts if v.kind and "ranks differ" not in v.message), "")
        return Verdict(Kind.WRONG, f"ranks are {names}: rank {rank}: {told or worst.message}")
    return verdict


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _run(
    case: Case,
    leaves: list[Tensor],
    split_up: Callable[[Tensor], Tensor],
    split: Sequence[int] = (),
) -> Result:
    """Call it, and differentiate a fixed random combination of all that it gives."""
    inputs: list[Tensor] = []
    for index, leaf in enumerate(leaves):
        value = leaf
        if index in split:
            value = split_up(leaf)
        elif case.in_place and leaf.requires_grad:
            value = leaf.clone()  # a leaf cannot be written to
        inputs.append(value)
    args, kwargs = case.sample.arguments(inputs)
    seed_all(1)
    given = case.function(*args, **kwargs)
    written = inputs[:1] if case.in_place else []
    outputs = [whole(value) for value in tree_flatten((given, written))[0]]
    return Result(outputs, _gradients(outputs, leaves))


def whole(value: Any) -> Any:
    """A split tensor gathered, anything else as it is."""
    return value.full_tensor() if isinstance(value, SpatialTensor) else value


def _gradients(outputs: list[Any], leaves: list[Tensor]) -> list[Tensor | None]:
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    terms = [
        _combined(value, number)
        for number, value in enumerate(outputs)
        if isinstance(value, Tensor) and value.requires_grad and not value.is_sparse
    ]
    if not terms or not trained:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(sum(terms), trained, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _combined(value: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    factors = torch.randn(value.shape, dtype=torch.float64, generator=generator)
    product = (value * factors).sum()
    return product.real + product.imag if product.is_complex() else product


def _mean(gradient: Tensor, mesh: Mesh) -> Tensor:
    flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    total = sum_over_ranks(mesh.grid_comm, flat.contiguous(), "mean gradient") / mesh.size
    return torch.view_as_complex(total) if gradient.is_complex() else total


def _compare(case: Case, ours: Result, plain: Result) -> None:
    if len(ours.outputs) != len(plain.outputs):
        raise DifferentError(f"{len(ours.outputs)} outputs instead of {len(plain.outputs)}")
    try:
        _compare_results(ours, plain, values=case.operator not in UNDETERMINED)
    except DifferentError:
        if not is_random(case):
            raise
        _compare_results(ours, plain, values=False)


def _compare_results(ours: Result, plain: Result, values: bool) -> None:
    for number, (one, other) in enumerate(zip(ours.outputs, plain.outputs, strict=True)):
        _compare_values(f"output {number}", one, other, values)
    rounded = max((_tolerance(v.dtype) for v in plain.outputs if isinstance(v, Tensor)), default=0)
    for number, (one, other) in enumerate(zip(ours.gradients, plain.gradients, strict=True)):
        if one is not None or other is not None:
            known = one if other is None else other
            zeros = torch.zeros_like(known)
            pair = (zeros if gradient is None else gradient for gradient in (one, other))
            _compare_values(f"gradient of tensor {number}", *pair, values, rounded)


def _tolerance(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0
    return TOLERANCES.get(dtype, 1e-2)


def _compare_values(what: str, ours: Any, plain: Any, values: bool, rounded: float = 0) -> None:
    if not isinstance(plain, Tensor):
        if type(ours) is not type(plain) or (values and not _equal(ours, plain)):
            raise DifferentError(f"{what}: {ours!r} instead of {plain!r}"[:150])
        return
    if not isinstance(ours, Tensor) or ours.shape != plain.shape or ours.dtype != plain.dtype:
        said = f"{tuple(ours.shape)} {ours.dtype}" if isinstance(ours, Tensor) else repr(ours)
        raise DifferentError(f"{what}: {said} instead of {tuple(plain.shape)} {plain.dtype}"[:150])
    if plain.layout != torch.strided:
        ours, plain = ours.to_dense(), plain.to_dense()
    if not values:
        return
    tolerance = max(_tolerance(plain.dtype), rounded)
    if plain.dtype == torch.complex32:
        ours, plain = ours.to(torch.complex64), plain.to(torch.complex64)
    if not torch.allclose(ours, plain, rtol=tolerance, atol=tolerance, equal_nan=True):
        where = ~torch.isclose(ours, plain, rtol=tolerance, atol=tolerance, equal_nan=True)
        place = tuple(where.nonzero()[0].tolist())
        raise DifferentError(
            f"{what}: {int(where.sum())} of {where.numel()} values differ, first at {place}: "
            f"{ours[place].item()} instead of {plain[place].item()}"
        )


def _equal(ours: Any, plain: Any) -> bool:
    if isinstance(plain, float):
        return math.isclose(ours, plain, rel_tol=1e-9) or (math.isnan(ours) and math.isnan(plain))
    return bool(ours == plain)


def is_random(case: Case) -> bool:
    """Does one process give the same twice, from different random states?"""
    results = []
    for seed in (1, 2):
        tensors = [_copy(tensor).detach() for tensor in case.sample.tensors]
        args, kwargs = case.sample.arguments(tensors)
        seed_all(seed)
        results.append(tree_flatten(case.function(*args, **kwargs))[0])
    try:
        for one, other in zip(*results, strict=True):
            _compare_values("", one, other, True)
    except DifferentError:
        return True
    return False
