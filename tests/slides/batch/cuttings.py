"""Slides as they are cut in tests, with nothing but what cutting needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.options import parsed
from spatialdl.slides.batch.parts import Cutting
from spatialdl.slides.batch.preview import Preview
from spatialdl.slides.reading.reader import Slide


def choosing(path: Path, *more: str) -> Choosing:
    given = [str(path), "--out", "set", "--tile-size", "64", "--mpp", "0.5", *more]
    return Choosing(parsed(given), [path])


def cutting(slide: Slide, *more: str, **changes: Any) -> Cutting:
    known = {"classes": [], "name": "a", "label": None, "own": None, **changes}
    return Cutting(choosing(slide.path, *more), preview=Preview(slide.size), **known)
