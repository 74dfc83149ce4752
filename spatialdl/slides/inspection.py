"""`spatialdl-tile inspect` and `verify`: what slides and data sets are, and what is wrong."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spatialdl.common.text import aligned, counted, fitted, progress_bar, readable_bytes
from spatialdl.data.folder import COORDS
from spatialdl.data.format import MANIFEST, Manifest, shard_problem
from spatialdl.data.samples import RegionSample, ShardInfo, VolumeSample
from spatialdl.errors import ShardError, SlideError
from spatialdl.layout.layout import spatial_names
from spatialdl.slides.batch.record import SlideRecord, names_in
from spatialdl.slides.reading.opening import PLAIN_SUFFIXES
from spatialdl.slides.reading.paths import SLIDE_SUFFIXES, series_at, slide_bytes, slides_among
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.resolution import mpp_of, power_of

_HEADS = ("slide", "format", "rows", "columns", "mpp", "power", "levels", "file")
_LEVEL_HEADS = ("level", "rows", "columns", "downsample", "mpp", "tile", "read")
_PROBE = 64  # side of a box that is read to check that the slide can be read
_LONGEST_NAME = 64  # characters; DICOM UIDs have up to 64


def inspect(path: str | os.PathLike[str]) -> str:
    """Describe a slide, a data set folder, or a folder of slides or of DICOM series.

    A folder of slides has one line for each slide, with the error if it cannot be read.

    Raises:
        SlideError: there is no such file, or it cannot be read as a slide.
        ShardError: a data set is damaged, or a folder has neither a data set nor slides.
    """
    path = Path(path)
    if os.path.isfile(path / MANIFEST):
        return _describe_data_set(path)
    if path.is_dir() and series_at(path) is None:
        return _describe_folder(path)
    with Slide(path) as slide:
        facts = zip(_HEADS, (str(path), *_cells(slide)), strict=True)
        lines = [f"{name:<8} {text}".rstrip() for name, text in facts]
        levels = [_level(slide, *level) for level in enumerate(slide.downsamples)]
        lines += ["", *aligned([_LEVEL_HEADS, *levels], left=(6,))]
        remarks = [f"remark: {remark}" for remark in _remarks(slide)]
    return "\n".join([*lines, *[""] * bool(remarks), *remarks])


def _cells(slide: Slide) -> tuple[str, ...]:
    """Values of `_HEADS`, without the name of the slide."""
    power, mpp = power_of(slide.properties), slide.known_mpp
    plain = f"plain {slide.path.suffix.lstrip('.').lower() or 'image'}"
    return (
        slide.properties.get("openslide.vendor", plain),
        *map(str, slide.size),
        "" if mpp is None else f"{mpp:.4g}",
        "" if power is None else f"{power:g}x",
        str(len(slide.downsamples)),
        readable_bytes(slide_bytes(slide.path)),
    )


def _level(slide: Slide, level: int, down: float) -> tuple[str, ...]:
    """Values of `_LEVEL_HEADS`."""
    sides = [f"openslide.level[{level}].tile-{side}" for side in ("height", "width")]
    tile = " x ".join(filter(None, [slide.properties.get(side, "") for side in sides]))
    mpp = "" if slide.known_mpp is None else f"{slide.known_mpp * down:.4g}"
    read = "natively" if slide.is_native(down) else "by openslide"
    return (str(level), *map(str, slide.level_size(level)), f"{down:.4g}", mpp, tile, read)


def _remarks(slide: Slide) -> list[str]:
    """What is wrong with a slide, without its path, which is printed beside it."""
    remarks = [slide.remark] if slide.remark else []
    scale = slide.downsamples[-1]
    y, x = (max(0, int(length / 2 - _PROBE / 2 * scale)) for length in slide.size)
    checks: list[Callable[[], object]] = [lambda: mpp_of(slide.properties, slide.path)]
    # not of plain images, which may have to be decoded completely
    if "openslide.vendor" in slide.properties:
        checks.append(lambda: slide.read_scaled(x, y, (_PROBE, _PROBE), scale))
    for check in checks:
        try:
            check()
        except SlideError as error:
            remarks.append(str(error))
    return [" ".join(k.replace(f"slide {slide.path}", "slide").split()) for k in remarks]


def _describe_folder(path: Path) -> str:
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise ShardError(f"cannot read folder {path}: {error.strerror}") from error
    files = [entry for entry in inside if entry.is_file()]
    series = [entry for entry in inside if entry.is_dir() and series_at(entry) is not None]
    plain = [file for file in files if file.suffix.lower() in PLAIN_SUFFIXES]
    slides = sorted([*slides_among(path, files), *plain, *series])
    if not slides:
        raise ShardError(
            f"folder {path} has no {MANIFEST}, no slides ({' '.join(SLIDE_SUFFIXES)}) and no "
            "folders of one DICOM series in it; give a slide, or another folder"
        )
    rows: list[tuple[str, ...]] = [_HEADS]
    notes = [""]
    for file in progress_bar(slides, "slides", "slide"):
        cells: tuple[str, ...] = ("",) * (len(_HEADS) - 1)
        try:
            with Slide(file) as slide:
                cells, note = _cells(slide), "; ".join(_remarks(slide))
        except SlideError as error:
            note = " ".join(str(error).removeprefix(f"cannot open slide {file}: ").split())
        rows.append((fitted(file.name, _LONGEST_NAME), *cells))
        notes.append(note)
    # notes after the table: a long note would widen a column for all rows
    table = aligned(rows, left=(0, 1))
    return "\n".join(f"{line}  {note}".rstrip() for line, note in zip(table, notes, strict=True))


def _describe_data_set(path: Path) -> str:
    manifest = Manifest.load(path)
    samples, shards = manifest.samples, manifest.shards
    volumes = [k.spacing for k in samples if isinstance(k, VolumeSample) and k.spacing is not None]
    facts = {
        "data set": str(path),
        "kind": f"{manifest.kind}{' with masks' if manifest.masks else ''}",
        "tile size": " x ".join(map(str, manifest.tile_size or ())),
        "sizes": _ranges([k.size for k in samples if isinstance(k, RegionSample)]),
        "mm": _ranges(volumes),
        "mpp": f"{manifest.mpp or 'unknown'}" if manifest.kind == "tiles" else "",
        "pixels": f"{manifest.channels} x {manifest.dtype}, {manifest.codec}",
        "samples": f"{len(samples):,} of {counted(len({k.slide for k in samples}), 'slide')}",
        "shards": f"{len(shards):,}, {readable_bytes(sum(shard.bytes for shard in shards))}",
    }
    lines = [f"{name:<10} {text}" for name, text in facts.items() if text]
    lines += ["", *_count_samples(manifest)]
    problems = [
        f"{k.file} {what}" for k in shards if (what := shard_problem(path, k, contents=False))
    ]
    lines += [*[""] * bool(problems), *(f"remark: {problem}" for problem in problems)]
    settings = {name: value for name, value in manifest.made_with.items() if value is not None}
    lines += ["", "made with"] * bool(settings)
    return "\n".join([*lines, *(f"  {name}: {value}" for name, value in settings.items())])


def _ranges(sizes: Sequence[Sequence[float]]) -> str:
    """ "20 to 40 rows, 10 to 30 columns"."""
    along = [*zip(*sizes, strict=True)]
    ranges = zip(spatial_names(len(along)), along, strict=True) if along else ()
    return ", ".join(f"{min(values):g} to {max(values):g} {name}" for name, values in ranges)


def _count_samples(manifest: Manifest) -> list[str]:
    """Table of the number of samples by class (rows) and split (columns)."""
    samples = Counter((sample.label, sample.split) for sample in manifest.samples)
    splits: list[str | None] = [*manifest.splits]
    splits += [None] * any(split is None for _, split in samples)
    names: dict[int | None, str] = {
        k: fitted(name, _LONGEST_NAME) for k, name in enumerate(manifest.classes)
    }
    names |= {None: "no class"} if any(label is None for label, _ in samples) else {}
    rows = [("class", *(split or "no split" for split in splits))]
    for label, name in names.items():
        rows.append((name, *(f"{samples[label, split]:,}" for split in splits)))
    return aligned(rows)


@dataclass(frozen=True)
class Verified:
    """Result of a verification.

    Attributes:
        path: the data set.
        shards, bytes: number and total size of its shards, from its manifest.
        problems: a sentence for every missing, damaged or replaced shard, with its damaged
            samples; empty if there are none.
    """

    path: Path
    shards: int
    bytes: int
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        """Return whether all files have their checksums."""
        return not self.problems

    def __str__(self) -> str:
        """Return the result in lines of text."""
        shards = counted(self.shards, "shard")
        if not self.problems:
            return f"{self.path}: {shards}, {readable_bytes(self.bytes)}, all checksums match"
        head = f"{self.path}: {len(self.problems)} of {shards} damaged; copy or write it again"
        return "\n  ".join([head, *self.problems])


def verify(path: str | os.PathLike[str]) -> Verified:
    """Compare every file of a data set with its recorded size and checksum.

    These are the shards of the manifest or, for `spatialdl-tile --format coords`, the files of
    coordinates. Verification continues after damaged files.

    Raises:
        ShardError: the folder is missing, or its manifest is missing or damaged.
    """
    path = Path(path)
    try:
        coords = (path / COORDS).is_dir() and not (path / MANIFEST).exists()
    except OSError as error:
        raise ShardError(f"cannot read folder {path}: {error.strerror}") from error
    manifest = None if coords else Manifest.load(path)
    shards = _coords_files(path) if manifest is None else manifest.shards
    total = sum(shard.bytes for shard in shards)
    problems = []
    with progress_bar(None, None, "B", total=total, unit_scale=True) as bar:
        for number, shard in enumerate(shards):
            bar.set_description(shard.file)
            problem = shard_problem(path, shard, bar.update)
            if problem and manifest is not None and os.path.isfile(path / shard.file):
                problem += f"; it contains {manifest.describe_samples(number)}"
            problems += [f"{shard.file} {problem}"] if problem else []
    return Verified(path, len(shards), total, tuple(problems))


def _coords_files(path: Path) -> list[ShardInfo]:
    records = {name: SlideRecord.load(path, name) for name in names_in(path)}
    damaged = [name for name, record in records.items() if record is None]
    if damaged or not records:
        what = f"the record of {damaged[0]}" if damaged else "every record"
        raise ShardError(f"data set {path}: {what} is missing or damaged; write it again")
    return [file for record in records.values() if record is not None for file in record.files]
