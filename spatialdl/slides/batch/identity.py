"""Whether a slide was cut before: a key of its contents and of all that decides what comes out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from spatialdl.data.format import sha256_of
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.reading.paths import slide_bytes, slide_files
from spatialdl.slides.reading.reader import Slide

CUTTING_VERSION = 2
"""To be raised when the same settings give other tiles than before."""

_SAMPLES, _SAMPLE = 16, 2**20  # places of a large file that are looked at, and bytes of each


def slide_key(
    slide: Slide,
    name: str,
    label: SlideLabel | None,
    settings: dict[str, object],
    beside: Iterable[Path] = (),
) -> str:
    """A digest that is another one if the tiles may be others.

    Slides are large: of each file its length and samples of its bytes count, and openslide's own
    hash, which covers the files beside it. Where the file lies, and when it was written, do not.

    Args:
        slide: open.
        name: in the data set.
        label: its class and split.
        settings: of the batch, those that matter.
        beside: small files that matter too, such as a mask; all of their bytes count.
    """
    said = {
        "version": CUTTING_VERSION,
        "slide": slide_content(slide.path),
        "quickhash": slide.quickhash,
        "name": name,
        "label": label,
        "settings": settings,
        "beside": [sha256_of(path) for path in beside],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def slide_content(path: Path) -> str:
    """Length of the files of a slide, and a digest of samples of their bytes."""
    digests = [sampled_digest(file) for file in slide_files(path)]
    return f"{slide_bytes(path)}-{hashlib.sha256(' '.join(digests).encode()).hexdigest()}"


def sampled_digest(path: Path) -> str:
    """SHA-256 of a file's length, and of 16 pieces of 1 MiB spread over it; smaller ones whole."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(str(size).encode())
        last = max(size, _SAMPLES * _SAMPLE) - _SAMPLE
        for k in range(_SAMPLES):
            file.seek(last * k // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
