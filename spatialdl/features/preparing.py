"""Preparation of a run: inputs, settings and checks."""

from __future__ import annotations

import argparse
import glob
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spatialdl.data.format import MANIFEST
from spatialdl.features.claims import new_claims
from spatialdl.features.encoders.encoder import Encoder
from spatialdl.features.manifest import Folder, encoder_settings
from spatialdl.features.maps.regions import RegionSource
from spatialdl.features.options import PRECISIONS, cutting_settings, given_cutting
from spatialdl.features.results import LAYOUTS, MAPS, ResultFolders
from spatialdl.features.sources import ShardSource, SlideSource, TileSource
from spatialdl.features.working import FeatureJob
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.finding_slides import find_slides, slide_names
from spatialdl.slides.batch.steps import Task
from spatialdl.slides.reading.paths import series_at, slide_bytes
from spatialdl.training.optimization.precision import Precision, precision_of
from spatialdl.training.run_lock import held


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
    paths = [found for one in options.slides for found in _matching(one)]
    sets = [path for path in paths if (path / MANIFEST).is_file()]
    if sets:
        if len(paths) > 1:
            raise ValueError(
                f"{sets[0]} is a data set and must be the only input: give it or slides, not both"
            )
        if options.whole:
            raise ValueError(f"--whole needs slides, but {sets[0]} is a data set: give the slides")
        if clash := given_cutting(options):
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


def _matching(path: Path) -> list[Path]:
    """A path, or the matches of a pattern; ** matches any number of folders."""
    path = path.expanduser()
    if path.exists() or series_at(path) is not None:
        return [path]
    found = [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]
    return found or [path]  # find_slides reports what is wrong with it


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
