"""The command `spatialdl-features`: features of tiles, or of whole regions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch

from spatialdl.comm.capacity import usable_cores
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.launch import launched
from spatialdl.common.text import counted, print_lines
from spatialdl.data.format import MANIFEST
from spatialdl.data.outcomes import FAILED, MISUSED
from spatialdl.inference.features.encoders.encoder import Encoder
from spatialdl.inference.features.encoders.making import make_encoder
from spatialdl.inference.features.maps.regions import RegionSource, stride_of
from spatialdl.inference.features.maps.running import RegionParts, grid_for, save_maps
from spatialdl.inference.features.options import PRECISIONS, cutting_settings, given_options, parsed
from spatialdl.inference.features.results import LAYOUTS, FeatureRun, Folder, encoder_settings
from spatialdl.inference.features.sources import ShardSource, SlideSource, TileSource
from spatialdl.inference.features.workers import WorkerResult, check_same, device_for, save_features
from spatialdl.inference.predicting.loop import RankCommand, agreeing
from spatialdl.inference.predicting.slide_paths import matching
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.finding_slides import find_slides, slide_names
from spatialdl.slides.batch.report import save_reports, table, warnings, why_nothing
from spatialdl.slides.batch.steps import Task
from spatialdl.slides.reading.paths import slide_bytes
from spatialdl.training.optimization.precision import Precision, precision_of
from spatialdl.training.run_lock import held

PROCESS_LIST = "process_list.csv"


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
    return RankCommand(
        "spatialdl.inference.features.features_cli", parsed, _check, _run, MISUSED
    ).main(argv)


def _check(options: argparse.Namespace) -> int:
    if options.jobs > 1:
        given_in(options)  # reports errors before ranks start
    return int(options.jobs)


def _run(options: argparse.Namespace, world: Communicator) -> int:
    """Run on all ranks; collective.

    Returns:
        The exit code.
    """
    run: FeatureRun | None = None
    info = launched()
    with agreeing(world):
        if options.jobs not in (1, world.size):
            raise ValueError(
                f"--jobs {options.jobs} starts as many ranks, but there are {world.size} already: "
                "leave it out"
            )
        given = given_in(options) if world.rank == 0 else []
        if options.jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cores() // options.jobs))
        device = device_for(options.device, 0 if info is None else info.local_rank)
        precision = precision_for(options.precision, device)
        encoder = make_encoder(options.wish)
        if world.rank == 0:
            run = prepare(options, given, encoder)
    agreed: FeatureRun = world.bcast(run)
    with agreeing(world):
        if world.size > 1:
            check_same(encoder, agreed.digest)
    return compute(agreed, world, encoder, device, precision)


def compute(
    run: FeatureRun,
    world: Communicator,
    encoder: Encoder,
    device: torch.device,
    precision: Precision,
) -> int:
    """Write features of tiles, or maps of whole regions; collective over `world`.

    Returns:
        The exit code.
    """
    regions = isinstance(run.source, RegionSource)
    folder: Folder | None = None
    with ExitStack() as stack:
        with agreeing(world):
            if regions:
                stride = stride_of(encoder)
                parts = _parts(run.options.grid, run.options.limit_gb, world.size, device)
            if world.rank == 0:
                folder = stack.enter_context(opened_folder(run))
        if regions:
            outcomes = [save_maps(run, encoder, device, precision, stride, parts, world)]
        else:
            with agreeing(world):
                outcome = save_features(run, encoder, device, precision, world)
            outcomes = world.gather(outcome) or []
        code = None if folder is None else finish(run, folder, outcomes)
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


# --- inputs and settings


def precision_for(name: str, device: torch.device) -> Precision:
    try:
        return precision_of(PRECISIONS[name], device)
    except ValueError as error:
        text = str(error)
        for ours, theirs in PRECISIONS.items():
            text = text.replace(f"trainer.precision={theirs}", f"--precision {ours}")
        raise ValueError(text.replace("-mixed", "")) from error


def given_in(options: argparse.Namespace) -> list[Path] | Path:
    """The slides, or the folder of a data set.

    Raises:
        ValueError: nothing is found, or options conflict with it.
    """
    # find_slides reports what is wrong with a path that matches nothing
    given = [path.expanduser() for path in options.slides]
    paths = [found for path in given for found in matching(path) or [path]]
    sets = [path for path in paths if (path / MANIFEST).is_file()]
    if sets:
        if len(paths) > 1:
            raise ValueError(
                f"{sets[0]} is a data set and must be the only input: give it or slides, not both"
            )
        if options.whole:
            raise ValueError(f"--whole needs slides, but {sets[0]} is a data set: give the slides")
        if clash := given_options(options):
            raise ValueError(
                f"{', '.join(clash)} is for cutting slides, but {sets[0]} is a data set of tiles: "
                "leave it out"
            )
        return sets[0]
    if options.split is not None:
        raise ValueError(f"--split {options.split} is for data sets only: leave it out")
    if options.mpp is None and options.mag is None and options.level is None:
        raise ValueError("the resolution of tiles is missing: add --mpp X, --mag X or --level N")
    return find_slides(paths, recursive=options.recursive)


def prepare(options: argparse.Namespace, given: list[Path] | Path, encoder: Encoder) -> FeatureRun:
    settings: dict[str, Any] = {
        "encoder": encoder_settings(options.wish, encoder),
        "precision": options.precision,
        "dtype": options.dtype,
    }
    if options.layout != LAYOUTS[0]:  # older manifests do not record it
        settings["layout"] = options.layout
    source: TileSource
    if isinstance(given, Path):
        settings["set"] = {"split": options.split}
        source = ShardSource(given, options.split, settings)
        settings["set"]["tile_size"] = source.side
    else:
        options.tile_size = options.tile_size or encoder.preprocessing.size
        settings["tiling"] = cutting_settings(options)
        choosing = Choosing(options, given)
        names = slide_names(given)
        tasks = [Task(path, name, None, slide_bytes(path)) for path, name in names.items()]
        tasks.sort(key=lambda task: (-task.bytes, task.name))
        kind = RegionSource if options.whole else SlideSource
        source = kind(tasks, options, choosing, settings)
    return FeatureRun(options, source, settings)


@contextmanager
def opened_folder(run: FeatureRun) -> Iterator[Folder]:
    """Open and lock the folder of the run."""
    folder = Folder(run.layout, run.settings, overwrite=run.options.overwrite)
    with ExitStack() as stack:
        try:
            stack.enter_context(held(folder.path))
        except ValueError as error:
            raise ValueError(str(error).replace("hydra.run.dir", "--out")) from None
        folder.begin()
        yield folder


# --- the end


def finish(run: FeatureRun, folder: Folder, outcomes: Sequence[WorkerResult]) -> int:
    """Write the tables, print a summary, and return the exit code."""
    reports = sorted((r for one in outcomes for r in one.reports), key=lambda r: r.slide)
    together = folder.finish(reports)
    save_reports(folder.path / PROCESS_LIST, together)
    print_lines(table(reports))
    for line in warnings(reports):
        print(f"warning: {line}", file=sys.stderr)
    tiles = sum(report.written for report in reports)
    if not tiles:
        print(f"error: {why_nothing(reports)}", file=sys.stderr)
        return FAILED
    before = sum(len(one.before) for one in outcomes)
    used = sum(report.written > 0 for report in reports)
    width = run.width
    done = f", {before} of them by an earlier run" if before else ""
    if run.options.whole:
        print_lines(f"maps of {width} features of {counted(used, 'slide')}{done} in {folder.path}")
    else:
        print_lines(
            f"{width} features of each of {counted(tiles, 'tile')} of {counted(used, 'slide')}"
            f"{done} in {folder.path}"
        )
    if line := speed(outcomes):
        print_lines(line)
    failed = any(report.failed for report in reports)
    return FAILED if failed and not run.options.skip_errors else 0


def speed(outcomes: Sequence[WorkerResult]) -> str:
    """Throughput of reading and encoding, as text; empty if no tiles were encoded."""
    tiles = sum(one.tiles for one in outcomes)
    reading, encoding, waited = (
        sum(getattr(one, name) for one in outcomes) for name in ("reading", "encoding", "waited")
    )
    seconds = max(one.seconds for one in outcomes)
    if not tiles or not reading or not encoding:
        return ""
    return (
        f"{counted(tiles, 'tile')} in {seconds:.1f} s, {tiles / seconds:,.0f}/s; per encoder "
        f"{tiles / encoding:,.0f}/s, per reading thread {tiles / reading:,.0f}/s; encoders waited "
        f"for tiles {waited / (waited + encoding):.0%} of the time"
    )


if __name__ == "__main__":
    sys.exit(main())
