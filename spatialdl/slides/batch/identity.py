"""Identity of a slide: a digest of its contents and of all settings that determine its tiles."""

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
"""To be incremented when the same settings give different tiles than before."""

_SAMPLES, _SAMPLE = 16, 2**20  # samples of a large file, and bytes of each


def slide_key(
    slide: Slide,
    name: str,
    label: SlideLabel | None,
    settings: dict[str, object],
    beside: Iterable[Path] = (),
) -> str:
    """Compute a digest that differs if the tiles may differ.

    Slides are large: the digest covers the length and samples of the bytes of each file, and
    openslide's own hash, which includes companion files. It ignores path and modification time.

    Args:
        slide: open.
        name: in the data set.
        label: its class and split.
        settings: of the batch that determine the tiles.
        beside: small files that determine the tiles, such as a mask; all their bytes are hashed.
    """
    content = {
        "version": CUTTING_VERSION,
        "slide": slide_content(slide.path),
        "quickhash": slide.quickhash,
        "name": name,
        "label": label,
        "settings": settings,
        "beside": [sha256_of(path) for path in beside],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def slide_content(path: Path) -> str:
    """Return the length of the files of a slide and a digest of samples of their bytes."""
    digests = [sampled_digest(file) for file in slide_files(path)]
    return f"{slide_bytes(path)}-{hashlib.sha256(' '.join(digests).encode()).hexdigest()}"


def sampled_digest(path: Path) -> str:
    """Return the SHA-256 of a file's length and of 16 evenly spaced samples of 1 MiB.

    Files up to 16 MiB are hashed completely.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(str(size).encode())
        last = max(size, _SAMPLES * _SAMPLE) - _SAMPLE
        for k in range(_SAMPLES):
            file.seek(last * k // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
