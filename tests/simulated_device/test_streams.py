"""Streams run later, in order, and missing synchronisation shows."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

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


def test_two_streams_run_independently():
    side = torch.Stream("sim")
    with held(side):
        assert torch.ones(3, device="sim").sum().item() == 3


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


def test_a_stream_waits_for_an_event():
    side, event = torch.Stream("sim"), torch.Event("sim")
    x = torch.zeros(3, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with held(side) as gate:
        with side:
            x.add_(1)
            event.record()
        torch.sim.current_stream().wait_event(event)
        y = x + 1
        busy = torch.Stream("sim")
        for _ in range(500):  # time enough for a stream that does not wait
            torch.sim.enqueue(threading.get_ident, busy)
        busy.synchronize()
        assert not event.query()
        assert not torch.sim.current_stream().query()
        gate.set()
    assert y.tolist() == [2, 2, 2]
    assert event.query()


def test_an_event_that_is_recorded_again_counts_from_there():
    event = torch.Event("sim")
    event.record()
    event.synchronize()
    with held():
        event.record()
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_time_between_events():
    first, second = (torch.Event("sim", enable_timing=True) for _ in range(2))
    first.record()
    torch.ones(1000, device="sim").sum()
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) > 0


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


def test_functions_run_in_order():
    seen = []
    x = torch.zeros(1, device="sim")
    torch.sim.enqueue(lambda: seen.append(float(torch.sim.host_view(x))))
    x.add_(1)
    torch.sim.enqueue(lambda: seen.append(float(torch.sim.host_view(x))))
    torch.sim.synchronize()
    assert seen == [0, 1]


def test_an_error_of_a_function_is_raised_where_the_host_waits():
    def fails() -> None:
        raise ValueError("no such peer")

    torch.sim.enqueue(fails)
    with pytest.raises(RuntimeError, match="no such peer"):
        torch.sim.synchronize()


def test_functions_write_to_device_memory():
    x = torch.zeros(4, device="sim:1")
    stream = torch.sim.current_stream(1)
    torch.sim.enqueue(lambda: torch.sim.host_view(x).copy_(torch.arange(4.0)), stream)
    assert (x * 2).tolist() == [0, 2, 4, 6]


def test_a_native_function_needs_no_interpreter():
    library = ctypes.PyDLL(None)  # which keeps the interpreter to itself while it waits
    semaphore = ctypes.create_string_buffer(64)
    library.sem_init(semaphore, 0, 0)
    post = ctypes.cast(library.sem_post, ctypes.c_void_p).value
    torch.sim.enqueue_native(post, ctypes.addressof(semaphore))
    assert library.sem_wait(semaphore) == 0


@pytest.mark.parametrize("left", ["", "torch.sim.set_delay(1000)\n"])
def test_a_process_ends_with_work_under_way(left):
    program = """
x = torch.ones(1000, device="sim", requires_grad=True)
for _ in range(50):
    (x * 2).sum().backward()
torch.sim.enqueue(lambda: print("done", flush=True))
"""
    done = ran(left + program)
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
