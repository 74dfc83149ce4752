"""Description of a data set folder: its samples by class and split, its shards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from spatialdl.data.format import Manifest
from spatialdl.data.samples import RegionSample, ShardInfo, VolumeSample
from spatialdl.parallel.layout import spatial_names
from spatialdl.text import aligned, counted, fitted, readable_bytes

_LONGEST_NAME = 60  # columns of the console


def describe_dataset(path: Path) -> str:
    """Describe a data set folder, in lines of text.

    Raises:
        ShardError: the manifest is missing or damaged.
    """
    manifest = Manifest.load(path)
    slides = Counter(sample.slide for sample in manifest.samples)
    facts = [
        ("data set", str(path)),
        ("kind", manifest.kind),
        ("tile size", " x ".join(map(str, manifest.tile_size or ()))),
        ("sizes", _sizes(manifest)),
        ("spacing", _spacing(manifest)),
        ("mpp", "unknown" if manifest.mpp is None else f"{manifest.mpp:g}"),
        ("channels", str(manifest.channels)),
        ("dtype", manifest.dtype),
        ("codec", manifest.codec),
        ("masks", "yes" if manifest.masks else "no"),
        ("samples", f"{len(manifest.samples):,} of {counted(len(slides), 'slide')}"),
        ("shards", _shards(manifest.shards)),
    ]
    if manifest.kind != "tiles":
        facts = [fact for fact in facts if fact[0] != "mpp"]  # each sample has its own
    lines = [f"{name:<10} {text}" for name, text in facts if text]
    lines += ["", *_samples(manifest)]
    lines += [""] * bool(problems := _problems(path, manifest.shards)) + problems
    settings = {name: value for name, value in manifest.made_with.items() if value is not None}
    if settings:
        lines += ["", "made with", *(f"  {name}: {value}" for name, value in settings.items())]
    return "\n".join(lines)


def _sizes(manifest: Manifest) -> str:
    regions = [sample for sample in manifest.samples if isinstance(sample, RegionSample)]
    if not regions:
        return ""
    along = list(zip(*(region.size for region in regions), strict=True))
    named = zip(spatial_names(len(along)), along, strict=True)
    return ", ".join(f"{min(sizes)} to {max(sizes)} {name}" for name, sizes in named)


def _spacing(manifest: Manifest) -> str:
    """Smallest and largest spacing of volumes along each dim."""
    volumes = [sample for sample in manifest.samples if isinstance(sample, VolumeSample)]
    known = [volume.spacing for volume in volumes if volume.spacing is not None]
    if not known:
        return "unknown" if volumes else ""
    named = zip(spatial_names(3), zip(*known, strict=True), strict=True)
    ranges = ", ".join(f"{min(mm):g} to {max(mm):g} mm ({name})" for name, mm in named)
    return ranges + (f", of {len(known)} of {len(volumes)} volumes" * (len(known) < len(volumes)))


def _shards(shards: list[ShardInfo]) -> str:
    return f"{len(shards):,}, {readable_bytes(sum(shard.bytes for shard in shards))}"


def _samples(manifest: Manifest) -> list[str]:
    """Table of the number of samples by class (rows) and split (columns)."""
    samples = Counter((sample.label, sample.split) for sample in manifest.samples)
    splits: list[str | None] = [*manifest.splits]
    if any(split is None for _, split in samples):
        splits.append(None)
    labels: list[int | None] = [*range(len(manifest.classes))]
    if any(label is None for label, _ in samples):
        labels.append(None)
    rows = [("class", *(split or "no split" for split in splits), "all")]
    for label in labels:
        counts = [samples[label, split] for split in splits]
        name = "no class" if label is None else fitted(manifest.classes[label], _LONGEST_NAME)
        rows.append((name, *(f"{count:,}" for count in (*counts, sum(counts)))))
    if len(labels) > 1:
        counts = [sum(samples[label, split] for label in labels) for split in splits]
        rows.append(("all", *(f"{count:,}" for count in (*counts, sum(counts)))))
    return aligned(rows)


def _problems(path: Path, shards: list[ShardInfo]) -> list[str]:
    """Remarks on missing shards and wrong sizes, without reading the shards."""
    lines = []
    for shard in shards:
        try:
            size = (path / shard.file).stat().st_size
        except OSError as error:
            lines.append(f"remark: cannot find {shard.file} ({error.strerror})")
            continue
        if size != shard.bytes:
            lines.append(f"remark: {shard.file} has {size} bytes of {shard.bytes}")
    return lines
