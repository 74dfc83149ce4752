"""Searches the layouts for a number of ranks that fit, best first; formats them as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from spatialdl.comm.trace import Span
from spatialdl.layout.layout import by, nearly_cubic
from spatialdl.pipeline.simulate import describe
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.job import PlannedJob, Recompute
from spatialdl.planning.predict import Prediction, predict
from spatialdl.training.console.run_log import ranks_text
from spatialdl.training.layouts import (
    AUTO,
    check_batch,
    check_image,
    placement_of,
    schedule_of,
)
from spatialdl.training.pictures.timeline import MOST_ROWS, ROW_INCHES, draw_legend, draw_rows
from spatialdl.training.virtual_tiles import virtual_tiles_for

LARGEST_GRID = 512
MOST_STAGES = 32
MOST_TENSOR = 8
"""Limits of the search, beyond which communication outweighs the gain: tiles of a grid, stages of a
network, and parts of the channels of all layers. The channels of the last layers are divided into
at most twice as many parts as there are tiles."""


@dataclass(frozen=True)
class LayoutKeys:
    """A layout as keys of the configuration.

    Attributes:
        name: of its group file, such as ``dp+sp+pp``.
        keys: those that differ from the file.
    """

    name: str
    keys: tuple[tuple[str, Any], ...]

    def overrides(self) -> list[str]:
        """Arguments of ``python -m spatialdl.train``."""
        return [f"parallel={self.name}", *(f"parallel.{k}={_text(v)}" for k, v in self.keys)]

    def config(self, base: DictConfig) -> DictConfig:
        """Merge the layout into a configuration of one rank."""
        keys = OmegaConf.from_dotlist([f"{key}={_text(value)}" for key, value in self.keys])
        config = OmegaConf.merge(base, {"name": self.name}, keys)
        assert isinstance(config, DictConfig)
        return config


@dataclass(frozen=True)
class Row:
    """A layout with its predicted costs."""

    layout: LayoutKeys
    prediction: Prediction

    @property
    def memory(self) -> float:
        """Bytes of the rank that needs most."""
        return max(self.prediction.memory)


class NothingFits(ValueError):
    """No layout fits the memory or the ranks."""


def search(
    job: PlannedJob,
    cluster: Cluster,
    base: DictConfig,
    world: int,
    memory_bytes: float | None,
    show: bool = True,
) -> list[Row]:
    """Return the layouts for `world` ranks that fit, fastest first.

    Layers are recomputed in backward only where the layout does not fit otherwise.

    Args:
        base: ``parallel`` of one rank, for keys that a layout does not set.
        memory_bytes: of a rank; None for no limit.

    Raises:
        NothingFits: if none fits, with the closest one and its memory.
    """
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"world={world} must be a whole number of at least 1 rank")
    rows, nearest, reason = [], None, ""
    dims = len(job.image) - 1
    tried = list(layouts(world, job.batch, len(job.program().names), dims))
    for layout in tqdm(tried, desc="layouts", unit="layout", disable=not show, leave=False):
        for recompute in _again(job, base, layout):
            try:
                made = _with_tiles(job, base, _with(layout, recompute))
                row = Row(made, _predicted(job, cluster, base, made, recompute))
            except ValueError as error:  # network, batch and layout are incompatible
                reason = str(error)
                break
            if memory_bytes is None or row.memory <= memory_bytes:
                rows.append(row)
                break
            if nearest is None or row.memory < nearest.memory:
                nearest = row
    if not rows:
        raise _nothing_fits(world, memory_bytes, nearest, reason)
    return sorted(rows, key=lambda row: (row.prediction.seconds, row.memory))


def _again(job: PlannedJob, base: DictConfig, layout: LayoutKeys) -> Sequence[Recompute]:
    """Recomputation modes to try in order until the layout fits."""
    if base.recompute != "none":
        return [base.recompute]
    stages = dict(layout.keys).get("stages", 1)
    return ["none", "block", "stage"] if job.can_recompute(stages) else ["none", "stage"]


def _with(layout: LayoutKeys, recompute: Recompute) -> LayoutKeys:
    more = () if recompute == "none" else (("recompute", recompute),)
    return LayoutKeys(layout.name, (*layout.keys, *more))


def _with_tiles(job: PlannedJob, base: DictConfig, layout: LayoutKeys) -> LayoutKeys:
    """Add virtual tiles of the configuration: as few as fit into the limit, or these."""
    if base.stream is None:
        return layout
    keys = tuple(key for key in layout.keys if key[0] != "stream")
    if base.stream != AUTO:
        return LayoutKeys(layout.name, (*keys, ("stream", list(base.stream))))
    config = layout.config(base)
    samples = ceil(job.batch / (config.data * config.microbatches))
    limit = None if job.limit is None else job.limit / 1e9
    tiles = virtual_tiles_for(config, job.sizes(samples), (samples, *job.image), limit)
    return LayoutKeys(layout.name, (*keys, ("stream", tiles)))


def named(
    job: PlannedJob,
    cluster: Cluster,
    parallel: DictConfig,
    overrides: Sequence[str],
    world: int | None,
) -> Row:
    """Return the layout that a configuration names.

    Args:
        overrides: as given on the command line.
        world: number of ranks; None for as many as the layout needs.

    Raises:
        ValueError: if it needs another number, or network, batch and layout are incompatible.
    """
    keys = [
        (key, value)
        for key, _, value in (word.lstrip("+").partition("=") for word in overrides)
        if key.startswith("parallel.")
    ]
    plain = [(key.removeprefix("parallel."), value) for key, value in keys]
    layout = _with_tiles(job, parallel, LayoutKeys(parallel.name, tuple(plain)))
    row = Row(layout, _predicted(job, cluster, parallel, layout, parallel.recompute))
    needed = row.prediction.placement.world_size
    if world not in (None, needed):
        raise ValueError(
            f"world={world}, but {' '.join(layout.overrides())} needs {needed} ranks: leave world "
            "out, or name another layout"
        )
    return row


def _predicted(
    job: PlannedJob, cluster: Cluster, base: DictConfig, layout: LayoutKeys, recompute: Recompute
) -> Prediction:
    config = layout.config(base)
    placement = placement_of(config, len(job.image) - 1)
    schedule = schedule_of(config, placement)
    check_batch(job.batch, schedule.microbatches, placement)
    check_image(job.image[1:], placement)
    return predict(job, cluster, placement, schedule, recompute)


def _nothing_fits(
    world: int, memory_bytes: float | None, nearest: Row | None, reason: str
) -> NothingFits:
    if nearest is None or memory_bytes is None:
        return NothingFits(f"no layout for {world} ranks works: {reason}")
    return NothingFits(
        f"no layout for {world} ranks fits {memory_bytes / 1e9:.2f} GB per rank: the closest one, "
        f"{' '.join(nearest.layout.overrides())}, needs {nearest.memory / 1e9:.2f} GB; take "
        "more ranks, smaller images or a smaller batch"
    )


def layouts(world: int, batch: int, layers: int, dims: int = 2) -> Iterator[LayoutKeys]:
    """Yield all candidate layouts of images with `dims` spatial dims, regardless of costs."""
    for data in range(1, min(world, batch) + 1):
        if world % data == 0:
            replicated = (("data", data),) if data > 1 else ()
            prefix = "dp+" if data > 1 else ""
            for shape in _shapes(world // data, layers, dims):
                for name, keys in _orders(shape, batch // data):
                    full = (prefix + name).rstrip("+")
                    full = {"": "none", "dp+none": "dp"}.get(full, full)
                    yield LayoutKeys(full, (*replicated, *shape.keys, *keys))


@dataclass(frozen=True)
class _GridAndStages:
    """Grid and stages of a replica.

    Attributes:
        tensor: ranks that divide the channels of the last, or only, stage.
    """

    grid: tuple[int, ...] | None
    stages: int
    spatial: int
    tensor: int = 1

    @property
    def keys(self) -> tuple[tuple[str, Any], ...]:
        keys: list[tuple[str, Any]] = []
        if self.grid is not None:
            keys.append(("grid", list(self.grid)))
        if self.stages > 1:
            keys.append(("stages", self.stages))
        if self.grid is not None:
            keys.append(("spatial_stages", self.spatial))
        if self.tensor > 1:
            each = [*(1,) * (self.stages - 1), self.tensor]
            keys.append(("tensor", each if self.stages > 1 else self.tensor))
        return tuple(keys)


def _shapes(ranks: int, layers: int, dims: int) -> Iterator[_GridAndStages]:
    """Grids and stages on `ranks` ranks."""
    most = min(layers, MOST_STAGES)
    if ranks <= most:
        yield _GridAndStages(None, ranks, 0)
    parts = 2
    while parts <= min(ranks, LARGEST_GRID):
        square, *_ = candidates = grids(parts, dims)
        for grid in candidates:
            if ranks % parts == 0 and ranks // parts <= most:
                yield _GridAndStages(grid, ranks // parts, ranks // parts)
            for spatial in (1, 2):
                rest = ranks - spatial * parts
                if 0 < rest <= most - spatial:
                    yield _GridAndStages(grid, spatial + rest, spatial)
                if grid == square and 1 < rest <= 2 * parts and spatial < most:
                    yield _GridAndStages(grid, spatial + 1, spatial, rest)
        parts *= 2
    yield from _divided(ranks, dims)


def _divided(ranks: int, dims: int) -> Iterator[_GridAndStages]:
    """The whole network on tiles, or whole images, with channels divided over ranks."""
    tensor = 2
    while tensor <= min(ranks, MOST_TENSOR):
        parts = ranks // tensor
        if parts * tensor == ranks and parts <= LARGEST_GRID and parts & (parts - 1) == 0:
            grid = grids(parts, dims)[0] if parts > 1 else None
            yield _GridAndStages(grid, 1, 0 if grid is None else 1, tensor)
        tensor *= 2


def grids(parts: int, dims: int = 2) -> list[tuple[int, ...]]:
    """The grid closest to a cube, the one closest to a square, and one along the first dim only."""
    candidates = [(*nearly_cubic(parts, cut), *(1,) * (dims - cut)) for cut in range(dims, 0, -1)]
    return list(dict.fromkeys(candidates))


def _orders(
    shape: _GridAndStages, samples: int
) -> Iterator[tuple[str, tuple[tuple[str, Any], ...]]]:
    """Group names and keys for the ways to run micro-batches."""
    spatial = "sp+" if shape.grid is not None else ""
    halvings = [2**n for n in range(1, 11) if 2**n <= samples]
    if shape.stages == 1:
        name = "sp" if spatial else "none"
        yield name, ()
        # 1f1b holds one micro-batch at a time; with divided channels only the smallest ones
        for count in halvings[-1:] if shape.tensor > 1 else halvings:
            yield name, (("microbatches", count), ("schedule", "1f1b"))
        return
    yield f"{spatial}lp", ()
    for count in halvings:
        key = (("microbatches", count),)
        yield f"{spatial}pp", (*key, ("schedule", "1f1b"))
        if shape.tensor > 1:  # GEMS needs equally many ranks in all stages
            continue
        yield f"{spatial}gems", (*key, ("gems.variant", "basic"))
        variant = "mast" if count == 2 else "master"
        yield f"{spatial}gems", (*key, ("gems.variant", variant))


def _stores(rows: Sequence[Row], job: PlannedJob) -> Iterator[str]:
    """Least store traffic of virtual tiles on the rank that stores most, row by row."""
    where = "pinned host memory" if job.store == "host" else "a file on disk"
    limit = "no limit" if job.limit is None else f"{job.limit / 1e9:g} GB"
    yield f"virtual tiles, activations of a rank within {limit}; stored in {where}, at least:"
    yield f"{'GB stored':>9}{'GB moved':>10}{'seconds':>10}  virtual tiles per rank"
    for row in rows:
        prediction = row.prediction
        most = max(prediction.stores, key=lambda use: use.moved)
        yield (
            f"{most.stored / 1e9:9.2f}{most.moved / 1e9:10.2f}"
            f"{prediction.storing:10.4g}  {by(prediction.placement.stream)}"
        )


def _text(value: Any) -> str:
    return str(value).replace(" ", "")


def limit(given: Any, cluster: Cluster, world: Any) -> float | None:
    """Memory limit of a rank in bytes.

    Raises:
        ValueError: if an argument is out of range.
    """
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"world={world} must be a whole number of at least 1 rank")
    if given is None:
        return cluster.memory_bytes(world)
    if not isinstance(given, int | float) or given <= 0:
        raise ValueError(f"device_memory_gb={given} must be more than 0")
    return 1e9 * given


def table(rows: Sequence[Row], job: PlannedJob, cluster: Cluster, found: int) -> str:
    """Format layouts as a table, one per line."""
    lines = [
        f"{type(job.model).__name__}, {job.batch} images of {by(job.image[1:])} per step on "
        f"{cluster.name}: {len(rows)} of {found} layouts",
        "",
        f"{'GB/rank':>9}{'s/step':>10}{'images/s':>10}{'MB sent':>10}{'bubble':>9}  layout",
    ]
    for row in rows:
        prediction = row.prediction
        keys = " ".join(row.layout.overrides())
        lines.append(
            f"{row.memory / 1e9:9.2f}{prediction.seconds:10.4g}"
            f"{job.batch / prediction.seconds:10.4g}"
            f"{prediction.sent / 1e6:10.1f}{prediction.bubble:9.0%}  {keys}"
        )
    world = rows[0].prediction.placement.world_size
    if rows[0].prediction.stores:
        lines += ["", *_stores(rows, job)]
    before = cluster.base_bytes(world)
    if cluster.cores is None:  # on CPUs it is measured
        lines += [
            "",
            f"including {before / 1e9:.2f} GB for context, NCCL, libraries (cluster.base_mb)",
        ]
    if world > 1 and job.uncut:
        lines += ["", f"note: layouts with stages are skipped: {job.uncut}"]
    return "\n".join(lines)


def describe_stages(row: Row, job: PlannedJob) -> Iterator[str]:
    """Yield the layout, and for each stage of the first replica its ranks and layers."""
    placement, again = row.prediction.placement, row.prediction.recompute == "block"
    names = job.program(again).names
    yield f"  {placement.describe()}"
    if placement.stream:
        yield f"  each rank processes its part as {by(placement.stream)} virtual tiles in turn"
    for stage, (first, after) in enumerate(pairwise(job.bounds(placement.widths, again))):
        grid, parts = placement.grids[stage], placement.batch_parts(stage)
        split = f"{by(grid)} tiles" if prod(grid) > 1 else "whole images"
        split = f"1/{parts} of the samples" if parts > 1 else split
        if placement.tensor_parts(stage) > 1:
            split += f", 1/{placement.tensor_parts(stage)} of the channels"
        last = f" to {names[after - 1]}" if after - first > 1 else ""
        ranks = ranks_text(placement.stage_ranks(stage, 0))
        yield f"  stage {stage}, {ranks}: {split}; {names[first] or 'all layers'}{last}"


def draw_timeline(row: Row, path: Path) -> None:
    """Draw the simulated step of the first replica."""
    from matplotlib.figure import Figure

    prediction = row.prediction
    ranks = [
        [Span("compute", describe(a), start, end, a) for a, start, end in spans]
        for spans in prediction.timeline.spans[:MOST_ROWS]
    ]
    end = prediction.timeline.seconds
    for spans in ranks:
        spans.append(Span("reduce", "average gradients", end, end + prediction.reducing))
        spans.append(Span("compute", "optimizer", end + prediction.reducing, prediction.seconds))
    figure = Figure(figsize=(11, 2.0 + len(ranks) * ROW_INCHES), dpi=130, layout="constrained")
    panel = figure.subplots()
    hidden = len(prediction.timeline.spans) - len(ranks)
    more = f", {hidden} more ranks not shown" if hidden else ""
    draw_rows(panel, ranks, 0.0, f"predicted step: {prediction.placement.describe()}{more}")
    panel.set_xlabel("time since the step began, ms")
    draw_legend(figure)
    figure.savefig(path)
