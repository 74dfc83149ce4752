"""Device memory: what touches it faults, and what is freed is not what it was."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.simulated_device.holding import held
from tests.simulated_device.programs import ran


@pytest.mark.parametrize(
    "touch",
    [
        "ctypes.string_at(x.data_ptr(), 1)",
        "ctypes.memset(x.data_ptr(), 0, 1)",
        "np.ctypeslib.as_array((ctypes.c_double * 8).from_address(x.data_ptr())).sum()",
    ],
)
def test_the_host_faults_where_it_touches_device_memory(touch):
    done = ran(f"x = torch.ones(8, dtype=torch.float64, device='sim')\n{touch}\n")
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_mpi_faults_where_it_touches_device_memory():
    done = ran(
        """
from mpi4py import MPI
x = torch.ones(4096, dtype=torch.float64, device="sim")
into = np.empty(4096)
torch.sim.synchronize()
memory = MPI.buffer.fromaddress(x.data_ptr(), x.nbytes)
MPI.COMM_SELF.Sendrecv(memory, 0, 0, into, 0, 0)
print("not reached")
"""
    )
    assert done.returncode != 0
    assert "not reached" not in done.stdout


def test_numpy_refuses_device_tensors():
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        torch.ones(3, device="sim").numpy()


def test_new_memory_is_not_a_number():
    assert torch.empty(1000, device="sim").isnan().all()
    assert torch.empty(3, dtype=torch.float16, device="sim").isnan().all()
    assert (torch.empty(3, dtype=torch.int32, device="sim") == -1).all()


def test_freed_memory_serves_its_stream_again_and_is_not_a_number():
    x = torch.ones(1000, device="sim")
    address = x.data_ptr()
    del x
    again = torch.empty(1000, device="sim")
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_freed_memory_serves_no_other_stream():
    x = torch.ones(1000, device="sim")
    address = x.data_ptr()
    del x
    with torch.Stream("sim"):
        assert torch.empty(1000, device="sim").data_ptr() != address


def test_a_tensor_freed_while_another_stream_reads_it_is_lost():
    side = torch.Stream("sim")
    x = torch.ones(1000, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with held(side):
        with side:
            y = x + 1
        del x
        torch.empty(1, device="sim")  # it could have been given that memory
        torch.sim.current_stream().synchronize()
    side.synchronize()
    assert y.isnan().all()


def test_freed_memory_may_be_read_until_its_stream_allocates_again():
    """A stream may wait for the readers only then, as that of FSDP2's gradients does."""
    side = torch.Stream("sim")
    with side:
        x = torch.ones(1000, device="sim")
    torch.sim.current_stream().wait_stream(side)
    with held():
        y = x + 1
        del x
        side.synchronize()
        side.wait_stream(torch.sim.current_stream())
        with side:
            again = torch.empty(1000, device="sim")
    assert (y == 2).all()
    side.synchronize()
    assert again.isnan().all()


def test_a_recorded_stream_keeps_memory():
    side = torch.Stream("sim")
    x = torch.ones(1000, device="sim")
    address = x.data_ptr()
    side.wait_stream(torch.sim.current_stream())
    with held(side):
        with side:
            y = x + 1
        x.record_stream(side)
        del x
        assert torch.empty(1000, device="sim").data_ptr() != address
        torch.sim.current_stream().synchronize()
    side.synchronize()
    assert (y == 2).all()
    assert torch.empty(1000, device="sim").data_ptr() == address


def test_memory_is_counted():
    torch.sim.empty_cache()
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    x = torch.empty(2**20, device="sim")
    assert torch.sim.memory_allocated() - before == 2**22
    del x
    assert torch.sim.memory_allocated() == before
    assert torch.sim.max_memory_allocated() - before == 2**22
    reserved = torch.sim.memory_reserved()
    torch.sim.empty_cache()
    assert reserved - torch.sim.memory_reserved() >= 2**22
    free, total = torch.sim.mem_get_info()
    assert total == 16 * 2**30
    assert free == total - torch.sim.memory_reserved()


def test_memory_is_counted_on_each_device():
    before = torch.sim.memory_allocated(1)
    x = torch.empty(1000, device="sim:1")
    assert torch.sim.pointer_kind(x.data_ptr()) == "device 1"
    assert torch.sim.memory_allocated(1) - before == 4096


def test_too_much_is_refused():
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        torch.empty(2**35, dtype=torch.uint8, device="sim")


def test_parts_of_memory_are_joined_again():
    torch.sim.empty_cache()
    parts = [torch.empty(2**22, dtype=torch.uint8, device="sim") for _ in range(8)]
    for part in [*parts[::2], *parts[1::2]]:
        part.fill_(1)
    reserved = torch.sim.memory_reserved()
    del part, parts
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() <= reserved - 8 * 2**22
    assert torch.empty(2**25, dtype=torch.uint8, device="sim").numel() == 2**25


def test_kinds_of_addresses():
    pinned = torch.ones(4).pin_memory()
    assert torch.sim.pointer_kind(torch.ones(4, device="sim")[1:].data_ptr()) == "device 0"
    assert torch.sim.pointer_kind(pinned[1:].data_ptr()) == "pinned host"
    assert torch.sim.pointer_kind(torch.ones(4).data_ptr()) == "other"
