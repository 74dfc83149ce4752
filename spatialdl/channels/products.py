"""``torch.einsum`` on divided channels: as a layer with a weight, or on each rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spatialdl.channels.layers import Layer
from spatialdl.channels.tensor import (
    ChannelTensor,
    channel_op,
    is_divided,
    part_of,
    whole_for_parts,
)


@channel_op(torch.einsum)
def einsum(equation: str, *operands: Any) -> Any:
    """Einsum of each rank's part if the result has the divided dim; else of all channels."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    letters, result = _letters(equation, operands)
    if not letters:
        return NotImplemented
    for x, weight in ((0, 1), (1, 0)) if len(operands) == 2 else ():
        output = _as_layer(letters, result, operands, x, weight)
        if output is not None:
            return output
    return _of_own(letters, result, operands)


def _letters(equation: Any, operands: Sequence[Any]) -> tuple[list[str], str]:
    """Letters of operands and result; empty if implicit or if a letter occurs twice."""
    terms, arrow, result = str(equation).replace(" ", "").partition("->")
    letters = terms.split(",")
    plain = isinstance(equation, str) and bool(arrow) and "." not in equation
    if not plain or len(letters) != len(operands):
        return [], ""
    once = all(len({*names}) == len(names) for names in (*letters, result))
    fits = all(len(names) == one.dim() for names, one in zip(letters, operands, strict=True))
    return (letters, result) if once and fits else ([], "")


def _as_layer(
    letters: Sequence[str], result: str, operands: Sequence[Tensor], x: int, weight: int
) -> Tensor | None:
    """Run as a layer if one operand is a matrix that maps channels of the other; else None."""
    before, matrix = letters[x], letters[weight]
    if len(matrix) != 2:
        return None
    for into, out in ((0, 1), (1, 0)):
        old, new = matrix[into], matrix[out]
        if old not in before or new in before or before.replace(old, new) != result:
            continue
        if operands[x].shape[before.index(old)] != operands[weight].shape[into]:
            continue
        terms = f"{before},{matrix}->{result}"

        def local(own: Tensor, own_weight: Tensor, bias: Tensor | None, terms: str = terms) -> Any:
            return torch.einsum(terms, own, own_weight)

        at = before.index(old)
        return Layer(local, operands[x], operands[weight], None, at, out, into).run()
    return None


def _of_own(letters: Sequence[str], result: str, operands: Sequence[Tensor]) -> Any:
    """Each rank's part of the result, if the result has the divided dim."""
    for names, one in zip(letters, operands, strict=True):
        if is_divided(one) and names[one.at] in result:
            letter, first = names[one.at], one
            break
    else:
        return NotImplemented
    size, comm = first.shape[first.at], first.comm
    own = []
    for names, one in zip(letters, operands, strict=True):
        at = names.find(letter)
        if at >= 0 and one.shape[at] == size:
            own.append(part_of(one, at, first.partition, comm))
        else:
            own.append(whole_for_parts(one, comm))
    output = torch.einsum(f"{','.join(letters)}->{result}", *own)
    return ChannelTensor(output, result.index(letter), first.partition, comm)
