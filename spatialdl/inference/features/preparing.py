"""Preparation of a run: inputs, settings and checks; its end: tables and printed summary."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spatialdl.common.text import counted, print_lines
from spatialdl.data.format import MANIFEST
from spatialdl.data.outcomes import FAILED, exit_code
from spatialdl.inference.features.encoders.encoder import Encoder
from spatialdl.inference.features.maps.regions import RegionSource
from spatialdl.inference.features.options import PRECISIONS, cutting_settings, given_options
from spatialdl.inference.features.results import (
    LAYOUTS,
    MAPS,
    Folder,
    ResultFolders,
    encoder_settings,
)
from spatialdl.inference.features.sources import ShardSource, SlideSource, TileSource
from spatialdl.inference.features.workers import FeatureJob, WorkerResult, new_claims
from spatialdl.inference.predicting.slide_paths import matching
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.finding_slides import find_slides, slide_names
from spatialdl.slides.batch.report import save_reports, table, warnings, why_nothing
from spatialdl.slides.batch.steps import Task
from spatialdl.slides.reading.paths import slide_bytes
from spatialdl.training.optimization.precision import Precision, precision_of
from spatialdl.training.run_lock import held

PROCESS_LIST = "process_list.csv"


@dataclass(frozen=True)
class Prepared:
    """The inputs and settings of a run."""

    options: argparse.Namespace
    source: TileSource
    settings: dict[str, Any]

    @property
    def digest(self) -> str:
        return str(self.settings["encoder"]["state_sha256"])

    @property
    def about(self) -> dict[str, object]:
        """Attributes of the features."""
        return {
            "encoder": self.options.wish.name,
            "encoder_sha256": self.digest,
            "precision": self.options.precision,
        }

    @property
    def layout(self) -> ResultFolders:
        """Folders of the run."""
        options = self.options
        return ResultFolders(options.out.resolve(), MAPS if options.whole else options.layout)

    def job(self, precision: Precision) -> FeatureJob:
        """The job of workers on tiles; the folder of the run must exist."""
        options, layout = self.options, self.layout
        return FeatureJob(
            self.source,
            new_claims(layout.out, len(self.source.tasks)),
            layout,
            self.about,
            options.dtype,
            precision,
            options.batch_size,
            options.readers,
        )


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


def prepare(options: argparse.Namespace, given: list[Path] | Path, encoder: Encoder) -> Prepared:
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
    return Prepared(options, source, settings)


@contextmanager
def opened_folder(prepared: Prepared) -> Iterator[Folder]:
    """Open and lock the folder of the run."""
    overwrite = prepared.options.overwrite
    folder = Folder(prepared.layout, prepared.settings, overwrite=overwrite)
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


# --- the end


def finish(prepared: Prepared, folder: Folder, outcomes: Sequence[WorkerResult]) -> int:
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
    width = prepared.settings["encoder"]["width"]
    done = f", {before} of them by an earlier run" if before else ""
    if prepared.options.whole:
        print_lines(f"maps of {width} features of {counted(used, 'slide')}{done} in {folder.path}")
    else:
        print_lines(
            f"{width} features of each of {counted(tiles, 'tile')} of {counted(used, 'slide')}"
            f"{done} in {folder.path}"
        )
    if line := speed(outcomes):
        print_lines(line)
    return exit_code(reports, skip_errors=prepared.options.skip_errors)


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
