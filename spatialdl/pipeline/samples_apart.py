"""Checks whether a stage's result for a sample depends on other samples of the batch.

Where the samples of a micro-batch are divided over ranks, BatchNorm is computed over all of them.
Any other statistic over samples would silently cover one rank's samples only. No list of
operations is complete, so the stage is run: with three samples, with two of these, and with the two
moved behind a sample of NaN, which spreads to all that depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.handover import HandoverShape
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.pipeline.autocast import autocast
from spatialdl.pipeline.own_tile import received
from spatialdl.pipeline.stage import run_stage, start_training
from spatialdl.pipeline.stage_runtime import StageRuntime
from spatialdl.pipeline.steps import Value
from spatialdl.spatial.random import keyed
from spatialdl.spatial.random.composite import inside
from spatialdl.spatial.random.plain import PLAIN
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import tree_leaves

ALL, FEWER = 3, 2
"""Samples of the runs per rank that has any; in the third run, the first ones are foreign."""

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}


_Seen = dict[str, list[Tensor]]
"""This rank's parts of the outputs and buffers of a stage, by name."""


def check_samples_apart(
    stages: Sequence[StageRuntime], dtype: torch.dtype, comm: Communicator, reason: str
) -> None:
    """Refuse stages that mix samples; collective, and only between steps.

    Args:
        stages: this rank's stages with micro-batches shared between ranks.
        dtype: of the images.
        comm: all ranks.
        reason: why samples must be independent.

    Raises:
        UnsupportedSpatialOp: on all ranks, with the stage.
    """
    mixing = ""
    for placed in stages:
        mixing = mixing or _Probe(placed, dtype).mixing()  # all ranks of a stage run it
    places = [place for place in comm.allgather(mixing) if place]
    if places:
        raise UnsupportedSpatialOp(
            f"{reason}, but this network computes something over the samples of a batch other than "
            f"by BatchNorm, in {places[0]}; each rank would compute it over its own samples only"
        )


class _Probe:
    """Runs of a stage on random samples; see `check_samples_apart`."""

    def __init__(self, placed: StageRuntime, dtype: torch.dtype) -> None:
        self._placed, self._each = placed, placed.mesh.batch
        self._device, self._mixed = placed.options.device, placed.options.mixed
        self._parts = {n: placed.arriving(n * self._each, dtype) for n in (ALL, FEWER)}

    def mixing(self) -> str:
        """What depends on other samples, in training or evaluation; empty if nothing does."""
        return self._mixing_in(training=True) or self._mixing_in(training=False)

    def _mixing_in(self, training: bool) -> str:
        tiles = {value: self._tile(value, part) for value, part in self._parts[ALL].items()}
        dims = {
            value: _sample_dim(tile.shape, self._shape(self._parts[FEWER][value]))
            for value, tile in tiles.items()
        }
        fewer = {value: _part(tile, dims[value], 0) for value, tile in tiles.items()}
        strangers = [_moved(tiles, dims, fill) for fill in (float("nan"), 3.0)]

        run = partial(self._run, training)
        whole, some = run(ALL, tiles), run(FEWER, fewer)
        try:
            moved = run(ALL, strangers[0])
        except Exception:  # a forward may refuse NaN
            moved = run(ALL, strangers[1])
        mixed = (name for name in whole if not _apart(whole[name], some[name], moved[name]))
        return next((f"{name} of stage {self._placed.position.stage}" for name in mixed), "")

    def _shape(self, part: HandoverShape) -> tuple[int, ...]:
        """Shape of this rank's input; of all ranks' input where ranks divide the samples."""
        if self._placed.mesh.parts == 1:
            return part.shape
        return part.local_shape(part.receiver, self._placed.position.part)

    def _tile(self, value: Value, part: HandoverShape) -> Tensor:
        """Random input; identical on all ranks if it is not cut."""
        shape = self._shape(part)
        seed = 1 + (shape != part.shape) * (1 + self._placed.position.part)
        draw = torch.Generator().manual_seed(seed)
        if not part.dtype.is_floating_point:
            return torch.zeros(shape, dtype=part.dtype, device=self._device)
        return torch.randn(shape, generator=draw).to(self._device, part.dtype)

    @torch.no_grad()
    def _run(self, training: bool, number: int, tiles: dict[Value, Tensor]) -> _Seen:
        stage = self._placed.module
        values = {
            value: received(tiles[value].clone(), shape, self._placed.mesh)
            for value, shape in self._parts[number].items()
        }
        with _as_it_was(stage), autocast(self._device, self._mixed), keyed(0, 0), _Calm():
            if training:
                start_training(stage)
            else:
                stage.eval()
            seen = {"the output": _local(run_stage(stage, values, number * self._each))}
            return seen | {f"'{name}', a buffer,": [x] for name, x in stage.named_buffers()}


def _moved(
    tiles: dict[Value, Tensor], dims: dict[Value, int | None], fill: float
) -> dict[Value, Tensor]:
    """Move the first samples to the end, behind foreign ones of value `fill`."""
    moved = dict(tiles)
    for value, dim in dims.items():
        tile = tiles[value]
        if dim is not None and tile.is_floating_point():
            own = _part(tile, dim, 0)
            rows = tile.shape[dim] - own.shape[dim]
            moved[value] = torch.cat([torch.full_like(tile.narrow(dim, 0, rows), fill), own], dim)
    return moved


@contextmanager
def _as_it_was(stage: nn.Module) -> Iterator[None]:
    """Restore buffers, modes and attributes afterwards."""
    attributes = [(module, dict(vars(module))) for module in stage.modules()]
    buffers = [(module, dict(module._buffers)) for module in stage.modules()]
    for module, own in buffers:
        module._buffers.update(
            {name: None if buffer is None else buffer.clone() for name, buffer in own.items()}
        )
    try:
        yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for module, own in buffers:
            module._buffers.clear()
            module._buffers.update(own)


def _local(result: Any) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [(x._tile if isinstance(x, SpatialTensor) else x).detach().clone() for x in tensors]


def _sample_dim(whole: Sequence[int], some: Sequence[int]) -> int | None:
    """The dim of the samples; None if there is none."""
    differing = [
        dim
        for dim, (n, m) in enumerate(zip(whole, some, strict=True))
        if n != m and n * FEWER == m * ALL
    ]
    return differing[0] if len(differing) == 1 else None


def _part(tensor: Tensor, dim: int | None, first: int) -> Tensor:
    """`FEWER` of `ALL` samples; the whole tensor if it has no sample dim."""
    if dim is None:
        return tensor
    rows = tensor.shape[dim] // ALL
    return tensor.narrow(dim, first * rows, FEWER * rows)


def _apart(whole: list[Tensor], some: list[Tensor], moved: list[Tensor]) -> bool:
    """Whether the results of the two samples do not depend on the third."""
    return len(whole) == len(some) == len(moved) and all(map(_equal, whole, some, moved))


def _equal(whole: Tensor, some: Tensor, moved: Tensor) -> bool:
    if whole.dim() != some.dim() or whole.shape != moved.shape:
        return False
    dim = _sample_dim(whole.shape, some.shape)
    if dim is not None:
        whole, moved = _part(whole, dim, 0), _part(moved, dim, ALL - FEWER)
    if whole.shape != some.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(whole, some) and torch.equal(whole, moved)
    scale = float(whole.nan_to_num(0, 0, 0).abs().max()) if whole.numel() else 0.0
    tolerance = _TOLERANCES.get(whole.dtype, 5e-2) * scale
    return all(
        torch.allclose(whole, other, rtol=0, atol=tolerance, equal_nan=True)
        for other in (some, moved)
    )


class _Calm(TorchFunctionMode):
    """Replaces what samples share by design or chance: BatchNorm, dropout, random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.batch_norm and _trains(args, kwargs):
            return _normalised(*args, **kwargs)
        if func is torch.batch_norm and args[5]:
            return _normalised(args[0], None, None, args[1], args[2])
        if func in PLAIN and "dropout" in name:
            return args[0] if name != "native_dropout" else (args[0], torch.ones_like(args[0]))
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *(0.0,) * (len(args) > 4), *args[5:]), dict(kwargs)
            kwargs.pop("dropout_p", None)
            return func(*args, **kwargs)
        if func in PLAIN and "rrelu" not in name:
            return func(*args, **kwargs).fill_(0.5)
        composite = inside(func) if getattr(func, "__module__", "") == F.__name__ else None
        is_split = any(issubclass(kind, SpatialTensor) for kind in types)
        return (
            self._inside(composite, args, kwargs)
            if composite and not is_split
            else func(*args, **kwargs)
        )

    def _inside(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:  # its inside may draw random numbers
            return function(*args, **kwargs)


def _trains(args: Any, kwargs: Any) -> bool:
    return bool(args[5] if len(args) > 5 else kwargs.get("training", False))


def _normalised(
    x: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None, *args: Any, **_: Any
) -> Tensor:
    """Normalize to the magnitude of BatchNorm, by a sample's own values."""
    y = x / (x.abs().mean(tuple(range(1, x.dim())), keepdim=True) + 1e-3)
    per_channel = (1, -1, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * weight.view(per_channel)
    return y if bias is None else y + bias.view(per_channel)
