"""Predictions of bags on disk, from which a restarted run resumes. ::

records/NAME.json       the prediction of a slide, and the key of its inputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig

from spatialdl.data import fields
from spatialdl.data.bags import PlacedBag
from spatialdl.data.format import MANIFEST
from spatialdl.data.saving import load_json, save_json
from spatialdl.predicting.records import FOLDER, key_of
from spatialdl.predicting.trained import Trained
from spatialdl.slides.batch.finding_slides import storable

_VERSION = 1  # of the record format; records of another version are replaced
_SETTINGS = ("average", "maps", "precision")
"""Keys of the command on which the prediction of a slide, or its files, depends."""


@dataclass(frozen=True)
class BagOutcome:
    """The result of a slide.

    Attributes:
        values: float64 (columns,), probabilities or values; None if it failed.
        remark: why there is no heat map.
        problem: why the slide failed.
        files: files of its heat map, in the run directory.
        done_before: whether an earlier run predicted it.
    """

    name: str
    tiles: int
    values: npt.NDArray[np.float64] | None = None
    remark: str = ""
    problem: str = ""
    files: Sequence[str] = field(default_factory=tuple)
    done_before: bool = False


class BagRecords:
    """The records of a run directory; each rank accesses only those of its bags.

    Args:
        config: configuration of the command.
    """

    def __init__(self, run_dir: Path, trained: Trained, config: DictConfig) -> None:
        self._run_dir, self._again = run_dir, bool(config.overwrite)
        settings = {name: config[name] for name in _SETTINGS}
        self._settings = [_VERSION, trained.digest, settings]

    def key(self, file: PlacedBag, slide: Path | None) -> str | None:
        """A digest of all inputs of a bag's prediction; None if a file is missing.

        Args:
            slide: the slide under its heat map.
        """
        path = file.path / MANIFEST if file.path.is_dir() else file.path
        try:
            under = None if slide is None else key_of(None, slide)
            return key_of([*self._settings, file.slide, file.tiles, under], path)
        except OSError:
            return None  # reported where it is opened

    def load(self, name: str, key: str | None) -> BagOutcome | None:
        """The recorded result of a slide, if its inputs are the same and all files exist."""
        if self._again or key is None:
            return None
        found = load_json(self._path(name))
        try:
            if fields.text(found, "key") != key:
                return None
            files = fields.texts(found, "files")
            tiles, remark = fields.whole(found, "tiles"), fields.text(found, "remark")
            values = _values(found)
        except (TypeError, KeyError, ValueError):  # damaged
            return None
        if not all((self._run_dir / file).is_file() for file in files):
            return None
        return BagOutcome(name, tiles, values, remark, files=files, done_before=True)

    def save(self, outcome: BagOutcome, key: str | None) -> None:
        """Write the record of a slide, after its files; failed slides are not recorded.

        Raises:
            OSError: the record cannot be written.
        """
        if outcome.values is None or key is None:
            return
        (self._run_dir / FOLDER).mkdir(exist_ok=True)
        entries = {name: asdict(outcome)[name] for name in ("tiles", "remark", "files")}
        save_json(
            self._path(outcome.name), {**entries, "key": key, "values": outcome.values.tolist()}
        )

    def _path(self, name: str) -> Path:
        return self._run_dir / FOLDER / f"{storable(name)}.json"


def _values(found: dict[str, Any]) -> npt.NDArray[np.float64]:
    values = np.asarray(found["values"])
    if values.dtype != np.float64 or values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError("values are not finite float64 numbers")
    return values
