"""Ranks and schedule of a configuration, and checks of batches and images.

Does not import PyTorch: the process that starts the ranks runs these checks first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, ListConfig

from spatialdl.layout.layout import by, spatial_names
from spatialdl.layout.partition import FORMS
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.layout_checks import check_shardable
from spatialdl.pipeline.schedule import GEMS, make_schedule
from spatialdl.pipeline.simulate import Schedule, repeated

RECOMPUTE = ("none", "block", "stage")
AUTO = "auto"
"""Value of `parallel.stream`: the fewest virtual tiles that fit into a memory limit."""


def placement_of(parallel: DictConfig, dims: int | None = None) -> Placement:
    """Compute the placement of a layout.

    Args:
        parallel: group ``parallel`` of the configuration.
        dims: spatial dims of the images, if known: 2 for images, 3 for volumes.

    Raises:
        ValueError: if the settings are inconsistent.
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
            f"parallel.recompute={parallel.recompute} is unknown: use one of {', '.join(RECOMPUTE)}"
        )
    if interleave > 1 and spatial_stages not in (0, stages):
        raise ValueError(
            f"parallel.interleave={interleave} gives a rank both first and later stages, so all "
            f"stages or none must split images: set parallel.spatial_stages={stages} or 0, not "
            f"{spatial_stages}"
        )
    if stages % interleave:
        raise ValueError(
            f"parallel.stages={stages} is not divisible by parallel.interleave={interleave}: use "
            f"{-(-stages // interleave) * interleave} stages"
        )
    if parallel.cut and stages == 1:
        raise ValueError(
            f"parallel.cut={parallel.cut} sets the first modules of stages 2, 3 ..., but "
            f"parallel={parallel.name} has one stage: use parallel=lp or pp, or a sum with one of "
            "them, or leave it out"
        )
    whole = (1,) * (dims or (len(spatial[0]) if spatial else 2))
    grids = spatial + [whole] * (stages - spatial_stages)
    batch = _batch(parallel, stages, spatial_stages)
    mirrored = _variant(parallel) is not None
    tensor = _tensor(parallel, stages, interleave > 1 or mirrored)
    _check_tensor_plan(parallel, tensor)
    stream = _stream(parallel, batch, tensor, dims)
    return Placement(data, tuple(grids), interleave, mirrored, batch, tensor=tensor, stream=stream)


def _stream(
    parallel: DictConfig, batch: Sequence[int], tensor: Sequence[int], dims: int | None
) -> tuple[int, ...]:
    """Virtual tiles of a rank."""
    if parallel.stream in (None, AUTO):  # auto is resolved once the network is built
        return ()
    refused = {
        f"parallel.local_dp={parallel.local_dp}": bool(batch),
        f"parallel.tensor={parallel.tensor}": bool(tensor),
        "parallel.sync_batchnorm=true": parallel.sync_batchnorm,
        "parallel.shard_state=true": parallel.shard_state,
    }
    refuse(
        refused,
        f"does not support virtual tiles, parallel.stream={parallel.stream}: set only one of them",
    )
    return _grid(parallel.stream, dims, "parallel.stream")


def refuse(settings: Mapping[str, object], why: str) -> None:
    """Refuse settings of which one is set.

    Raises:
        ValueError: begins with the setting.
    """
    for setting, is_set in settings.items():
        if is_set:
            raise ValueError(f"{setting} {why}")


def _tensor(parallel: DictConfig, stages: int, shares: bool) -> tuple[int, ...]:
    """Number of ranks that split the channels of each stage."""
    setting = parallel.tensor
    each = list(setting) if isinstance(setting, ListConfig) else [setting] * stages
    if any(type(one) is not int or one < 1 for one in each):
        raise ValueError(
            "parallel.tensor must be a whole number of at least 1 (ranks that split channels), or "
            f"a list with one number per stage, got {setting}"
        )
    if len(each) != stages:
        raise ValueError(
            f"parallel.tensor={setting} has {len(each)} numbers, but there are "
            f"parallel.stages={stages}: set one number per stage, or one for all"
        )
    if shares and len(set(each)) > 1:
        raise ValueError(
            f"parallel.tensor={setting} differs between stages that share ranks "
            "(parallel.interleave, GEMS): set one number for all"
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
            f"parallel.tensor_plan={plan} must map modules to one of {', '.join(FORMS)}, got "
            f"{unknown[0]}"
        )
    if not tensor:
        raise ValueError(
            f"parallel.tensor_plan={plan} has no effect without split channels: set parallel.tensor"
        )


def _batch(parallel: DictConfig, stages: int, spatial_stages: int) -> tuple[int, ...]:
    """Number of ranks that split the samples of each stage; 1 for spatial stages."""
    parts = _count(parallel, "local_dp")
    if parts == 1:
        return ()
    if not 0 < spatial_stages < stages:
        raise ValueError(
            f"parallel.local_dp={parts} splits samples in stages after spatial stages, but "
            f"parallel.spatial_stages={spatial_stages} of parallel.stages={stages}: use "
            f"parallel=sp+lp or sp+pp, or parallel.data={parts} for whole networks"
        )
    return (1,) * spatial_stages + (parts,) * (stages - spatial_stages)


def schedule_of(
    parallel: DictConfig, placement: Placement, accumulate: int = 1, *, forwards_first: bool = False
) -> Schedule:
    """Create the schedule of a configuration.

    Args:
        parallel: group ``parallel`` of the configuration.
        placement: the layout.
        accumulate: batches whose gradients a step accumulates.
        forwards_first: whether all forwards of a step come before its first backward.

    Raises:
        ValueError: if it does not fit the layout or the number of micro-batches, or does not
            support sharded state.
    """
    microbatches, variant = _count(parallel, "microbatches"), _variant(parallel)
    times = max(1, microbatches // 2) if variant == "master" else 1
    if variant is not None and parallel.schedule != "gpipe":
        raise ValueError(
            f"parallel.schedule={parallel.schedule} cannot be combined with GEMS, which has "
            "its own schedule: leave it out, or set parallel.gems.variant"
        )
    if forwards_first:
        return make_schedule("gpipe", placement, microbatches * accumulate)
    schedule = make_schedule(variant or parallel.schedule, placement, microbatches, times)
    if not isinstance(parallel.shard_state, bool):
        raise ValueError(f"parallel.shard_state={parallel.shard_state} must be true or false")
    if parallel.shard_state:
        check_shardable(placement)
    return repeated(schedule, accumulate)


def _variant(parallel: DictConfig) -> str | None:
    variant = parallel.gems.variant
    if variant not in ("none", *GEMS):
        raise ValueError(
            f"parallel.gems.variant={variant} is unknown: use one of none, {', '.join(GEMS)}"
        )
    return None if variant == "none" else str(variant)


def _count(settings: DictConfig, key: str, least: int = 1) -> int:
    value = settings[key]
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"{settings._get_full_key(key)} must be a whole number of at least {least}, got {value}"
        )
    return value


def _grids(parallel: DictConfig, spatial_stages: int, dims: int | None) -> list[tuple[int, ...]]:
    """Grid of each spatial stage: one for all of them, or one per stage."""
    setting = parallel.grid
    each = isinstance(setting, ListConfig) and any(isinstance(one, ListConfig) for one in setting)
    if each and len(setting) != spatial_stages:
        raise ValueError(
            f"parallel.grid has {len(setting)} grids, but there are "
            f"parallel.spatial_stages={spatial_stages}: set one grid per stage, or one for all"
        )
    grids = (
        [_grid(one, dims) for one in setting]
        if each
        else [_grid(setting, dims)] * max(1, spatial_stages)
    )
    if spatial_stages == 0 and max(grids[0]) > 1:
        raise ValueError(
            f"parallel.grid={list(grids[0])} splits images, but parallel={parallel.name} has no "
            "spatial stage: use parallel=sp, sp+lp or sp+pp, or set parallel.spatial_stages"
        )
    return grids[:spatial_stages]


def _grid(setting: object, dims: int | None, key: str = "parallel.grid") -> tuple[int, ...]:
    numbers = list(setting) if isinstance(setting, ListConfig | list) else []
    if not 1 <= len(numbers) <= 3 or any(type(number) is not int for number in numbers):
        raise ValueError(
            f"{key} must be [rows,columns], or [slices,rows,columns] for volumes"
            f"{', or a list with one of these per spatial stage' * (key == 'parallel.grid')}, "
            f"got {setting}"
        )
    if min(numbers) < 1:
        raise ValueError(f"{key}={setting} needs numbers of at least 1")
    if dims is not None and len(numbers) != dims:
        is_first_dim = max(numbers[1:], default=1) == 1
        if len(numbers) <= 2 and is_first_dim:  # [2, 1] also means halves of signals and volumes
            return (numbers[0], *(1,) * (dims - 1))
        raise ValueError(_dims_mismatch(key, setting, len(numbers), dims))
    return tuple(numbers)


def _dims_mismatch(key: str, setting: object, numbers: int, dims: int) -> str:
    excess = ", one too many" if numbers == dims + 1 else ""
    return (
        f"{key}={setting} has {numbers} numbers{excess}, but the images have {dims} spatial dims: "
        f"set one per dim, {key}=[{','.join(spatial_names(dims))}]"
    )


def check_batch(batch_size: int, microbatches: int, placement: Placement) -> None:
    """Check that every rank gets samples in every micro-batch."""
    replicas, local = placement.data, placement.most_batch_parts
    least = microbatches * replicas * local
    if not isinstance(batch_size, int) or batch_size < least:
        divided = f" x parallel.local_dp={local}" if local > 1 else ""
        raise ValueError(
            f"data.batch_size={batch_size} cannot be split into "
            f"parallel.microbatches={microbatches} x parallel.data={replicas}{divided}: use at "
            f"least {least} images per batch"
        )


def repeats(config: DictConfig, placement: Placement) -> int:
    """Number of times a step runs the schedule: once per accumulated batch, or once per bag.

    Bags differ in length, so each is a separate micro-batch on a replica.

    Raises:
        ValueError: if the layout does not support bags.
    """
    accumulate = int(config.trainer.accumulate)
    if config.data.name != "bags":
        return accumulate
    _check_bags(config, placement)
    return -(-int(config.data.batch_size) * accumulate // placement.data)


def _check_bags(config: DictConfig, placement: Placement) -> None:
    """Check for settings that need images of one size."""
    parallel, batch_size, data = config.parallel, config.data.batch_size, placement.data
    refused = {
        "parallel=auto": parallel.name == "auto",
        f"parallel.stages={placement.stages}": placement.stages > 1,
        f"parallel.tensor={placement.most_tensor_parts}": placement.most_tensor_parts > 1,
        f"parallel.microbatches={parallel.microbatches}": parallel.microbatches > 1,
        "parallel.gems": parallel.gems.variant != "none",
        "parallel.shard_state=true": parallel.shard_state,
        "parallel.sync_batchnorm=true": parallel.sync_batchnorm,
        f"task.mixup={config.task.get('mixup')}": config.task.get("mixup"),
        f"parallel.stream={parallel.stream}": parallel.stream,
    }
    refuse(
        refused,
        "needs images of one size, but the bags of data=bags differ in their number of tiles: "
        "leave it out, and use parallel=none, dp, sp or dp+sp",
    )
    if compares_samples(config.task) and batch_size == 1 and config.trainer.accumulate == 1:
        raise ValueError(
            "data.batch_size=1 with task.loss=cox: the loss compares the slides of a step, so it "
            "needs at least 2; use as many as fit, such as data.batch_size=32"
        )
    if type(batch_size) is not int or batch_size < data:
        raise ValueError(
            f"data.batch_size={batch_size} leaves some of parallel.data={data} replicas without a "
            f"bag: use at least {data}"
        )


def compares_samples(task: DictConfig) -> bool:
    """Whether the loss of a task depends on all samples of a step jointly."""
    return bool(task.name == "survival" and task.loss == "cox")


def check_task(task: DictConfig, placement: Placement) -> None:
    """Check that the loss of a task can be combined from ranks that split the samples."""
    local = placement.most_batch_parts
    if local == 1:
        return
    own = task.get("loss")
    if isinstance(own, DictConfig):
        raise ValueError(
            f"task.loss={own.get('_target_')} does not support parallel.local_dp="
            f"{local}: the weight of part of a micro-batch in the loss is unknown; leave "
            "local_dp out"
        )
    if task.name == "segmentation":
        raise ValueError(
            f"task=segmentation does not support parallel.local_dp={local}, because the loss is a "
            "mean over the labelled pixels of a whole micro-batch: leave local_dp out"
        )
    weights = task.get("class_weights")
    if isinstance(weights, ListConfig) and 0 in weights and task.label_smoothing:
        raise ValueError(
            f"task.class_weights={list(weights)} with task.label_smoothing={task.label_smoothing} "
            f"does not support parallel.local_dp={local}, because smoothed labels of samples with "
            "weight 0 still contribute to the loss: leave one of the three out"
        )


def check_image(size: Sequence[int], placement: Placement) -> None:
    """Check that an image has the dims of the grid and at least one pixel per part."""
    if len(size) != placement.dims:
        raise ValueError(
            f"images of {by(size)} have {len(size)} spatial dims, but parallel.grid has "
            f"{placement.dims} numbers: set one per dim"
        )
    for grid in placement.tile_grids:
        if any(extent < parts for extent, parts in zip(size, grid, strict=True)):
            parts = f"{by(grid)} virtual tiles" if placement.stream else f"grid {by(grid)}"
            keys = "parallel.stream, parallel.grid" if placement.stream else "parallel.grid"
            raise ValueError(
                f"an image of {by(size)} is smaller than the {parts}: use a smaller {keys} or "
                "larger images"
            )
