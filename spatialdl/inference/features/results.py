"""The folder of a run: its manifest, and files of slides with the key by which a run resumes. ::

manifest.json        encoder, cutting settings, and slide reports
h5/NAME.h5           features, coords
h5_files/NAME.h5     the same in the layout of CLAM
pt_files/NAME.pt     only the features, as a tensor, for the training script of CLAM
maps/NAME.h5, .png   features of a whole region, see `features.maps`
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from spatialdl.common.files import TEMPORARY, load_json, save_json, unfinished
from spatialdl.data.chunk_map import own_dataset
from spatialdl.data.feature_file import FEATURES, UNREADABLE, write_features
from spatialdl.data.format import MANIFEST, sha256_of
from spatialdl.errors import SlideError
from spatialdl.inference.features.encoders.encoder import Encoder, Wish
from spatialdl.inference.features.sources import SlideTiles, TileSource
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task, sum_up
from spatialdl.version import __version__

LAYOUTS, MAPS = ("h5", "clam"), "maps"
KIND = "features"
_KEY, _REPORT = "key", "report"
_SHOWN = 4  # settings named that differ


@dataclass(frozen=True)
class ResultFolders:
    """Paths of output files.

    Attributes:
        out: folder of the run.
        kind: one of `LAYOUTS` for features of tiles, or `MAPS` for whole regions.
    """

    out: Path
    kind: str = LAYOUTS[0]

    @property
    def features(self) -> str:
        """Folder of feature files."""
        return "h5_files" if self.kind == "clam" else self.kind

    @property
    def tensors(self) -> str | None:
        """Folder of features as tensors, if the layout has one."""
        return "pt_files" if self.kind == "clam" else None

    def features_of(self, name: str) -> Path:
        """The feature file of a slide."""
        return self.out / self.features / f"{name}.h5"

    def tensor_of(self, name: str) -> Path | None:
        """The file of a slide's features as a tensor."""
        return None if self.tensors is None else self.out / self.tensors / f"{name}.pt"

    def picture_of(self, name: str) -> Path:
        """The picture of a slide's map."""
        return self.out / MAPS / f"{name}.png"

    def files_of(self, name: str) -> list[Path]:
        """All files of a slide."""
        picture = self.picture_of(name) if self.kind == MAPS else None
        found = (self.features_of(name), self.tensor_of(name), picture)
        return [path for path in found if path is not None]


@dataclass(frozen=True)
class FeatureRun:
    """The inputs and settings of a run; cheap to pickle."""

    options: Namespace
    source: TileSource
    settings: dict[str, Any]

    @property
    def digest(self) -> str:
        """Digest of the encoder's weights."""
        return str(self.settings["encoder"]["state_sha256"])

    @property
    def width(self) -> int:
        """Features per tile or cell."""
        return int(self.settings["encoder"]["width"])

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


@dataclass(frozen=True)
class Before:
    """Existing features of a slide: the key of their inputs, and the slide's report."""

    key: str
    report: TilingReport


def load_before(layout: ResultFolders, name: str) -> Before | None:
    """Load an earlier run's result of a slide; None if a file is missing or damaged."""
    if not all(path.is_file() for path in layout.files_of(name)):
        return None
    try:
        with h5py.File(layout.features_of(name), "r", locking=False) as h5:
            attributes = own_dataset(h5, FEATURES).attrs
            report = TilingReport.from_json(json.loads(str(attributes[_REPORT])))
            return Before(str(attributes[_KEY]), report)
    except (*UNREADABLE, AttributeError, RecursionError):
        return None


def resume(layout: ResultFolders, task: Task, key: str) -> TilingReport | None:
    """The report of a slide that an earlier run finished, with the same inputs.

    Args:
        key: digest of the inputs.

    Raises:
        SlideError: there are features of another slide with the same name.
    """
    before = load_before(layout, task.name)
    if before is None or (before.key != key and before.report.file == str(task.path)):
        return None
    if before.key == key:
        return None if before.report.failed else before.report
    raise SlideError(
        f"{layout.out} has features of another slide named {before.report.slide}, from "
        f"{before.report.file}; rename {task.path}, or write to another folder"
    )


def resume_attributes(key: str, report: TilingReport) -> dict[str, str]:
    """Attributes of features by which `load_before` recognises them."""
    return {_KEY: key, _REPORT: json.dumps({**report.to_json(), "seconds": 0.0})}


def save_slide(
    run: FeatureRun,
    tiles: SlideTiles,
    parts: Sequence[PartRecord],
    computed: Sequence[npt.NDArray[Any]],
) -> TilingReport:
    """Write the features of a slide, if there are any, and return its report.

    Args:
        parts: what became of each of its tiles.
        computed: their features, in order.

    Raises:
        SlideError: features are not finite.
        OSError: the files cannot be written.
    """
    report, layout, dtype = tiles.report, run.layout, np.dtype(run.options.dtype)
    sum_up(report, parts)
    if not report.written:
        for path in layout.files_of(tiles.name):
            path.unlink(missing_ok=True)  # left by an earlier version of the slide
        return report
    features = np.concatenate(computed)
    with np.errstate(over="ignore"):  # overflow is reported below
        stored = features.astype(dtype)
    bad = int((~np.isfinite(stored)).any(1).sum())
    if bad:
        large = np.isfinite(features).all()
        remedy = "use --dtype float32" if large else "use --precision float32 or bf16"
        raise SlideError(
            f"slide {report.file}: {bad} of {len(stored)} tiles have features that are not "
            f"finite{f' in {dtype}' if large else ''}; {remedy}"
        )
    coords = np.array([(x, y) for part in parts for x, y, _ in part.taken], np.int64)
    tags = {**run.about, **resume_attributes(tiles.key, report)}
    tensor = layout.tensor_of(tiles.name)
    if tensor is not None:  # first, as the other file's key marks the slide as complete
        _save_tensor(tensor, stored)
    path = layout.features_of(tiles.name)
    write_features(path, stored, coords.reshape(-1, 2), tiles.attributes, tags)
    return report


def _save_tensor(path: Path, features: npt.NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as temporary:
        torch.save(torch.from_numpy(features), temporary)


# --- the manifest


def encoder_settings(wish: Wish, encoder: Encoder) -> dict[str, Any]:
    """The manifest's entry of an encoder, with digests of its weights."""
    file = wish.weights
    return {
        "encoder": wish.name,
        "arguments": dict(wish.arguments),
        "pool": wish.pool if wish.kind == "transformers" else None,
        "weights": encoder.weights if file is None else file.name,
        "weights_sha256": None if file is None else sha256_of(file),
        "state_sha256": encoder.digest(),
        "width": encoder.width(),
        "preprocessing": encoder.preprocessing.to_json(),
    }


class Folder:
    """A folder of features.

    Args:
        layout: folders of the run.
        settings: settings of this run, which must be those of the existing features.

    Raises:
        ValueError: the folder has features of other settings, or other files.
    """

    def __init__(
        self, layout: ResultFolders, settings: Mapping[str, Any], *, overwrite: bool
    ) -> None:
        self.layout = layout
        self.path = path = layout.out
        self.settings = json.loads(json.dumps(settings))  # comparable with those read back
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out {path} is a file; give a folder")
        before = load_json(path / MANIFEST)
        ours = isinstance(before, dict) and before.get("kind") == KIND
        if not ours and path.is_dir() and any(path.glob("[!.]*")):
            raise ValueError(
                f"--out {path} contains other files than features; give a new or empty folder"
            )
        self._before: dict[str, Any] = before if ours else {}
        differences = different(self._before.get("settings", self.settings), self.settings)
        if differences and not overwrite:
            raise ValueError(
                f"--out {path} has features of other settings ({'; '.join(differences[:_SHOWN])}); "
                "give another folder, or replace them by --overwrite"
            )
        self._replaced = overwrite
        if overwrite:
            self._before = {}

    def begin(self) -> None:
        """Remove leftovers of killed runs (all files with overwrite); write the settings."""
        (self.path / self.layout.features).mkdir(parents=True, exist_ok=True)
        files = [
            one for kind in (*LAYOUTS, MAPS) for one in ResultFolders(self.path, kind).files_of("*")
        ]
        patterns = [self.path / TEMPORARY, *(one.with_name(TEMPORARY) for one in files)]
        for pattern in [*patterns, *(files if self._replaced else [])]:
            for file in pattern.parent.glob(pattern.name):
                file.unlink()
        self._save(self._before.get("slides", []))

    def finish(self, reports: Sequence[TilingReport]) -> list[TilingReport]:
        """Write the reports of all slides, including those of earlier runs.

        Returns:
            The reports.
        """
        found = {report.slide: report for report in self._earlier()}
        found |= {report.slide: report for report in reports}
        for file in (self.path / self.layout.features).glob("*.h5"):
            before = None if file.stem in found else load_before(self.layout, file.stem)
            if before is not None:
                found[file.stem] = before.report
        together = [found[name] for name in sorted(found)]
        self._save([self._entry(report) for report in together])
        return together

    def _entry(self, report: TilingReport) -> dict[str, Any]:
        layout, whole = self.layout, self.layout.kind == MAPS
        file = f"{layout.features}/{report.slide}.h5" if report.written else None
        return {
            "slide": report.slide,
            "file": file,
            **({"picture": f"{MAPS}/{report.slide}.png"} if whole and file is not None else {}),
            **({} if whole else {"tiles": report.written}),
            "status": report.status,
            "reason": report.reason,
            "report": report.to_json(),
        }

    def _earlier(self) -> list[TilingReport]:
        reports = []
        for entry in self._before.get("slides", []):
            try:
                reports.append(TilingReport.from_json(entry["report"]))
            except (ValueError, KeyError, TypeError):  # written by another version
                continue
        return reports

    def _save(self, slides: Sequence[object]) -> None:
        content = {
            "kind": KIND,
            "version": 1,
            "made_by": f"spatialdl {__version__}",
            "settings": self.settings,
            "slides": list(slides),
        }
        save_json(self.path / MANIFEST, content)


def different(before: Any, now: Any, name: str = "") -> list[str]:
    """Settings that differ, as text: "tiling.mpp was 0.5, is 1.0"."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        inner = [(f"{name}.{key}".lstrip("."), before.get(key), now.get(key)) for key in keys]
        return [one for key, was, now_is in inner for one in different(was, now_is, key)]
    return [] if before == now else [f"{name} was {before}, is {now}"]
