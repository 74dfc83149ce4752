"""The command `spatialdl-features`: features of tiles, or of whole regions."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.capacity import check_capacity
from spatialdl.comm.launch import end_with_launcher, launched, start_ranks
from spatialdl.comm.single_process import SingleProcess
from spatialdl.features.encoders.making import make_encoder
from spatialdl.features.maps.running import map_regions
from spatialdl.features.options import parsed
from spatialdl.features.preparing import (
    FAILED,
    MISUSED,
    OK,
    Prepared,
    finish,
    given_in,
    opened_folder,
    precision_for,
    prepare,
)
from spatialdl.features.workers import FeatureJob, FeatureWorker, check_same, device_for
from spatialdl.predicting.agreed_errors import AgreedError, agreeing

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator
    from spatialdl.features.manifest import Folder

_INTERRUPTED, _TERMINATED = 130, 143


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
        options = parsed(argv)
        if options.jobs > 1:
            given_in(options)  # reports errors before ranks start
            check_capacity(options.jobs)
            return start_ranks(options.jobs, "spatialdl.features.command", argv)
        return _run(options, SingleProcess(), 0)
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


def _as_rank(argv: Sequence[str], local_rank: int) -> int:
    """Run as one of several ranks; an error of one rank ends all."""
    from spatialdl.comm.world import start_world

    install_abort_hook()
    end_with_launcher()
    world = start_world()
    options: argparse.Namespace | int | None = None
    try:
        with agreeing(world):
            if world.rank == 0:  # so that help and errors are printed once
                options = _parsed(argv)
        options = world.bcast(options)
        return options if isinstance(options, int) else _run(options, world, local_rank)
    except AgreedError as error:
        if world.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        world.barrier()  # otherwise a launcher may kill rank 0 before it prints the error
        return FAILED if error.is_io else MISUSED


def _parsed(argv: Sequence[str]) -> argparse.Namespace | int:
    """The options; the exit code after help or a misused option."""
    try:
        return parsed(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else OK if stop.code is None else MISUSED


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
        device = device_for(options.device, local_rank)
        precision = precision_for(options.precision, device)
        encoder = make_encoder(options.wish)
        if world.rank == 0:
            prepared = prepare(options, given, encoder)
    agreed: Prepared = world.bcast(prepared)
    with agreeing(world):
        if world.size > 1:
            check_same(encoder, agreed.digest)
    if options.whole:
        return map_regions(agreed, world, encoder, device, precision)
    folder: Folder | None = None
    job: FeatureJob | None = None
    with ExitStack() as stack:
        with agreeing(world):
            if world.rank == 0:
                folder = stack.enter_context(opened_folder(agreed))
                job = agreed.job(precision)
                stack.callback(job.claims.remove)
        job = world.bcast(job)
        assert job is not None
        with agreeing(world):
            outcome = FeatureWorker(job, encoder, device, shows=world.rank == 0).run()
        outcomes = world.gather(outcome)
        code = None if folder is None else finish(agreed, folder, outcomes or [])
        return int(world.bcast(code))


if __name__ == "__main__":
    sys.exit(main())
