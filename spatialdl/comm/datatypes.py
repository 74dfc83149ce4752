"""MPI datatypes of tensors: strided views are sent and received without packing.

Elements travel in the logical order of the dims, not in memory order, so that a channels-last
tile matches a contiguous one. Moves depend on the size of an element only, so bfloat16 and bool
are supported.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI


def mpi_type(view: Tensor) -> MPI.Datatype:
    """Committed datatype that describes `view` relative to its first element."""
    return strided_type(tuple(view.shape), tuple(view.stride()), view.element_size())


@lru_cache(maxsize=4096)
def strided_type(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> MPI.Datatype:
    """`mpi_type` from shape, strides in elements and itemsize in bytes."""
    from mpi4py import MPI

    datatype = MPI.BYTE.Create_contiguous(itemsize)
    for count, stride in reversed(_merge(shape, strides)):
        if stride * itemsize == datatype.extent:
            datatype = datatype.Create_contiguous(count)
        else:
            datatype = datatype.Create_hvector(count, 1, stride * itemsize)
    return datatype.Commit()


def _merge(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(count, stride) per dim in logical order, with contiguous dims merged."""
    merged: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if merged and merged[-1][1] == count * stride:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    return merged


def reduction_type(tensor: Tensor) -> MPI.Datatype:
    """MPI type to sum `tensor` with.

    Raises:
        TypeError: for dtypes that MPI cannot sum (half precision).
    """
    from mpi4py import MPI

    types = {
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.int64: MPI.INT64_T,
        torch.int32: MPI.INT32_T,
        torch.uint8: MPI.UINT8_T,
    }
    if tensor.dtype not in types:
        raise TypeError(f"MPI cannot sum {tensor.dtype}; convert to float32 first")
    return types[tensor.dtype]


def buffer(tensor: Tensor) -> MPI.buffer:
    """Memory of a contiguous CPU tensor, for mpi4py."""
    from mpi4py import MPI

    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
