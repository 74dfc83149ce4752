"""What tests of operations on split images share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.mpi.equality import Operation

Shapes = Sequence[tuple[int, ...]]
Cases = dict[str, tuple[Operation, tuple[int, ...], Shapes]]
"""Operations, shapes of their images, and shapes of their parameters; for `check_keyed`."""


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def tokens(x: Tensor) -> Tensor:
    """(N, C, ...) as (N, tokens, C)."""
    return x.flatten(2).transpose(1, 2)
