"""Output files of a slide, with the key by which a run resumes. ::

h5/NAME.h5           features, coords
h5_files/NAME.h5     the same in the layout of CLAM
pt_files/NAME.pt     only the features, as a tensor, for the training script of CLAM
maps/NAME.h5, .png   features of a whole region, see `features.maps`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from spatialdl.data.feature_file import FEATURES, UNREADABLE, write_features
from spatialdl.data.own_dataset import own_dataset
from spatialdl.data.saving import unfinished
from spatialdl.errors import SlideError
from spatialdl.features.encoding import Filling
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task, sum_up

LAYOUTS, MAPS = ("h5", "clam"), "maps"
_KEY, _REPORT = "key", "report"


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
    layout: ResultFolders, filling: Filling, dtype: np.dtype[Any], about: Mapping[str, object]
) -> TilingReport:
    """Write the features of a slide, if there are any, and return its report.

    Args:
        layout: folders of the run.
        filling: the slide with all of its features.
        dtype: dtype of the stored features.
        about: attributes of the features, such as the encoder's name.

    Raises:
        SlideError: features are not finite.
        OSError: the files cannot be written.
    """
    bag, report = filling.bag, filling.bag.report
    sum_up(report, filling.parts)
    if not report.written:
        for path in layout.files_of(bag.name):
            path.unlink(missing_ok=True)  # left by an earlier version of the slide
        return report
    features = np.concatenate(filling.features)
    with np.errstate(over="ignore"):  # overflow is reported below
        stored = features.astype(dtype)
    bad = int((~np.isfinite(stored)).any(1).sum())
    if bad:
        large = np.isfinite(features).all()
        remedy = "use --dtype float32" if large else "use --precision float32 or bf16"
        raise SlideError(
            f"slide {bag.report.file}: {bad} of {len(stored)} tiles have features that are not "
            f"finite{f' in {dtype}' if large else ''}; {remedy}"
        )
    coords = np.array([(x, y) for part in filling.parts for x, y, _ in part.taken], np.int64)
    tags = {**about, **resume_attributes(bag.key, report)}
    tensor = layout.tensor_of(bag.name)
    if tensor is not None:  # first, as the other file's key marks the slide as complete
        _save_tensor(tensor, stored)
    path = layout.features_of(bag.name)
    write_features(path, stored, coords.reshape(-1, 2), bag.attributes, tags)
    return report


def _save_tensor(path: Path, features: npt.NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as temporary:
        torch.save(torch.from_numpy(features), temporary)
