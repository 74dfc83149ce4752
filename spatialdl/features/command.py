"""The command `spatialdl-features`: features of tiles, or of whole regions."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

import torch

from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.launch import end_with_launcher, launched
from spatialdl.comm.single_process import SingleProcess
from spatialdl.features.agreed_errors import FAILED, MISUSED, AgreedError, agreeing
from spatialdl.features.encoders.encoder import Encoder
from spatialdl.features.encoders.making import make_encoder
from spatialdl.features.finishing import finish
from spatialdl.features.map_run import map_regions
from spatialdl.features.options import parsed
from spatialdl.features.preparing import (
    Prepared,
    given_in,
    opened_folder,
    precision_for,
    prepare,
)
from spatialdl.features.workers import (
    SlideProgress,
    check_same,
    device_for,
    run_processes,
    run_single_process,
)
from spatialdl.features.working import FeatureJob, FeatureWorker
from spatialdl.training.optimization.precision import Precision

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

_OK, _INTERRUPTED, _TERMINATED = 0, 130, 143


class _TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM."""


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
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _single_process(argv)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED if isinstance(error, OSError) else MISUSED
    except KeyboardInterrupt as error:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return _TERMINATED if isinstance(error, _TerminatedError) else _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError


def _single_process(argv: Sequence[str]) -> int:
    options = parsed(argv)
    given = given_in(options)
    device = device_for(options.device, 0)
    precision = precision_for(options.precision, device)
    encoder = make_encoder(options.wish)
    prepared = prepare(options, given, encoder)
    if options.whole:
        return map_regions(prepared, SingleProcess(), encoder, device, precision)
    with opened_folder(prepared) as folder:
        job = prepared.job(precision)
        try:
            if options.jobs > 1:
                digest = prepared.digest
                outcomes = run_processes(job, options.wish, digest, options.device, options.jobs)
            else:
                outcomes = run_single_process(job, encoder, device)
        finally:
            job.claims.remove()
        return finish(prepared, folder, outcomes)


def _as_rank(argv: Sequence[str], local_rank: int) -> int:
    """Run as one of several ranks; an error of one rank ends all."""
    from spatialdl.comm.world import start_world

    install_abort_hook()
    end_with_launcher()
    world = start_world()
    options, code = _parsed_once(argv, world)
    if options is None:
        return code
    try:
        return _ranks(options, world, local_rank)
    except AgreedError as error:
        if world.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        world.barrier()  # otherwise a launcher may kill rank 0 before it prints the error
        return error.code


def _parsed_once(argv: Sequence[str], world: Communicator) -> tuple[argparse.Namespace | None, int]:
    """Parse the options on rank 0, so that help and errors are printed once."""
    found: tuple[argparse.Namespace | None, int] = None, _OK
    if world.rank == 0:
        try:
            found = parsed(argv), _OK
        except SystemExit as stop:
            found = None, stop.code if isinstance(stop.code, int) else MISUSED
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            found = None, MISUSED
    agreed: tuple[argparse.Namespace | None, int] = world.bcast(found)
    return agreed


def _ranks(options: argparse.Namespace, world: Communicator, local_rank: int) -> int:
    with agreeing(world):
        if options.jobs > 1:
            raise ValueError(
                f"--jobs {options.jobs} is for a single process, but {world.size} ranks share the "
                "slides: leave it out"
            )
        device = device_for(options.device, local_rank)
        precision = precision_for(options.precision, device)
        encoder = make_encoder(options.wish)
    prepared: Prepared | None = None
    with agreeing(world):
        if world.rank == 0:
            prepared = prepare(options, given_in(options), encoder)
    agreed: Prepared = world.bcast(prepared)
    with agreeing(world):
        check_same(encoder, agreed.digest)
    if options.whole:
        return map_regions(agreed, world, encoder, device, precision)
    if world.rank == 0:
        return _first_rank(agreed, world, encoder, device, precision)
    job: FeatureJob | None = None
    with agreeing(world):
        pass
    job = world.bcast(None)
    assert job is not None
    with agreeing(world):
        outcome = FeatureWorker(job, encoder, device, lambda report, tiles: None).run()
    world.gather(outcome)
    code: int = world.bcast(None)
    return code


def _first_rank(
    prepared: Prepared,
    world: Communicator,
    encoder: Encoder,
    device: torch.device,
    precision: Precision,
) -> int:
    holding = opened_folder(prepared)
    with agreeing(world):
        folder = holding.__enter__()
    try:
        job = world.bcast(prepared.job(precision))
        progress = SlideProgress(len(job.source.tasks), job)
        with agreeing(world):
            outcome = FeatureWorker(job, encoder, device, progress.update).run()
        progress.close()
        outcomes = world.gather(outcome) or []
        job.claims.remove()
        code = finish(prepared, folder, outcomes)
    finally:
        holding.__exit__(None, None, None)
    world.bcast(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
