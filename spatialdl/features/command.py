"""The command that computes features of tiles: `spatialdl-features`."""

from __future__ import annotations

import argparse
import glob
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.launch import end_with_launcher, launched
from spatialdl.data.format import MANIFEST
from spatialdl.features.claims import new_claims
from spatialdl.features.encoders.encoder import Encoder
from spatialdl.features.encoders.making import make_encoder
from spatialdl.features.manifest import Folder, encoder_settings
from spatialdl.features.options import PRECISIONS, cutting_settings, given_cutting, parsed
from spatialdl.features.results import LAYOUTS, Layout
from spatialdl.features.sources import SetSource, SlideSource, Source
from spatialdl.features.workers import (
    Progress,
    check_same,
    device_for,
    run_alone,
    run_processes,
)
from spatialdl.features.working import Job, Outcome, Worker
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.finding_slides import find_slides, slide_names
from spatialdl.slides.batch.report import save_reports, table, warnings, why_nothing
from spatialdl.slides.batch.steps import Task
from spatialdl.slides.reading.paths import series_at, slide_bytes
from spatialdl.text import counted, print_lines
from spatialdl.training.optimization.precision import Precision, precision_of
from spatialdl.training.run_lock import held

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

PROCESS_LIST = "process_list.csv"
_OK, _FAILED, _MISUSED, _INTERRUPTED, _TERMINATED = 0, 1, 2, 130, 143


class _TerminatedError(KeyboardInterrupt):
    """The process was asked to end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compute features of slides or of a data set.

    Under mpiexec, srun or torchrun all ranks call it, and share the slides.

    Args:
        argv: arguments of the command; those of the process if None.

    Returns:
        The exit code: 0 when every slide could be used, 1 when some could not (with
        `--skip-errors` that is 0 too) or none gave a tile, 2 for a mistake in the arguments or
        files given, 130 or 143 when it was interrupted or terminated.
    """
    argv = sys.argv[1:] if argv is None else argv
    info = launched()
    if info is not None and info.size > 1:
        return _as_rank(argv, info.local_rank)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _alone(argv)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED if isinstance(error, OSError) else _MISUSED
    except KeyboardInterrupt as error:
        print("interrupted; slides that are done are kept, run the same again", file=sys.stderr)
        return _TERMINATED if isinstance(error, _TerminatedError) else _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError


@dataclass(frozen=True)
class _Prepared:
    """A run that can begin."""

    options: argparse.Namespace
    source: Source
    settings: dict[str, Any]

    @property
    def digest(self) -> str:
        return str(self.settings["encoder"]["state_sha256"])

    def job(self, layout: Layout, precision: Precision) -> Job:
        options = self.options
        about = {
            "encoder": options.wish.name,
            "encoder_sha256": self.digest,
            "precision": options.precision,
        }
        return Job(
            self.source,
            new_claims(layout.out, len(self.source.tasks)),
            layout,
            about,
            options.dtype,
            precision,
            options.batch_size,
            options.readers,
        )


def _alone(argv: Sequence[str]) -> int:
    options = parsed(argv)
    given = _given(options)
    device = device_for(options.device, 0)
    precision = _precision(options.precision, device)
    encoder = make_encoder(options.wish)
    prepared = _prepare(options, given, encoder)
    with _folder(prepared) as folder:
        job = prepared.job(folder.layout, precision)
        try:
            if options.jobs > 1:
                digest = prepared.digest
                outcomes = run_processes(job, options.wish, digest, options.device, options.jobs)
            else:
                outcomes = run_alone(job, encoder, device)
        finally:
            job.claims.remove()
        return _finish(prepared, folder, outcomes)


def _as_rank(argv: Sequence[str], local_rank: int) -> int:
    """One of several ranks; what goes wrong on one of them ends all."""
    from spatialdl.comm.world import start_world

    install_abort_hook()
    end_with_launcher()
    world = start_world()
    options, code = _parsed_once(argv, world)
    if options is None:
        return code
    try:
        return _ranks(options, world, local_rank)
    except _AgreedError as error:
        if world.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        world.barrier()  # or a launcher ends rank 0 before it has said so
        return error.code


class _AgreedError(Exception):
    """What went wrong on some rank, raised on all.

    Args:
        text: what.
        code: exit code.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def _parsed_once(argv: Sequence[str], world: Communicator) -> tuple[argparse.Namespace | None, int]:
    """The options, by rank 0, which alone prints help and mistakes."""
    found: tuple[argparse.Namespace | None, int] = None, _OK
    if world.rank == 0:
        try:
            found = parsed(argv), _OK
        except SystemExit as stop:
            found = None, stop.code if isinstance(stop.code, int) else _MISUSED
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            found = None, _MISUSED
    agreed: tuple[argparse.Namespace | None, int] = world.bcast(found)
    return agreed


@contextmanager
def _agreeing(world: Communicator) -> Iterator[None]:
    """What raises on some rank raises on all, at the end of the block."""
    problem: tuple[str, int] | None = None
    try:
        yield
    except OSError as error:
        problem = str(error), _FAILED
    except ValueError as error:
        problem = str(error), _MISUSED
    found = [one for one in world.allgather(problem) if one is not None]
    if found:
        raise _AgreedError(*found[0])


def _ranks(options: argparse.Namespace, world: Communicator, local_rank: int) -> int:
    with _agreeing(world):
        if options.jobs > 1:
            raise ValueError(
                f"--jobs {options.jobs} is for one process; here {world.size} ranks share the "
                "slides: leave it out"
            )
        device = device_for(options.device, local_rank)
        precision = _precision(options.precision, device)
        encoder = make_encoder(options.wish)
    prepared: _Prepared | None = None
    with _agreeing(world):
        if world.rank == 0:
            prepared = _prepare(options, _given(options), encoder)
    agreed: _Prepared = world.bcast(prepared)
    with _agreeing(world):
        check_same(encoder, agreed.digest)
    if world.rank == 0:
        return _first_rank(agreed, world, encoder, device, precision)
    job: Job | None = None
    with _agreeing(world):
        pass
    job = world.bcast(None)
    assert job is not None
    with _agreeing(world):
        outcome = Worker(job, encoder, device, lambda report, tiles: None).run()
    world.gather(outcome)
    code: int = world.bcast(None)
    return code


def _first_rank(
    prepared: _Prepared,
    world: Communicator,
    encoder: Encoder,
    device: torch.device,
    precision: Precision,
) -> int:
    holding = _folder(prepared)
    with _agreeing(world):
        folder = holding.__enter__()
    try:
        job = world.bcast(prepared.job(folder.layout, precision))
        progress = Progress(len(job.source.tasks), job)
        with _agreeing(world):
            outcome = Worker(job, encoder, device, progress.told).run()
        progress.close()
        outcomes = world.gather(outcome) or []
        job.claims.remove()
        code = _finish(prepared, folder, outcomes)
    finally:
        holding.__exit__(None, None, None)
    world.bcast(code)
    return code


# --- before and after the work


def _precision(name: str, device: torch.device) -> Precision:
    try:
        return precision_of(PRECISIONS[name], device)
    except ValueError as error:
        text = str(error)
        for ours, theirs in PRECISIONS.items():
            text = text.replace(f"trainer.precision={theirs}", f"--precision {ours}")
        raise ValueError(text.replace("-mixed", "")) from error


def _given(options: argparse.Namespace) -> list[Path] | Path:
    """The slides, or the folder of a data set.

    Raises:
        ValueError: there is nothing, or options do not suit it.
    """
    paths = [found for one in options.slides for found in _matching(one)]
    sets = [path for path in paths if (path / MANIFEST).is_file()]
    if sets:
        if len(paths) > 1:
            raise ValueError(
                f"{sets[0]} is a data set, which is given alone: name it, or slides, not both"
            )
        if clash := given_cutting(options):
            raise ValueError(
                f"{', '.join(clash)} says how to cut slides, but {sets[0]} is a data set of tiles: "
                "leave it out"
            )
        return sets[0]
    if options.split is not None:
        raise ValueError(f"--split {options.split} is of a data set, slides have none")
    if options.mpp is None and options.mag is None and options.level is None:
        raise ValueError("say how fine tiles of slides are: --mpp X, --mag X or --level N")
    return find_slides(paths, recursive=options.recursive)


def _matching(path: Path) -> list[Path]:
    """A path, or those that match it as a pattern, in which ** stands for any folders."""
    path = path.expanduser()
    if path.exists() or series_at(path) is not None:
        return [path]
    found = [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]
    return found or [path]  # what is wrong with it is told by who opens it


def _prepare(options: argparse.Namespace, given: list[Path] | Path, encoder: Encoder) -> _Prepared:
    settings: dict[str, Any] = {
        "encoder": encoder_settings(options.wish, encoder),
        "precision": options.precision,
        "dtype": options.dtype,
    }
    if options.layout != LAYOUTS[0]:  # older folders do not say so
        settings["layout"] = options.layout
    source: Source
    if isinstance(given, Path):
        settings["set"] = {"split": options.split}
        source = SetSource(given, options.split, settings)
        settings["set"]["tile_size"] = source.side
    else:
        options.tile_size = options.tile_size or encoder.preprocessing.size
        settings["tiling"] = cutting_settings(options)
        choosing = Choosing(options, given)
        names = slide_names(given)
        tasks = [Task(path, name, None, slide_bytes(path)) for path, name in names.items()]
        tasks.sort(key=lambda task: (-task.bytes, task.name))
        source = SlideSource(tasks, options, choosing, settings)
    return _Prepared(options, source, settings)


@contextmanager
def _folder(prepared: _Prepared) -> Iterator[Folder]:
    """The folder of the run, to which no other run writes meanwhile."""
    options = prepared.options
    layout = Layout(options.out.resolve(), options.layout)
    folder = Folder(layout, prepared.settings, overwrite=options.overwrite)
    holding = held(folder.path)
    try:
        holding.__enter__()
    except ValueError as error:
        raise ValueError(str(error).replace("hydra.run.dir", "--out")) from None
    try:
        folder.begin()
        yield folder
    finally:
        holding.__exit__(None, None, None)


def _finish(prepared: _Prepared, folder: Folder, outcomes: Sequence[Outcome]) -> int:
    """Write the tables, print what became of the slides, and give the exit code."""
    reports = sorted((r for one in outcomes for r in one.reports), key=lambda r: r.slide)
    together = folder.finish(reports)
    save_reports(folder.path / PROCESS_LIST, together)
    print_lines(table(reports))
    for line in warnings(reports):
        print(f"warning: {line}", file=sys.stderr)
    tiles = sum(report.written for report in reports)
    if not tiles:
        print(f"error: {why_nothing(reports)}", file=sys.stderr)
        return _FAILED
    before = sum(len(one.before) for one in outcomes)
    used = sum(report.written > 0 for report in reports)
    width = prepared.settings["encoder"]["width"]
    done = f", {before} of them done before" if before else ""
    print_lines(
        f"{width} features of each of {counted(tiles, 'tile')} of {counted(used, 'slide')}{done} "
        f"in {folder.path}"
    )
    if line := speed(outcomes):
        print_lines(line)
    failed = any(report.failed for report in reports)
    return _FAILED if failed and not prepared.options.skip_errors else _OK


def speed(outcomes: Sequence[Outcome]) -> str:
    """How fast tiles were read and encoded; empty where none were."""
    tiles = sum(one.tiles for one in outcomes)
    reading, encoding, waited = (
        sum(getattr(one, name) for one in outcomes) for name in ("reading", "encoding", "waited")
    )
    seconds = max(one.seconds for one in outcomes)
    if not tiles or not reading or not encoding:
        return ""
    return (
        f"{counted(tiles, 'tile')} in {seconds:.1f} s, {tiles / seconds:,.0f}/s; an encoder alone "
        f"{tiles / encoding:,.0f}/s, a reading thread {tiles / reading:,.0f}/s; encoders waited "
        f"for tiles {waited / (waited + encoding):.0%} of the time"
    )


if __name__ == "__main__":
    sys.exit(main())
