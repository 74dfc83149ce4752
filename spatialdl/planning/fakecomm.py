"""``debug=fakecomm``: simulates the ranks of a layout in a single process, without MPI.

Shapes, bytes and operations come from runs on the ``meta`` device, so any image size and any number
of ranks take seconds, and no pixel is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, prod
from typing import Any

from omegaconf import DictConfig
from torch import Tensor, nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.layout.layout import by, even_bounds
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.simulate import Schedule
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.predict import Prediction, predict
from spatialdl.planning.preflight import Preflight, preflight
from spatialdl.planning.setup import (
    cluster_file,
    cluster_named,
    job_of,
    with_virtual_tiles,
)
from spatialdl.planning.stage import StageCosts, stage_costs
from spatialdl.training.console.start_table import rank_lines
from spatialdl.training.layouts import (
    check_batch,
    check_image,
    check_task,
    placement_of,
    schedule_of,
)
from spatialdl.training.network.building import make_network
from spatialdl.training.optimization.precision import PRECISIONS
from spatialdl.training.settings import TARGETED, open_sources
from spatialdl.training.tasks.task import task_of


def look(config: DictConfig, known: Sequence[str] = ()) -> bool:
    """Print what the ranks of a configuration would do.

    Args:
        config: of ``spatialdl.train``.
        known: errors found before.

    Returns:
        Whether it would run.
    """
    errors = list(known)
    seed, task = int(config.seed), None
    sources = _tried(
        errors, lambda: open_sources(config.data, seed, config.task.name, config.task.get("loss"))
    )
    if sources is not None:
        config = _tried(errors, lambda: with_virtual_tiles(config, sources)) or config
    dims = len(sources.image_size) if sources is not None else None
    placement = _tried(errors, lambda: placement_of(config.parallel, dims))
    schedule = None
    if placement is not None:
        schedule = _tried(errors, lambda: schedule_of(config.parallel, placement))
    if sources is not None:
        task = _tried(errors, lambda: task_of(config.task, sources.num_classes, sources.train))
    if placement is None or sources is None:
        print("\n".join(_problems(errors, Preflight())))
        return False
    _check(errors, config, placement)
    small = len(errors)
    _tried(errors, lambda: check_image(sources.image_size, placement))
    fits = len(errors) == small
    print("\n".join(_layout(placement, sources.image_size, config.comm.map)), flush=True)
    if config.weights is not None or config.trainer.freeze:
        _tried(errors, lambda: make_network(config, sources, SingleProcess()))
    cluster = _cluster(config.device)
    job = _tried(errors, lambda: job_of(_planned(config), cluster))
    if job is None or not fits:
        print("\n".join(_problems(errors, Preflight())))
        return False
    slices = _Slices(job.batch, schedule.microbatches if schedule else 1, placement.data)
    findings = preflight(
        job.model,
        placement,
        (slices.most, *job.image),
        names=config.parallel.cut,
        recompute=config.parallel.recompute == "block",
        criterion=None if task is None else task.loss,
        segments=job.segments,
        columns=sources.num_classes if config.task.name in TARGETED else None,
        tensor_plan=dict(job.tensor_plan),
    )
    if schedule is not None:
        table = _Table(
            job, cluster, placement, schedule, config.parallel.recompute, slices, findings
        )
        print("\n".join(["", *table.lines(works=not errors)]), flush=True)
    print("\n".join(_problems(errors, findings)))
    return findings.is_clear and not errors


def _layout(placement: Placement, size: tuple[int, ...], ranks: bool) -> Iterator[str]:
    yield f"layout: {placement.describe()}, images of {by(size)}"
    if ranks:
        yield ""
        yield from rank_lines(placement, size)


def _check(errors: list[str], config: DictConfig, placement: Placement) -> None:
    microbatches, batch = config.parallel.microbatches, config.data.batch_size
    _tried(errors, lambda: check_batch(batch, microbatches, placement))
    _tried(errors, lambda: check_task(config.task, placement))


def _planned(config: DictConfig) -> DictConfig:
    """The configuration with float32 in place of a precision without known costs."""
    precision = PRECISIONS.get(config.trainer.precision)
    if precision is None or precision.mixed is None:
        return config
    print(f"note: memory is predicted for float32, not for {config.trainer.precision}")
    config = config.copy()
    config.trainer.precision = "float32"
    return config


def _tried(errors: list[str], compute: Callable[[], Any]) -> Any:
    """Return the result of `compute`; on an error, append it to `errors` and return None."""
    try:
        return compute()
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        if text not in errors:
            errors.append(text)
        return None


def _cluster(device: str) -> Cluster:
    """A cluster without base memory; its device rates matter for times only."""
    cluster = replace(cluster_named(cluster_file("infiniband")), base_mb=0.0, base_mb_alone=0.0)
    return replace(cluster, cores=1) if device == "cpu" else cluster


# --- what the ranks hold


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


class _Slices:
    """Numbers of samples per micro-batch and replica."""

    def __init__(self, batch: int, microbatches: int, data: int) -> None:
        micro = [stop - start for start, stop in pairwise(even_bounds(batch, microbatches))]
        parts = [b - a for size in micro for a, b in pairwise(even_bounds(size, data))]
        self.most = max(1, *parts)
        self.text = f"batch of {batch}: {_count(microbatches, 'micro-batch', 'micro-batches')} of "
        self.text += f"{_range(micro)}, {_count(data, 'replica', 'replicas')} with "
        self.text += f"{_range(parts)} of these"


class _Table:
    """A table with a line per stage, and one per kind of ranks."""

    def __init__(
        self,
        job: PlannedJob,
        cluster: Cluster,
        placement: Placement,
        schedule: Schedule,
        recompute: Any,
        slices: _Slices,
        findings: Preflight,
    ) -> None:
        self._job, self._cluster, self._placement = job, cluster, placement
        self._schedule, self._recompute = schedule, recompute
        self._slices, self._findings = slices, findings
        self._stages: list[StageCosts] = []

    def lines(self, works: bool) -> Iterator[str]:
        """Lines of the table; without memory if the configuration would not run."""
        reason = "" if works and self._findings.is_clear else "it would not run"
        if not reason:
            try:
                prediction = self._predicted()
            except ValueError as error:
                reason = str(error)
        yield self._slices.text
        yield ""
        yield (
            f"stage  {'ranks':11}{'tile':>20}{'samples':>8}"
            f"{'parameters':>12}{'held, MB':>10}{'halos, MB':>10}"
        )
        for stage in range(self._placement.stages):
            yield self._stage(stage)
        if reason:
            yield f"memory is not predicted: {reason}"
            return
        yield "per micro-batch; held from its forward to its backward; halos sent by a rank"
        yield from self._channels()
        yield ""
        yield from self._memory(prediction)

    def _predicted(self) -> Prediction:
        job, cluster, placement = self._job, self._cluster, self._placement
        microbatches = self._schedule.microbatches
        self._stages = stage_costs(job, cluster, placement, microbatches, self._recompute)
        return predict(job, cluster, placement, self._schedule, self._recompute)

    def _stage(self, stage: int) -> str:
        ranks = _span(self._placement.stage_ranks(stage, 0))
        parts = self._placement.batch_parts(stage)
        line = f"{stage:5}  {ranks:11}{self._tile(stage):>20}{ceil(self._slices.most / parts):8}"
        line += f"{_parameters(self._findings.stages, stage):>12}"
        if not self._stages:
            return line
        costs = self._stages[stage]
        return f"{line}{costs.held / 1e6:10.1f}{costs.halos / 1e6:10.2f}"

    def _channels(self) -> Iterator[str]:
        for stage, costs in enumerate(self._stages):
            ranks = self._placement.tensor_parts(stage)
            if ranks > 1:
                yield (
                    f"stage {stage} divides channels over {ranks} ranks, each of which sends "
                    f"{costs.channels / 1e6:.2f} MB to its peers"
                )

    def _tile(self, stage: int) -> str:
        """Rows and columns of the tiles of a stage's input."""
        if stage >= len(self._findings.entering):
            return ""
        size = self._findings.entering[stage]
        if size is None:
            return "no image"
        cuts = self._placement.layout(stage, 1, size).cuts
        sides = ([stop - start for start, stop in pairwise(bounds)] for bounds in cuts)
        return " x ".join(map(_range, sides))

    def _memory(self, prediction: Prediction) -> Iterator[str]:
        kinds: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self._placement.replica_size):
            held = (place.stage for place in self._placement.positions(rank))
            kinds.setdefault(tuple(sorted(held)), []).append(rank)
        where = "on GPUs" if self._cluster.cores is None else "on CPUs"
        yield f"memory per rank {where}, without Python, PyTorch and MPI themselves"
        for stages, ranks in kinds.items():
            memory = max(prediction.memory[rank] for rank in ranks)
            count = len(ranks) * self._placement.data
            names = ", ".join(dict.fromkeys(map(str, stages)))
            named = f"{'stage' if len(set(stages)) == 1 else 'stages'} {names}"
            named += " of both copies" if len(set(stages)) < len(stages) else ""
            yield f"  {count:6} with {named:25}{memory / 1e9:10.3f} GB each"
        total = sum(prediction.memory) * self._placement.data
        yield f"  {self._placement.world_size:6} {'in total':30}{total / 1e9:10.3f} GB"
        if prediction.stores:
            yield from self._virtual_tiles(prediction)

    def _virtual_tiles(self, prediction: Prediction) -> Iterator[str]:
        """Store use of virtual tiles."""
        job, most = self._job, max(prediction.stores, key=lambda use: use.moved)
        where = "pinned host memory" if job.store == "host" else "a file on disk"
        tiles = f"{by(self._placement.stream)} virtual tiles"
        if job.limit is None:
            yield f"{tiles}: all activations stay in memory, without trainer.memory_limit_gb"
        else:
            yield (
                f"{tiles}: activations within {job.limit / 1e9:g} GB, "
                f"at least {most.stored / 1e9:.3f} GB stored in {where}"
            )
            yield f"  per step a rank writes to it, and reads, at least {most.moved / 1e9:.3f} GB"


def _range(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return str(most) if least == most else f"{least} to {most}"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _parameters(stages: Sequence[nn.Module], stage: int) -> str:
    if stage >= len(stages):
        return ""
    tensors: dict[int, Tensor] = {id(p): p for p in stages[stage].parameters()}
    return f"{sum(prod(p.shape) for p in tensors.values()) / 1e6:.2f} M"


# --- findings


def _problems(errors: Sequence[str], findings: Preflight) -> Iterator[str]:
    yield ""
    for refusal in findings.refusals:
        yield f"refused: {refusal.place()}"
        yield f"    {refusal.reason}"
    for error in (*errors, *(error for error in findings.errors if error not in errors)):
        yield f"error: {error}"
    for where in dict.fromkeys(findings.guesses):
        yield f"note: {where} reads a value; only the branch for 1, or False, was followed"
    count = len(findings.refusals) + len(errors) + len(findings.errors)
    problems = f"{count} problem{'s' * (count != 1)}"
    yield "it would run" if count == 0 else f"it would not run: {problems}"
