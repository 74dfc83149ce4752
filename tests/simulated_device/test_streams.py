"""Streams run later, in order, and missing synchronisation shows."""

from __future__ import annotations

import ctypes
import queue
import threading

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from tests.simulated_device.device_aware_mpi import device_aware_mpi
from tests.simulated_device.holding import held
from tests.simulated_device.programs import ran


def test_the_host_does_not_wait_for_operators():
    x = torch.ones(3, device="sim")
    torch.sim.synchronize()
    with held():
        x += 1
        assert not torch.sim.current_stream().query()
        assert torch.sim.host_view(x).eq(1).all()
    torch.sim.synchronize()
    assert torch.sim.current_stream().query()
    assert x.tolist() == [2, 2, 2]


def test_a_missing_wait_shows():
    side = torch.Stream("sim")
    x = torch.zeros(3, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with held(side):
        with side:
            x.add_(1)
        assert x.tolist() == [0, 0, 0]
    torch.sim.current_stream().wait_stream(side)
    assert x.tolist() == [1, 1, 1]


def test_streams_and_devices_are_chosen_and_left_again():
    side = torch.Stream("sim:1")
    assert torch.sim.current_device() == 0
    with torch.sim.stream(side):
        assert torch.sim.current_stream(1) == side
        assert torch.sim.current_stream(0) == torch.sim.default_stream(0)
    assert torch.sim.current_stream(1) == torch.sim.default_stream(1)
    with torch.sim.device(1):
        assert torch.empty(1, device="sim").device == torch.device("sim:1")
    assert torch.empty(1, device="sim").device == torch.device("sim:0")
    assert torch.accelerator.current_accelerator() == torch.device("sim")


def test_the_current_stream_belongs_to_the_thread():
    found = []
    with torch.sim.stream(torch.Stream("sim")):
        other = threading.Thread(target=lambda: found.append(torch.sim.current_stream()))
        other.start()
        other.join()
    assert found == [torch.sim.default_stream()]


def test_an_error_in_a_stream_is_raised_where_the_host_waits():
    table = torch.ones(4, 2, device="sim")
    far = torch.nn.functional.embedding(torch.tensor([7], device="sim"), table)
    assert far.shape == (1, 2)
    with pytest.raises(RuntimeError, match=r"aten::(embedding|index_select).* failed on sim: "):
        torch.sim.synchronize()
    torch.sim.synchronize()
    assert table.sum().item() == 8


def test_a_native_function_needs_no_interpreter():
    library = ctypes.PyDLL(None)  # which keeps the interpreter to itself while it waits
    semaphore = ctypes.create_string_buffer(64)
    library.sem_init(semaphore, 0, 0)
    post = ctypes.cast(library.sem_post, ctypes.c_void_p).value
    torch.sim.enqueue_native(post, ctypes.addressof(semaphore))
    assert library.sem_wait(semaphore) == 0


def test_a_process_ends_with_work_under_way():
    program = """
torch.sim.set_delay(1000)
x = torch.ones(1000, device="sim", requires_grad=True)
for _ in range(50):
    (x * 2).sum().backward()
torch.sim.enqueue(lambda: print("done", flush=True))
"""
    done = ran(program)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_forked_process_is_refused():
    done = ran(
        """
x = torch.ones(3, device="sim")
torch.sim.synchronize()
if (child := os.fork()) == 0:
    try:
        x + 1
    except RuntimeError as error:
        print(error, flush=True)
    del x
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be used in a forked process" in done.stdout


def exchanged(x: Tensor) -> Tensor:
    """A copy of a tensor that MPI made, on the device, at once."""
    landed = torch.zeros_like(x)
    torch.sim.synchronize()
    ours, theirs = (MPI.buffer.fromaddress(t.data_ptr(), t.nbytes) for t in (x, landed))
    MPI.COMM_SELF.Sendrecv(ours, 0, 0, theirs, 0, 0)
    return landed


def test_device_aware_mpi_moves_device_memory():
    with device_aware_mpi():
        x = torch.arange(1000.0, device="sim")
        assert torch.equal(exchanged(x), x)
        y = torch.arange(1000.0)
        assert torch.equal(exchanged(y), y)


def test_device_aware_mpi_waits_for_no_stream():
    with device_aware_mpi():
        landed = torch.zeros(3, device="sim")
        torch.sim.synchronize()
        with held():
            x = torch.ones(3, device="sim")
            ours, theirs = (MPI.buffer.fromaddress(t.data_ptr(), t.nbytes) for t in (x, landed))
            MPI.COMM_SELF.Sendrecv(ours, 0, 0, theirs, 0, 0)
        assert landed.isnan().all()


def send(x: Tensor, wire: queue.Queue[Tensor]) -> None:
    """As NCCL sends: in the current stream, of what lies there then; the host goes on."""
    view = torch.sim.host_view(x)
    torch.sim.enqueue(lambda: wire.put(view.clone()), torch.sim.current_stream(x.device))


def receive(x: Tensor, wire: queue.Queue[Tensor]) -> None:
    view = torch.sim.host_view(x)
    torch.sim.enqueue(lambda: view.copy_(wire.get()), torch.sim.current_stream(x.device))


def test_messages_in_streams(delays):
    wire: queue.Queue[Tensor] = queue.Queue()
    y = torch.zeros(3, device="sim:1")
    receive(y, wire)
    y.mul_(2)
    assert not torch.sim.current_stream(1).query()
    x = torch.ones(3, device="sim:0").add_(1)
    send(x, wire)
    x.zero_()
    assert y.tolist() == [4, 4, 4]


def test_where_the_host_waits():
    x = torch.ones(3, device="sim")
    with torch.sim.wait_sites(__file__) as sites:
        x.sum().item()
        torch.sim.synchronize()
    x.sum().item()
    found = {(kind, name): site for kind, name, site in sites}
    assert set(found) == {("item", ""), ("device", "")}
    assert all(site.startswith(__file__) for site in found.values())
    assert sum(sites.values()) == 2
