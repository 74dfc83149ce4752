"""Run of `--whole`: every region on all ranks."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod

import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.features.agreed_errors import agreeing
from spatialdl.features.encoders.encoder import Encoder
from spatialdl.features.finishing import finish
from spatialdl.features.manifest import Folder
from spatialdl.features.maps.network import RegionParts, grid_for
from spatialdl.features.maps.regions import RegionSource
from spatialdl.features.maps.running import MapJob, MapWorker
from spatialdl.features.maps.stride import stride_of
from spatialdl.features.preparing import Prepared, opened_folder
from spatialdl.training.optimization.precision import Precision


def map_regions(
    prepared: Prepared,
    world: Communicator,
    encoder: Encoder,
    device: torch.device,
    precision: Precision,
) -> int:
    """Write maps of whole regions; collective over `world`.

    Returns:
        The exit code.
    """
    with ExitStack() as stack:
        folder: Folder | None = None
        with agreeing(world):
            job = _job(prepared, world, encoder, device, precision)
            if world.rank == 0:
                folder = stack.enter_context(opened_folder(prepared))
        outcome = MapWorker(job, encoder, device, world).run()
        code = finish(prepared, folder, [outcome]) if folder is not None else None
        agreed: int = world.bcast(code)
        return agreed


def _job(
    prepared: Prepared,
    world: Communicator,
    encoder: Encoder,
    device: torch.device,
    precision: Precision,
) -> MapJob:
    options, source = prepared.options, prepared.source
    assert isinstance(source, RegionSource)
    return MapJob(
        source,
        prepared.layout,
        prepared.about,
        options.dtype,
        precision,
        stride_of(encoder),
        int(prepared.settings["encoder"]["width"]),
        _parts(options.grid, options.limit_gb, world.size, device),
    )


def _parts(
    grid: tuple[int, int] | None, limit_gb: float | None, ranks: int, device: torch.device
) -> RegionParts:
    """The parts into which regions are split.

    Raises:
        ValueError: options conflict with the number of ranks or the device.
    """
    if ranks > 1 and limit_gb is not None:
        raise ValueError(
            f"--limit-gb {limit_gb:g} is for a single process, but {ranks} ranks share each "
            "region: leave it out"
        )
    if ranks > 1 and grid is not None and prod(grid) != ranks:
        raise ValueError(
            f"--grid {grid[0]},{grid[1]} needs {prod(grid)} ranks, but there are {ranks}: leave it "
            "out, or start as many"
        )
    if limit_gb is not None and device.type != "cpu":
        raise ValueError(
            f"--limit-gb {limit_gb:g} limits host memory, but the encoder is on {device}: add "
            "--device cpu, or leave it out"
        )
    return RegionParts(grid or grid_for(ranks), limit_gb)
