"""The manifest of a folder of features: encoder, cutting settings, and slide reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spatialdl.data.format import MANIFEST, sha256_of
from spatialdl.data.saving import TEMPORARY, load_json, save_json
from spatialdl.features.encoders.encoder import Encoder, Wish
from spatialdl.features.results import LAYOUTS, MAPS, ResultFolders, load_before
from spatialdl.slides.batch.report import TilingReport
from spatialdl.version import __version__

KIND = "features"
_SHOWN = 4


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
