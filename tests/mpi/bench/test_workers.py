"""The ranks of the benchmarks, on whatever device these tests compute on."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import spatialdl
from spatialdl.bench import (
    backend_worker,
    device,
    late_worker,
    pipeline_worker,
    synthetic_worker,
    worker,
)
from spatialdl.bench.halo_worker import Halo
from spatialdl.bench.halo_worker import measure as measure_halo
from spatialdl.bench.pipeline import layouts
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import device_path
from tests.composing import composed
from tests.mpi.conftest import TRANSPORT
from tests.mpi.device import DEVICE, current_device

pytestmark = pytest.mark.skipif(TRANSPORT != "mpi", reason="the benchmarks talk by MPI")

HERE = torch.device("cpu") if DEVICE.type == "cpu" else current_device()


@pytest.fixture(autouse=True)
def no_clock_of_the_host(monkeypatch):
    """Seconds of an accelerator are its own."""
    if DEVICE.type != "cpu":
        monkeypatch.setattr(device, "time", None)


def trained(world: Communicator, **options: object) -> dict[str, object]:
    given = Namespace(**{"model": "resnet18", "recompute": False, "ddp": False, **options})
    mesh = None if given.ddp else spatialdl.init_mesh((world.size, 1), check=False)
    return worker.measure(Namespace(**vars(given), steps=2), mesh, world, HERE)


def test_steps_of_tiles(world: Communicator) -> None:
    found = trained(world, batch=1, size=48, recompute=True)
    assert len(found["seconds"]) == 2
    assert min(found["seconds"]) > 0
    assert found["device"] == device.describe(HERE)


@pytest.mark.usefixtures("ends_process_group")
def test_steps_of_ddp(world: Communicator) -> None:
    if dist.is_initialized():
        pytest.skip("torch.distributed was initialised by others")
    worker._start_ddp(world, HERE)
    backends = {"cpu": "gloo", "host": "mpi4py", "mpi": "mpi4py"}
    kind = "cpu" if HERE.type == "cpu" else device_path().name
    assert dist.get_backend() == backends.get(kind, backend_worker.backend_for(HERE))
    found = trained(world, batch=1, size=48, ddp=True)
    assert min(found["seconds"]) > 0


def test_all_variants_of_an_exchange_bring_the_neighbours_pixels(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("no neighbours")
    mesh = spatialdl.init_mesh((world.size, 1), check=False)
    halo = Halo(mesh, channels=2, side=6, device=HERE)
    writing = {
        name: exchange
        for name, exchange in halo.variants().items()
        if name not in ("spatialdl, new strips", "no communication", "memcpy")
    }
    if HERE.type == "cpu":
        del writing["Sendrecv in two phases"]  # into a tile of its own
    else:
        assert len(writing) == 2 + (device_path().name != "host")
    for exchange in writing.values():
        for view in halo.receives:
            view.fill_(-1)
        world.barrier()
        exchange()
        halo.check()
    found = measure_halo(halo, rounds=2, exchanges=2)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


def test_steps_of_pipelines(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("no stages")
    options = Namespace(model="resnet18", size=64)
    for layout in layouts(world.size, 2):
        if layout.name != "GEMS basic":  # whose copies average gradients while hand-overs come
            continue
        side = pipeline_worker.PipelineVariant(layout, options, world, HERE)
        side.step(0)
        side.measure(1)
        if world.rank == 0:
            assert side.found["seconds"][0] > 0
            assert side.found["ideal"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("network", ["resnet50", "vgg16"])
def test_sides_of_late_layers_compute_the_same(network: str, world: Communicator) -> None:
    if world.size == 1 or (network == "vgg16" and world.size > 2):
        pytest.skip("nothing to divide, or too much memory for all together")
    options = Namespace(network=network, size=64, batch=world.size, ranks=world.size, alone=True)
    sides = [late_worker.LateVariant(name, options, HERE) for name in late_worker._names(options)]
    for side in sides:
        side.start()
    late_worker.check_alike({side.name: side.loss for side in sides}, world)
    found = {side.name: side.found for side in sides}
    weights = found["samples"]["weights_mb"]
    assert found["channels"]["weights_mb"] < weights / world.size * 1.02
    assert found["channels"]["sent_mb"] < found["samples"]["sent_mb"]
    with pytest.raises(RuntimeError, match="loss of channels is 2"):
        late_worker.check_alike({"space": 1.0, "channels": 2.0}, world)
    sides[2].measure()
    if world.rank == 0:
        assert found["channels"]["seconds"][0] > 0


@pytest.mark.usefixtures("ends_process_group")
def test_sums_and_steps_of_both_backends(world: Communicator) -> None:
    if dist.is_initialized() or world.size == 1:
        pytest.skip("torch.distributed was initialised by others, or there is nobody to talk to")
    if HERE.type != "cpu" and device_path().name != "nccl":
        with pytest.raises(ValueError, match="no other backend to compare with"):
            backend_worker._other_backend(HERE)
        return
    other = backend_worker._other_backend(HERE)
    import_module("spatialdl.comm.backend")
    dist.init_process_group("mpi4py")
    options = Namespace(model="resnet18", side=48, batch=2, most=16, rounds=1, steps=1)
    bench = backend_worker.Bench(options, HERE, other, dist.new_group(backend=other))
    sums = bench.all_reduces()
    names = {backend_worker.OURS, backend_worker.RAW, other, backend_worker.CALL}
    found = {size: set(times) for size, times in sums.items()}
    assert found == dict.fromkeys(("4", "16"), names)
    steps = bench.steps()
    assert set(steps) == {backend_worker.OURS, other, backend_worker.SILENT}
    assert all(min(seconds) > 0 for seconds in steps.values())


def test_steps_of_the_training_command(world: Communicator) -> None:
    config = composed(
        "train",
        *("data.image_size=[48,48]", "data.batch_size=2", "parallel=sp"),
        *(f"parallel.grid=[{world.size},1]", f"device={HERE.type}"),
    )
    options = Namespace(warmup=1, rounds=2, steps=1)
    found = synthetic_worker.measure(config, options, world)
    assert len(found["rounds"]) == 2
    assert min(found["rounds"]) > 0
    assert found["device"] == device.describe(HERE)
