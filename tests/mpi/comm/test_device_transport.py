"""Tensors on an accelerator between ranks, by each way that they can go.

Run with ``SPATIALDL_DEVICE=sim`` (or ``cuda``) and ``SPATIALDL_DEVICE_PATH=nccl|mpi|host``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import spatialdl
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import (
    DevicePath,
    _Chosen,
    backend_for,
    choose_device_path,
    device_path,
)
from spatialdl.comm.device_transport import Lane
from spatialdl.comm.groups import start
from spatialdl.comm.handover import DIRECTIONS, Direction, Handover, HandoverShape
from spatialdl.comm.repartition import move, move_back, view_of
from spatialdl.comm.world import as_communicator
from spatialdl.layout.layout import Box, Layout
from tests.mpi.comm.test_transport import over_torch, shifted
from tests.mpi.device import DEVICE
from tests.mpi.equality_networks import OddNet
from tests.mpi.one_message import start_receive, start_send

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu", reason="SPATIALDL_DEVICE names no accelerator"
)
on_sim = pytest.mark.skipif(DEVICE.type != "sim", reason="only the simulated device is watched")


@pytest.fixture(params=["mpi", "torch"])
def ranks(request: pytest.FixtureRequest) -> Communicator:
    """All ranks, over each transport."""
    if request.param == "mpi":
        return as_communicator(MPI.COMM_WORLD)
    if device_path().name == "mpi":
        pytest.skip("torch.distributed does not talk by MPI")
    return over_torch()


@pytest.fixture(params=[0, 300], ids=["at once", "delayed"])
def delays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Streams that work at once, and streams that dawdle at random."""
    if request.param and DEVICE.type != "sim":
        pytest.skip("only streams of the simulated device can be delayed")
    if request.param:
        torch.sim.set_delay(request.param, seed=MPI.COMM_WORLD.rank)
    yield
    if request.param:
        torch.sim.set_delay(0)


def moved_there_and_back(ranks: Communicator) -> tuple[bool, bool]:
    """Whether tiles with halos, and what comes back of them, are right; and the images after it."""
    image = torch.randn(2, 3, 13, 6, generator=torch.Generator().manual_seed(1))
    plan, whole = shifted(ranks, (2, 13, 6)), Box(((0, 2), (0, 13), (0, 6)))
    tile = view_of(image, whole, plan.own).to(DEVICE).contiguous(memory_format=torch.channels_last)
    there = back = True
    for _ in range(10):  # memory is given back and taken again while messages are under way
        own = (tile + 1) - 1
        moved = move(ranks, plan, own)
        returned = move_back(ranks, plan, moved * 1)
        del own
        wanted = view_of(image, whole, plan.need)
        there &= torch.allclose(moved.cpu(), wanted, rtol=0, atol=1e-5)
        kept = torch.ones(13)
        for other in plan.needed[: ranks.rank] + plan.needed[ranks.rank + 1 :]:
            kept[other.spatial[0][0] : other.spatial[0][1]] += 1
        rows = slice(*plan.own.spatial[0])
        sums = view_of(image, whole, plan.own) * kept[rows].view(-1, 1)
        back &= torch.allclose(returned.cpu(), sums, rtol=0, atol=1e-5)
    return there, back


def lanes_between(ranks: Communicator) -> dict[Direction, Lane]:
    """A lane for each direction where hand-overs have some."""
    if device_path().name != "nccl":
        return {}
    return {direction: Lane(ranks, range(ranks.size), DEVICE) for direction in DIRECTIONS}


def handed_over_and_back(ranks: Communicator) -> tuple[bool, bool]:
    """From all ranks but the last one to that; what is sent is gone at once, on purpose."""
    image = torch.randn(2, 3, 13, 6, generator=torch.Generator().manual_seed(1))
    last = ranks.size - 1
    sender, receiver = (Layout.even(2, (13, 6), (n, 1)) for n in (last, 1))
    what = HandoverShape((2, 3, 13, 6), torch.float32, sender, receiver)
    lanes = lanes_between(ranks)
    handover = Handover(ranks, range(last), [last], ranks.rank, tag=0, tags=1, lanes=lanes)
    box = receiver.boxes[0] if ranks.rank == last else sender.boxes[ranks.rank]
    tile = view_of(image, receiver.boxes[0], box).to(DEVICE).contiguous()
    found: list[Tensor] = []
    for number in range(10):  # in the order of 1F1B
        if ranks.rank == last:
            found.append(handover.receive(what, number, DEVICE))
            handover.expect(what, number + 1, DEVICE) if number < 9 else None
            handover.send_back((found[-1] + 1) * 2, what, number)
        else:
            handover.send((tile + number) * 1, what, number)
            if number > 1:
                found.append(handover.receive_back(what, number - 2, DEVICE))
            _ = torch.full_like(tile, 7.0)  # where what was sent has been
    if ranks.rank < last:
        found += [handover.receive_back(what, number, DEVICE) for number in (8, 9)]
    handover.wait_sent()
    wanted = view_of(image, receiver.boxes[0], box)
    factor, more = (1, 0) if ranks.rank == last else (2 * last, 1)
    right = all(
        torch.allclose(one.cpu(), factor * (wanted + number + more), rtol=0, atol=1e-4)
        for number, one in enumerate(found)
    )
    return (right, True) if ranks.rank == last else (True, right)


@pytest.mark.world(2, 3, 4)
def test_stages_hand_over(ranks: Communicator, delays: None) -> None:
    assert handed_over_and_back(ranks) == (True, True)


def test_a_plan_moves_tensors(ranks: Communicator, delays: None) -> None:
    assert moved_there_and_back(ranks) == (True, True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_sums_and_collections(ranks: Communicator, dtype: torch.dtype, delays: None) -> None:
    own = torch.arange(35, device=DEVICE).view(7, 5).to(dtype).mul_(ranks.rank + 1)
    total = ranks.all_reduce(own.t())
    everybody = ranks.all_gather(own.t())
    own.zero_()  # what was asked for is not changed by what comes after
    factor = sum(range(1, ranks.size + 1))
    wanted = torch.arange(35).view(7, 5).to(dtype).t()
    assert total.device.type == DEVICE.type
    assert torch.equal(total.cpu(), wanted * factor)
    assert torch.equal(everybody.cpu(), torch.stack([wanted * (n + 1) for n in range(ranks.size)]))


def test_a_sum_may_be_started_and_waited_for(ranks: Communicator, delays: None) -> None:
    values = torch.arange(1000.0, device=DEVICE) * (ranks.rank + 1)
    pending = ranks.start_all_reduce(values)
    pending.wait()
    total = values * 2
    assert torch.equal(total.cpu(), torch.arange(1000.0) * ranks.size * (ranks.size + 1))


def test_messages_between_two_ranks(ranks: Communicator, delays: None) -> None:
    """Around the ring, while what they hold is still being computed."""
    values = torch.arange(60.0, device=DEVICE).view(3, 4, 5).transpose(0, 2)
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    lane = ranks.duplicate()
    for _ in range(10):
        landed = torch.zeros(5, 4, 3, device=DEVICE)
        arriving = start_receive(lane, landed, before, 7)
        leaving = start_send(lane, values + ranks.rank, after, 7)
        arriving.wait()
        assert torch.equal(landed.cpu(), values.cpu() + before)
        leaving.wait()


def test_equals_one_process(ranks: Communicator, delays: None) -> None:
    mesh = spatialdl.init_mesh((ranks.size, 1), comm=ranks)
    torch.manual_seed(1)
    plain = OddNet().double()
    ours = copy.deepcopy(plain).to(DEVICE)
    images = torch.randn(2, 3, 101, 50, dtype=torch.float64)
    plain(images).square().sum().backward()
    ours(spatialdl.shard(images.to(DEVICE), mesh)).square().sum().backward()
    spatialdl.average_gradients(ours, mesh)
    for (name, theirs), parameter in zip(plain.named_parameters(), ours.parameters(), strict=True):
        difference = (theirs.grad - parameter.grad.cpu()).abs().max().item()
        assert difference <= 1e-9, f"{name} differs by {difference}"


def one_handover(ranks: Communicator, values: Tensor) -> Callable[[], object]:
    """From the first rank to the last, and back."""
    layout = Layout.even(2, (13, 6), (1, 1))
    what, last = HandoverShape((2, 1, 13, 6), values.dtype, layout, layout), ranks.size - 1
    lanes = {}
    if device_path().name == "nccl" and ranks.rank in (0, last):
        lanes = {direction: Lane(ranks, [0, last], DEVICE) for direction in DIRECTIONS}
    me = int(ranks.rank == last)
    handover = Handover(ranks, [0], [last], me, tag=0, tags=1, lanes=lanes)
    whole = values.new_ones(2, 1, 13, 6)

    def there_and_back() -> None:
        if ranks.rank == 0:
            handover.send(whole, what, 0)
            handover.receive_back(what, 0, DEVICE)
        elif ranks.rank == last:
            handover.send_back(handover.receive(what, 0, DEVICE), what, 0)
        handover.wait_sent()

    return there_and_back


@on_sim
@pytest.mark.parametrize("what", ["sum", "collection", "exchange", "hand-over"])
def test_how_often_the_host_waits(what: str) -> None:
    """By `nccl` never, else once: for what is to be sent. MPI fills memory of the device, too."""
    ranks = as_communicator(MPI.COMM_WORLD)
    plan = shifted(ranks, (2, 13, 6))
    values = torch.ones(plan.own.shape, device=DEVICE).unsqueeze(1)
    calls: dict[str, Callable[[], object]] = {
        "sum": lambda: ranks.all_reduce(values[:, :, :1]),
        "collection": lambda: ranks.all_gather(values[:, :, :1]),
        "exchange": lambda: move(ranks, plan, values),
        "hand-over": one_handover(ranks, values),
    }
    calls[what]()  # the first one sets up groups
    torch.sim.synchronize()
    with torch.sim.wait_sites(str(Path(spatialdl.__file__).parent)) as sites:
        calls[what]()
    waits = {"nccl": 0, "mpi": 2 if what == "hand-over" else 1}.get(device_path().name, 1)
    assert sum(sites.values()) == waits, dict(sites)


# --- the choice


@pytest.fixture
def undecided() -> Iterator[None]:
    before, _Chosen.path = _Chosen.path, None
    yield
    _Chosen.path = before


@pytest.mark.world(2, 3, 4)
def test_ranks_that_share_a_device_do_not_take_nccl(undecided: None) -> None:
    ranks, first = as_communicator(MPI.COMM_WORLD), torch.device(DEVICE.type, 0)
    path = choose_device_path(ranks, first)
    assert path is not None
    assert path.name in ("mpi", "host")
    assert "ranks 0 and 1 share a device" in path.reason
    _Chosen.path = None
    with pytest.raises(ValueError, match="device_path=nccl is unavailable: ranks 0 and 1 share"):
        choose_device_path(ranks, first, "nccl")


SHARED, OWN = "ranks 0 and 1 share a device", "every rank has a separate device"


@pytest.mark.parametrize(
    ("describe", "reason"),
    [
        (lambda rank: {"uuid": "GPU-7"}, SHARED),
        (lambda rank: {"uuid": f"GPU-{rank}"}, OWN),
        (lambda rank: {"uuid": f"MIG-{rank}", **address(7)}, SHARED),
        (lambda rank: {"uuid": "GPU-7", **address(rank)}, OWN),
    ],
    ids=["one", "several", "parts of one", "several by their addresses"],
)
def test_ranks_that_see_one_device_each(
    describe: Callable[[int], dict[str, object]],
    reason: str,
    undecided: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where CUDA_VISIBLE_DEVICES names one for each rank: they all call it device 0."""
    ranks = as_communicator(MPI.COMM_WORLD)
    if ranks.size == 1 or backend_for(DEVICE) is None:
        pytest.skip("one rank shares with no other, or PyTorch has no collectives for the device")
    found = SimpleNamespace(**describe(ranks.rank))
    module = torch.get_device_module(DEVICE)
    monkeypatch.setattr(module, "get_device_properties", lambda device: found)
    path = choose_device_path(ranks, torch.device(DEVICE.type, 0))
    ranks.barrier()  # the first rank holds the store to which the others connect
    assert path is not None
    assert reason in path.reason
    assert (path.name == "nccl") == (reason == OWN)


def address(bus: int) -> dict[str, object]:
    """On the PCI bus, as the properties of CUDA devices have it."""
    return {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}


def test_collectives_of_the_device_need_its_path(undecided: None) -> None:
    """They went by gloo, through the host, and nothing was printed."""
    if backend_for(DEVICE) is None:
        pytest.skip("PyTorch has no collectives for the device")
    _Chosen.path = DevicePath("host", "as configured")
    with pytest.raises(
        ValueError, match=r"comm\.backend=nccl needs .* path is host \(as configured\)"
    ):
        start("nccl")


def test_what_was_chosen_stays() -> None:
    ranks, name = as_communicator(MPI.COMM_WORLD), device_path().name
    assert choose_device_path(ranks, DEVICE) == device_path()
    other = "host" if name != "host" else "nccl"
    with pytest.raises(ValueError, match=f"path is {name} already, not {other}"):
        choose_device_path(ranks, DEVICE, other)


@pytest.mark.world(2, 3, 4)
def test_devices_of_different_kinds_are_refused() -> None:
    ranks = as_communicator(MPI.COMM_WORLD)
    own = DEVICE if ranks.rank else torch.device("cpu")
    with pytest.raises(ValueError, match="different device types"):
        choose_device_path(ranks, own)


def test_backward_runs_on_the_thread_that_calls_it() -> None:
    """MPI may not be called from the threads that autograd has for devices."""
    assert not torch.autograd.is_multithreading_enabled()
