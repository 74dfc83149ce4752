"""The command `spatialdl-features`: features of tiles, or of whole regions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING

import torch

from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.capacity import check_capacity, usable_cores
from spatialdl.comm.launch import end_with_launcher, launched, start_ranks
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.outcomes import FAILED, MISUSED, run_command
from spatialdl.inference.features.encoders.making import make_encoder
from spatialdl.inference.features.maps.network import RegionParts, grid_for
from spatialdl.inference.features.maps.regions import RegionSource, stride_of
from spatialdl.inference.features.maps.running import MapJob, MapWorker
from spatialdl.inference.features.options import parsed
from spatialdl.inference.features.preparing import (
    Prepared,
    finish,
    given_in,
    opened_folder,
    precision_for,
    prepare,
)
from spatialdl.inference.features.workers import FeatureJob, FeatureWorker, check_same, device_for
from spatialdl.inference.predicting.agreed_errors import AgreedError, agreeing, parse_once

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator
    from spatialdl.inference.features.encoders.encoder import Encoder
    from spatialdl.inference.features.results import Folder
    from spatialdl.training.optimization.precision import Precision


def main(argv: Sequence[str] | None = None) -> int:
    """Compute features of slides or of a data set.

    Under mpiexec, srun or torchrun it is collective; ranks share the slides, or each region.

    Args:
        argv: arguments of the command; those of the process if None.

    Returns:
        The exit code: 0 if all slides succeeded; 1 if some failed (0 with `--skip-errors`), there
        were no tiles, or on I/O errors; 2 for invalid arguments or files; 130 or 143 if
        interrupted or terminated.
    """
    argv = sys.argv[1:] if argv is None else argv
    info = launched()
    if info is not None and info.size > 1:
        return _as_rank(argv, info.local_rank)
    return run_command(lambda: _start(argv))


def _start(argv: Sequence[str]) -> int:
    options = parsed(argv)
    if options.jobs > 1:
        given_in(options)  # reports errors before ranks start
        check_capacity(options.jobs)
        return start_ranks(options.jobs, "spatialdl.inference.features.command", argv)
    return _run(options, SingleProcess(), 0)


def _as_rank(argv: Sequence[str], local_rank: int) -> int:
    """Run as one of several ranks; an error of one rank ends all."""
    from spatialdl.comm.world import start_world

    install_abort_hook()
    end_with_launcher()
    world = start_world()
    try:
        options = parse_once(world, lambda: parsed(argv))
        return options if isinstance(options, int) else _run(options, world, local_rank)
    except AgreedError as error:
        if world.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        world.barrier()  # otherwise a launcher may kill rank 0 before it prints the error
        return FAILED if error.is_io else MISUSED


def _run(options: argparse.Namespace, world: Communicator, local_rank: int) -> int:
    """Run on all ranks; collective.

    Returns:
        The exit code.
    """
    prepared: Prepared | None = None
    with agreeing(world):
        if options.jobs not in (1, world.size):
            raise ValueError(
                f"--jobs {options.jobs} starts as many ranks, but there are {world.size} already: "
                "leave it out"
            )
        given = given_in(options) if world.rank == 0 else []
        if options.jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cores() // options.jobs))
        device = device_for(options.device, local_rank)
        precision = precision_for(options.precision, device)
        encoder = make_encoder(options.wish)
        if world.rank == 0:
            prepared = prepare(options, given, encoder)
    agreed: Prepared = world.bcast(prepared)
    with agreeing(world):
        if world.size > 1:
            check_same(encoder, agreed.digest)
    return compute(agreed, world, encoder, device, precision)


def compute(
    prepared: Prepared,
    world: Communicator,
    encoder: Encoder,
    device: torch.device,
    precision: Precision,
) -> int:
    """Write features of tiles, or maps of whole regions; collective over `world`.

    Returns:
        The exit code.
    """
    options, source = prepared.options, prepared.source
    folder: Folder | None = None
    maps: MapJob | None = None
    job: FeatureJob | None = None
    with ExitStack() as stack:
        with agreeing(world):
            if isinstance(source, RegionSource):
                maps = MapJob(
                    source,
                    prepared.layout,
                    prepared.about,
                    options.dtype,
                    precision,
                    stride_of(encoder),
                    int(prepared.settings["encoder"]["width"]),
                    _parts(options.grid, options.limit_gb, world.size, device),
                )
            if world.rank == 0:
                folder = stack.enter_context(opened_folder(prepared))
                if maps is None:
                    job = prepared.job(precision)
                    stack.callback(job.claims.remove)
        if maps is not None:
            outcomes = [MapWorker(maps, encoder, device, world).run()]
        else:
            job = world.bcast(job)
            assert job is not None
            with agreeing(world):
                outcome = FeatureWorker(job, encoder, device, shows=world.rank == 0).run()
            outcomes = world.gather(outcome) or []
        code = None if folder is None else finish(prepared, folder, outcomes)
        return int(world.bcast(code))


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


if __name__ == "__main__":
    sys.exit(main())
