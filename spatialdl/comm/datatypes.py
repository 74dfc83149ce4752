"""MPI datatypes for tensors: any strided view is sent from, and received into, where it lies.

Elements travel in the logical order of the dims, not in the order in memory, so that two ranks
understand each other even if one holds its tile channels-last. Only the bytes of an element
matter for moving it, so bfloat16 and bool travel like any other type.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI


def mpi_type(view: Tensor) -> MPI.Datatype:
    """A committed datatype that describes `view` relative to its first element."""
    return strided_type(tuple(view.shape), tuple(view.stride()), view.element_size())


@lru_cache(maxsize=4096)
def strided_type(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> MPI.Datatype:
    """The same for a view that is not there yet; strides in elements."""
    from mpi4py import MPI

    datatype = MPI.BYTE.Create_contiguous(itemsize)
    for count, stride in reversed(_merge(shape, strides)):
        if stride * itemsize == datatype.extent:
            datatype = datatype.Create_contiguous(count)
        else:
            datatype = datatype.Create_hvector(count, 1, stride * itemsize)
    return datatype.Commit()


def _merge(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(count, stride) per dim in logical order, dims that follow on each other made one."""
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
    """The MPI type with which `tensor` can be added up.

    Raises:
        TypeError: for types that MPI cannot add (half precision).
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
        raise TypeError(f"MPI cannot add {tensor.dtype}; convert to float32 first")
    return types[tensor.dtype]


def buffer(tensor: Tensor) -> MPI.buffer:
    """The memory of a contiguous CPU tensor, for mpi4py."""
    from mpi4py import MPI

    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
