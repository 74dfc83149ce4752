"""Samples of a shard, and manifests of selected splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spatialdl.data.format import Manifest
from spatialdl.data.samples import RegionSample, Sample

_LISTED = 3  # samples and slides listed by name


def samples_in(manifest: Manifest, shard: int) -> str:
    """List the samples in a shard: "samples 3, 4, 5 and 20 more (of a1)"."""
    found = [
        number for number, sample in enumerate(manifest.samples) if shard in _shards_of(sample)
    ]
    if not found:
        return "no samples"
    named = ", ".join(map(str, found[:_LISTED]))
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    slides = sorted({manifest.samples[number].slide for number in found} - {""})
    where = f" (of {', '.join(slides[:_LISTED])}{', ...' * (len(slides) > _LISTED)})"
    return f"sample{'s' * (len(found) > 1)} {named}{more}{where if slides else ''}"


def of_splits(manifest: Manifest, splits: Sequence[str]) -> Manifest:
    """The manifest restricted to some splits and their shards.

    Raises:
        ValueError: a split does not exist.
    """
    for split in splits:
        if split not in manifest.splits:
            known = ", ".join(manifest.splits) or "none"
            raise ValueError(f"the data set has no split {split!r}; its splits: {known}")
    samples = [sample for sample in manifest.samples if sample.split in splits]
    used = sorted({shard for sample in samples for shard in _shards_of(sample)})
    number = {shard: n for n, shard in enumerate(used)}
    return replace(
        manifest,
        shards=[manifest.shards[shard] for shard in used],
        samples=[_renumbered(sample, number) for sample in samples],
    )


def _shards_of(sample: Sample) -> list[int]:
    if isinstance(sample, RegionSample):
        return [band.shard for band in sample.bands]
    return [sample.shard]


def _renumbered(sample: Sample, number: dict[int, int]) -> Sample:
    if isinstance(sample, RegionSample):
        bands = tuple(replace(band, shard=number[band.shard]) for band in sample.bands)
        return replace(sample, bands=bands)
    return replace(sample, shard=number[sample.shard])
