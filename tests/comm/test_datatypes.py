from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.check import CommCall
from spatialdl.comm.exchange_strategies import mpi_type, reduction_type
from spatialdl.comm.world import as_communicator

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


def test_half_precision_cannot_be_added():
    with pytest.raises(TypeError, match=r"cannot sum torch.bfloat16.*float32"):
        reduction_type(torch.zeros(1, dtype=torch.bfloat16))


def test_switched_off_one_rank_remembers_nothing(monkeypatch):
    monkeypatch.setattr(check._Switch, "on", False)
    before = check.last_calls()
    check.agree(as_communicator(MPI.COMM_SELF), "conv2d forward")
    assert check.last_calls() == before


def test_where_ranks_have_parted_follows_from_what_they_did_last():
    both = [CommCall("0-1/0", 7, "conv2d forward"), CommCall("0-1/1", 7, "gradients")]
    ahead = [*both, CommCall("0-1/0", 8, "sum"), CommCall("0-1/0", 9, "conv2d forward")]
    other = [*both, CommCall("0-1/0", 8, "batch_norm")]
    assert check.first_mismatch({0: ahead, 1: both}) == ""
    assert check.first_mismatch({}) == ""
    said = check.first_mismatch({1: other, 0: ahead})
    assert "rank 0 is at 'sum', rank 1 at 'batch_norm'" in said
