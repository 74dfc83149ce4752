"""The ranks that a configuration needs, and whether batches and images can be cut for them.

No PyTorch here: the process that only starts the ranks checks all this before it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from omegaconf import DictConfig, ListConfig

from spatialdl.parallel.layout import by, spatial_names
from spatialdl.parallel.partition import FORMS
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Schedule, repeated
from spatialdl.pipeline.schedule import GEMS, make_schedule
from spatialdl.pipeline.shardable import check_shardable

RECOMPUTE = ("none", "block", "stage")
LATE = ("local_dp", "tensor")


def placement_of(parallel: DictConfig, dims: int | None = None) -> Placement:
    """The ranks that a layout needs.

    Args:
        dims: spatial dims of the images, where they are known: 2 for images, 3 for volumes.

    Raises:
        ValueError: if its numbers contradict each other.
    """
    stages, spatial_stages = _count(parallel, "stages"), _count(parallel, "spatial_stages", 0)
    data, interleave = _count(parallel, "data"), _count(parallel, "interleave")
    if spatial_stages > stages:
        raise ValueError(
            f"parallel.spatial_stages={spatial_stages} must lie between 0 and "
            f"parallel.stages={stages}"
        )
    spatial = _grids(parallel, spatial_stages, dims)
    if parallel.recompute not in RECOMPUTE:
        raise ValueError(
            f"parallel.recompute={parallel.recompute} is unknown: take one of "
            f"{', '.join(RECOMPUTE)}"
        )
    if interleave > 1 and spatial_stages not in (0, stages):
        raise ValueError(
            f"parallel.interleave={interleave} gives ranks the first and later stages alike, so "
            f"all must cut images or none: set parallel.spatial_stages={stages} or 0, not "
            f"{spatial_stages}"
        )
    if stages % interleave:
        raise ValueError(
            f"parallel.stages={stages} cannot be dealt out parallel.interleave={interleave} to a "
            f"rank: take {-(-stages // interleave) * interleave} stages"
        )
    if parallel.cut and stages == 1:
        raise ValueError(
            f"parallel.cut={parallel.cut} says with which modules stages 2, 3 ... begin, but "
            f"parallel={parallel.name} has one stage: take parallel=lp or pp, or a sum with one of "
            "them, or leave it out"
        )
    whole = (1,) * (dims or (len(spatial[0]) if spatial else 2))
    grids = spatial + [whole] * (stages - spatial_stages)
    late = _late(parallel, spatial, stages)
    batch = _batch(parallel, stages, spatial_stages, late.get("local_dp"))
    mirrored = _variant(parallel) is not None
    tensor = _tensor(parallel, stages, late.get("tensor"), interleave > 1 or mirrored)
    _check_tensor_plan(parallel, tensor)
    stream = _stream(parallel, batch, tensor, dims)
    return Placement(data, tuple(grids), interleave, mirrored, batch, tensor=tensor, stream=stream)


def _stream(
    parallel: DictConfig, batch: Sequence[int], tensor: Sequence[int], dims: int | None
) -> tuple[int, ...]:
    """Virtual tiles of a rank."""
    if parallel.stream is None:
        return ()
    refused = {
        f"parallel.local_dp={parallel.local_dp}": bool(batch),
        f"parallel.tensor={parallel.tensor}": bool(tensor),
        "parallel.sync_batchnorm=true": parallel.sync_batchnorm,
        "parallel.shard_state=true": parallel.shard_state,
        f"parallel.schedule={parallel.schedule}": parallel.schedule == "zero_bubble",
    }
    for what, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{what} does not go with virtual tiles, parallel.stream={parallel.stream}: leave "
                "one of them out"
            )
    return _grid(parallel.stream, dims, "parallel.stream")


def _late(parallel: DictConfig, spatial: Sequence[tuple[int, ...]], stages: int) -> dict[str, int]:
    """What stages after those that cut images divide over as many ranks as the last of those."""
    late = parallel.late
    if late is None:
        return {}
    if late not in LATE:
        raise ValueError(f"parallel.late={late} is unknown: take one of {', '.join(LATE)}, or null")
    if not 0 < len(spatial) < stages:
        raise ValueError(
            f"parallel.late={late} is what stages after those that cut images do, but "
            f"parallel.spatial_stages={len(spatial)} of parallel.stages={stages}: take "
            "parallel=sp+lp or sp+pp"
        )
    if parallel[late] != 1:
        raise ValueError(
            f"parallel.late={late} takes as many ranks as the stage before, prod(parallel.grid)="
            f"{prod(spatial[-1])}, and parallel.{late}={parallel[late]} says another number: leave "
            "one of them out"
        )
    return {late: prod(spatial[-1])}


def _tensor(parallel: DictConfig, stages: int, late: int | None, shares: bool) -> tuple[int, ...]:
    """The ranks over which each stage divides channels."""
    given = parallel.tensor
    if late is not None:
        spatial_stages = int(parallel.spatial_stages)
        return (1,) * spatial_stages + (late,) * (stages - spatial_stages)
    each = list(given) if isinstance(given, ListConfig) else [given] * stages
    if any(type(one) is not int or one < 1 for one in each):
        raise ValueError(
            "parallel.tensor is a whole number of at least 1, the ranks that divide channels, or a "
            f"list with one for each stage, got {given}"
        )
    if len(each) != stages:
        raise ValueError(
            f"parallel.tensor={given} has {len(each)} numbers, but there are "
            f"parallel.stages={stages}: give one for each, or one for all"
        )
    if shares and len(set(each)) > 1:
        raise ValueError(
            f"parallel.tensor={given} gives stages that share ranks (parallel.interleave, GEMS) "
            "different numbers: give one for all"
        )
    return tuple(each) if max(each) > 1 else ()


def _check_tensor_plan(parallel: DictConfig, tensor: Sequence[int]) -> None:
    plan = parallel.tensor_plan
    if plan is None:
        return
    forms = list(plan.values()) if isinstance(plan, DictConfig) else [plan]
    unknown = [form for form in forms if form not in FORMS]
    if unknown:
        raise ValueError(
            f"parallel.tensor_plan={plan} names modules, and for each what is divided: one of "
            f"{', '.join(FORMS)}, got {unknown[0]}"
        )
    if not tensor:
        raise ValueError(
            f"parallel.tensor_plan={plan} says how channels are divided, but none are: set "
            "parallel.tensor"
        )


def _batch(
    parallel: DictConfig, stages: int, spatial_stages: int, late: int | None
) -> tuple[int, ...]:
    """The ranks over which each stage divides samples: those that do not cut images."""
    parts = late or _count(parallel, "local_dp")
    if parts == 1:
        return ()
    if not 0 < spatial_stages < stages:
        raise ValueError(
            f"parallel.local_dp={parts} divides the samples in stages after those that cut images, "
            f"but parallel.spatial_stages={spatial_stages} of parallel.stages={stages}: take "
            f"parallel=sp+lp or sp+pp, or for whole networks parallel.data={parts}"
        )
    return (1,) * spatial_stages + (parts,) * (stages - spatial_stages)


def schedule_of(
    parallel: DictConfig, placement: Placement, accumulate: int = 1, *, forwards_first: bool = False
) -> Schedule:
    """The order of work that a configuration asks for.

    Args:
        accumulate: batches of which the gradients are added up in a step.
        forwards_first: whether no backward of a step comes before its last forward.

    Raises:
        ValueError: if it does not fit the layout or the number of micro-batches, or state cannot
            be sharded in it.
    """
    microbatches, times = _count(parallel, "microbatches"), _count(parallel.gems, "times")
    variant = _variant(parallel)
    if variant is not None and parallel.schedule != "gpipe":
        raise ValueError(
            f"parallel.schedule={parallel.schedule} does not go with GEMS, which has an order of "
            "its own: leave it out, or choose by parallel.gems.variant"
        )
    if forwards_first:
        return make_schedule("gpipe", placement, microbatches * accumulate)
    schedule = make_schedule(variant or parallel.schedule, placement, microbatches, times)
    if not isinstance(parallel.shard_state, bool):
        raise ValueError(f"parallel.shard_state={parallel.shard_state} must be true or false")
    if parallel.shard_state:
        check_shardable(placement, schedule)
    return repeated(schedule, accumulate)


def _variant(parallel: DictConfig) -> str | None:
    variant = parallel.gems.variant
    if variant not in ("none", *GEMS):
        raise ValueError(
            f"parallel.gems.variant={variant} is unknown: take one of none, {', '.join(GEMS)}"
        )
    return None if variant == "none" else str(variant)


def _count(settings: DictConfig, key: str, least: int = 1) -> int:
    value = settings[key]
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"{settings._get_full_key(key)} is a whole number of at least {least}, got {value}"
        )
    return value


def _grids(parallel: DictConfig, spatial_stages: int, dims: int | None) -> list[tuple[int, ...]]:
    """The grid of each spatial stage: one for all of them, or one each."""
    given = parallel.grid
    each = isinstance(given, ListConfig) and any(isinstance(one, ListConfig) for one in given)
    if each and len(given) != spatial_stages:
        raise ValueError(
            f"parallel.grid names {len(given)} grids, but there are "
            f"parallel.spatial_stages={spatial_stages}: name one for each, or one for all"
        )
    grids = (
        [_grid(one, dims) for one in given]
        if each
        else [_grid(given, dims)] * max(1, spatial_stages)
    )
    if spatial_stages == 0 and max(grids[0]) > 1:
        raise ValueError(
            f"parallel.grid={list(grids[0])} cuts images, but parallel={parallel.name} has no "
            "spatial stage: take parallel=sp, sp+lp or sp+pp, or set parallel.spatial_stages"
        )
    return grids[:spatial_stages]


def _grid(given: object, dims: int | None, key: str = "parallel.grid") -> tuple[int, ...]:
    numbers = list(given) if isinstance(given, ListConfig | list) else []
    if not 1 <= len(numbers) <= 3 or any(type(number) is not int for number in numbers):
        raise ValueError(
            f"{key} is [rows,columns], for volumes [slices,rows,columns]"
            f"{', or a list of these, one for each spatial stage' * (key == 'parallel.grid')}, "
            f"got {given}"
        )
    if min(numbers) < 1:
        raise ValueError(f"{key}={given} needs numbers of at least 1")
    if dims is not None and len(numbers) != dims:
        if max(numbers[1:], default=1) == 1:  # [2, 1] are halves of signals and volumes, too
            return (numbers[0], *(1,) * (dims - 1))
        names = ",".join(spatial_names(dims))
        raise ValueError(
            f"{key}={given} has {len(numbers)} numbers, but the images have {dims} spatial dims: "
            f"give one for each, {key}=[{names}]"
        )
    return tuple(numbers)


def check_batch(batch_size: int, microbatches: int, placement: Placement) -> None:
    """Refuse a batch that leaves ranks without samples in a micro-batch."""
    replicas, local = placement.data, placement.most_batch_parts
    least = microbatches * replicas * local
    if not isinstance(batch_size, int) or batch_size < least:
        divided = f" x parallel.local_dp={local}" if local > 1 else ""
        raise ValueError(
            f"data.batch_size={batch_size} cannot be cut into parallel.microbatches={microbatches} "
            f"x parallel.data={replicas}{divided}: take at least {least} images a batch"
        )


def repeats(config: DictConfig, placement: Placement) -> int:
    """How many times a step runs the schedule: once a batch that is accumulated, of bags each.

    Bags differ in length, so that each is a micro-batch of its own on a replica.

    Raises:
        ValueError: the layout is none for bags.
    """
    accumulate = int(config.trainer.accumulate)
    if config.data.name != "bags":
        return accumulate
    _check_bags(config, placement)
    return -(-int(config.data.batch_size) * accumulate // placement.data)


def _check_bags(config: DictConfig, placement: Placement) -> None:
    """Refuse what takes images of one size."""
    parallel, batch_size, data = config.parallel, config.data.batch_size, placement.data
    refused = {
        "parallel=auto": parallel.name == "auto",
        f"parallel.stages={placement.stages}": placement.stages > 1,
        f"parallel.tensor={placement.most_tensor_parts}": placement.most_tensor_parts > 1,
        f"parallel.microbatches={parallel.microbatches}": parallel.microbatches > 1,
        "parallel.gems": parallel.gems.variant != "none",
        "parallel.shard_state=true": parallel.shard_state,
        "parallel.sync_batchnorm=true": parallel.sync_batchnorm,
        "trainer.compile=true": config.trainer.compile,
        f"task.mixup={config.task.get('mixup')}": config.task.get("mixup"),
        f"parallel.stream={parallel.stream}": parallel.stream,
    }
    for what, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{what} takes images of one size, and the bags of data=bags have as many tiles as "
                "slides have: leave it out, and take parallel=none, dp, sp or dp+sp"
            )
    if compares_samples(config.task) and batch_size == 1 and config.trainer.accumulate == 1:
        raise ValueError(
            "data.batch_size=1 with task.loss=cox: the loss compares the slides of a step, and one "
            "alone has none to be compared with; take as many as fit, such as data.batch_size=32"
        )
    if type(batch_size) is not int or batch_size < data:
        raise ValueError(
            f"data.batch_size={batch_size} leaves some of parallel.data={data} replicas without a "
            f"bag: take at least {data}"
        )


def compares_samples(task: DictConfig) -> bool:
    """Whether the loss of a task is of all samples of a step together."""
    return bool(task.name == "survival" and task.loss == "cox")


def check_task(task: DictConfig, placement: Placement) -> None:
    """Refuse a task whose loss ranks that divide the samples cannot put together."""
    local = placement.most_batch_parts
    if local == 1:
        return
    own = task.get("loss")
    if isinstance(own, DictConfig):
        raise ValueError(
            f"task.loss={own.get('_target_')} does not go with parallel.local_dp="
            f"{local}: the weight of a part of a micro-batch's samples in it is unknown; leave "
            "local_dp out"
        )
    if task.name == "segmentation":
        raise ValueError(
            f"task=segmentation does not go with parallel.local_dp={local}, as the "
            "mean over pixels with a class is that of a whole micro-batch: leave local_dp out"
        )
    weights = task.get("class_weights")
    if isinstance(weights, ListConfig) and 0 in weights and task.label_smoothing:
        raise ValueError(
            f"task.class_weights={list(weights)} with task.label_smoothing={task.label_smoothing} "
            f"does not go with parallel.local_dp={local}: a rank whose samples "
            "weigh 0 still has a share of their smoothed labels: leave one of the three out"
        )


def check_image(size: Sequence[int], placement: Placement) -> None:
    """Refuse an image with other dims, or fewer pixels in one, than a grid has parts."""
    if len(size) != placement.dims:
        raise ValueError(
            f"images of {by(size)} have {len(size)} spatial dims, but parallel.grid has "
            f"{placement.dims} numbers: give one for each"
        )
    for grid in placement.tile_grids:
        if any(extent < parts for extent, parts in zip(size, grid, strict=True)):
            raise ValueError(
                f"an image of {by(size)} is smaller than the grid {by(grid)}: use a smaller "
                "parallel.grid or larger images"
            )
