"""The ranks of the benchmarks, on whatever device these tests compute on."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import spatialdl
from benchmarks import communication_worker, harness, layouts_worker, spatial
from benchmarks.communication import CALL, MEMCPY, NEW_STRIPS, NOTHING, OURS, RAW
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import backend_for, device_path
from tests.composing import composed
from tests.mpi.conftest import TRANSPORT
from tests.mpi.device import DEVICE, current_device

pytestmark = pytest.mark.skipif(TRANSPORT != "mpi", reason="the benchmarks talk by MPI")

HERE = torch.device("cpu") if DEVICE.type == "cpu" else current_device()


@pytest.fixture(autouse=True)
def no_clock_of_the_host(monkeypatch):
    """Seconds of an accelerator are its own."""
    if DEVICE.type != "cpu":
        monkeypatch.setattr(harness, "time", None)


@pytest.mark.usefixtures("ends_process_group")
@pytest.mark.parametrize("ddp", [None, "auto", spatial.NO_MESSAGES])
def test_steps_of_tiles_and_of_ddp(ddp: str | None, world: Communicator) -> None:
    if ddp and dist.is_initialized():
        pytest.skip("torch.distributed was initialised by others")
    given = Namespace(model="resnet18", size=48, batch=1, steps=2, device=HERE.type)
    options = spatial.training(given, ddp=ddp, recompute=not ddp)
    if ddp:
        spatial.start_ddp(ddp, world, HERE)
        backends = {"cpu": "gloo", "host": "mpi4py", "mpi": "mpi4py"}
        kind = "cpu" if HERE.type == "cpu" else device_path().name
        assert dist.get_backend() == backends.get(kind, backend_for(HERE))
    mesh = None if ddp else spatialdl.init_mesh((world.size, 1), check=False)
    found = spatial.measure(options, mesh, world, HERE)
    assert len(found["seconds"]) == 2
    assert min(found["seconds"]) > 0


def test_all_variants_of_an_exchange_bring_the_neighbours_pixels(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("no neighbours")
    mesh = spatialdl.init_mesh((world.size, 1), check=False)
    halo = communication_worker.Halo(mesh, channels=2, side=6, device=HERE)
    for name, exchange in halo.variants().items():
        if name in (NEW_STRIPS, NOTHING, MEMCPY, "Sendrecv in two phases"):
            continue  # these write elsewhere, or nothing
        for view in halo.receives:
            view.fill_(-1)
        world.barrier()
        exchange()
        halo.check()
    found = communication_worker.measure_halo(halo, rounds=2, exchanges=2)
    assert len(found) == 9 if HERE.type == "cpu" else 5 + (device_path().name != "host")
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


@pytest.mark.usefixtures("ends_process_group")
def test_sums_of_all_backends(world: Communicator) -> None:
    if dist.is_initialized() or world.size == 1:
        pytest.skip("torch.distributed was initialised by others, or there is nobody to talk to")
    if HERE.type != "cpu" and device_path().name != "nccl":
        with pytest.raises(ValueError, match="no other backend to compare with"):
            communication_worker.other_backend(HERE)
        return
    other = communication_worker.other_backend(HERE)
    import_module("spatialdl.comm.backend")
    dist.init_process_group("mpi4py")
    group = dist.new_group(backend=other)
    found = communication_worker.all_reduces(16, 1, HERE, {other: group})
    assert {size: set(times) for size, times in found.items()} == {
        key: {OURS, RAW, other, CALL} for key in ("4", "16")
    }


@pytest.mark.parametrize(
    "keys", ["parallel=sp parallel.grid=[{},1]", "parallel=lp parallel.stages={}"]
)
def test_steps_of_the_training_command(keys: str, world: Communicator) -> None:
    if world.size == 1 and "stages" in keys:
        pytest.skip("no stages")
    keys = f"data.image_size=[48,48] data.batch_size=2 {keys.format(world.size)} device={HERE.type}"
    config = composed("train", *keys.split())
    options = Namespace(warmup=1, rounds=2, steps=1)
    found = layouts_worker.measure(config, options, world)
    assert len(found["rounds"]) == 2
    assert min(found["rounds"]) > 0
    assert found["device"] == harness.describe(HERE)
    assert len(found["ideal"]) == 2 * ("stages" in keys)
    # The ideal is made of mean times of actions: on a busy machine it may exceed the one step.
    assert all(ideal > 0 and seconds > 0 for ideal, seconds in found["ideal"])
