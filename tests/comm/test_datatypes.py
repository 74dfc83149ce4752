from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.datatypes import _merge, buffer, mpi_type, reduction_type

MOVED = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def memory_of(view: Tensor, datatype: MPI.Datatype) -> MPI.buffer:
    """As much memory, from the first element on, as one `datatype` covers."""
    return MPI.buffer.fromaddress(view.data_ptr(), datatype.extent)


def packed(view: Tensor) -> bytes:
    datatype = mpi_type(view)
    out = bytearray(datatype.Pack_size(1, MPI.COMM_SELF))
    end = datatype.Pack(memory_of(view, datatype), out, 0, MPI.COMM_SELF)
    return bytes(out[:end])


def content(view: Tensor) -> bytes:
    dense = torch.empty(view.shape, dtype=view.dtype).copy_(view)
    return bytes(dense.flatten().view(torch.uint8).tolist())


@st.composite
def views(draw):
    """Views as they occur and as they might: cut, in other orders, with steps, expanded."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(MOVED))
    count = int(torch.tensor(shape).prod())
    view = (torch.arange(count) * 37 % 251).to(dtype).view(shape)
    if len(shape) == 4 and draw(st.booleans()):
        view = view.contiguous(memory_format=torch.channels_last)
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.dim() - 1))
        kind = draw(st.sampled_from(["narrow", "step", "transpose", "expand"]))
        if kind == "narrow":
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif view.shape[dim] == 1:
            sizes = list(view.shape)
            sizes[dim] = draw(st.integers(1, 3))
            view = view.expand(sizes)
    return view


@given(views())
def test_any_view_is_packed_as_its_contiguous_copy(view):
    assert packed(view) == content(view)


@given(views())
def test_what_was_packed_arrives_in_another_view_of_that_shape(view):
    target = torch.zeros((2, *view.shape, 2), dtype=view.dtype)[1, ..., 1]
    datatype = mpi_type(target)
    datatype.Unpack(packed(view), 0, memory_of(target, datatype), MPI.COMM_SELF)
    assert torch.equal(target, view)


def test_a_halo_of_a_channels_last_tile_is_in_logical_order():
    tile = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    halo = tile.contiguous(memory_format=torch.channels_last)[:, :, 3:, 1:]
    assert packed(halo) == content(tile[:, :, 3:, 1:])


def test_a_view_that_is_all_in_one_piece_is_one_block():
    assert _merge((2, 3, 4), (12, 4, 1)) == [(24, 1)]
    assert _merge((2, 3, 4), (24, 4, 1)) == [(2, 24), (12, 1)]
    assert _merge((1, 7, 1), (99, 2, 5)) == [(7, 2)]
    assert _merge((1, 1), (3, 3)) == []


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=5).map(
        lambda dims: ([d[0] for d in dims], [d[1] for d in dims])
    )
)
def test_merged_dims_visit_the_same_offsets_in_the_same_order(dims):
    shape, strides = tuple(dims[0]), tuple(dims[1])
    merged = _merge(shape, strides)
    assert offsets(merged) == offsets(list(zip(shape, strides, strict=True)))
    assert all(count > 1 for count, _ in merged)


def offsets(dims: list[tuple[int, int]]) -> list[int]:
    found = [0]
    for count, stride in dims:
        found = [offset + i * stride for offset in found for i in range(count)]
    return found


def test_types_are_made_once():
    assert mpi_type(torch.zeros(3, 5)[:, 1:]) is mpi_type(torch.ones(3, 5)[:, :4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_what_can_be_added_has_a_type_of_its_size(dtype):
    value = torch.zeros(1, dtype=dtype)
    assert reduction_type(value).Get_size() == value.element_size()


def test_half_precision_cannot_be_added():
    with pytest.raises(TypeError, match=r"cannot sum torch.bfloat16.*float32"):
        reduction_type(torch.zeros(1, dtype=torch.bfloat16))


def test_buffer_is_the_tensors_memory():
    value = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert bytes(buffer(value)) == content(value)
