"""Which tensors of a user's batch are images, and splitting them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from spatialdl.comm.mesh import Mesh
from spatialdl.parallel.layout import image_shape
from spatialdl.spatial.split import shard
from spatialdl.spatial.tensor import SpatialTensor

Split = Callable[[Any, Mesh], Any] | Collection[str | int] | str | int | None
"""A function of a batch and the mesh, the keys of what is split, or None to recognise it."""


def split_batch(batch: Any, mesh: Mesh, how: Split = None) -> Any:
    """A batch whose images are split over the grid of a mesh; every rank of it must call it.

    Args:
        batch: tensors in tuples, lists, dicts and named tuples; the same on all ranks of a grid.
        mesh: the ranks.
        how: a function that is called with batch and mesh and returns the batch with split images;
            or the keys of the images in a dict, or their places in a tuple or list. None splits
            each floating tensor (N, C, *spatial) (without one, those of integers), and each tensor
            (N, C, *spatial) or (N, *spatial) whose spatial dims have the size of such an image: its
            mask. Everything else stays whole on every rank.

    Raises:
        ValueError: if there is no image, or a key of `how` is missing.
    """
    if callable(how):
        return how(batch, mesh)
    if how is not None:
        return _by_keys(batch, mesh, (how,) if isinstance(how, str | int) else how)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = _image_sizes(tensors, len(mesh.grid))
    if not sizes and not any(isinstance(tensor, SpatialTensor) for tensor in tensors):
        shapes = [f"{tuple(x.shape)} {x.dtype}".replace("torch.", "") for x in tensors]
        raise ValueError(
            f"found no image in a batch of {type(batch).__name__} with "
            f"{', '.join(shapes) or 'no tensors'}: an image to be split over a grid of "
            f"{mesh.grid} is {image_shape(len(mesh.grid))}; name the images with split=, by keys "
            "or by a function of batch and mesh"
        )
    return tree_map_only(
        Tensor, lambda x: shard(x, mesh) if _is_split(x, sizes, mesh) else x, batch
    )


def _image_sizes(tensors: list[Tensor], dims: int) -> set[tuple[int, ...]]:
    """Spatial sizes of the images of a batch: of floating ones, else of integers."""
    images = [x for x in tensors if x.dim() == dims + 2 and not isinstance(x, SpatialTensor)]
    floating = [x for x in images if x.is_floating_point()]
    return {tuple(x.shape[-dims:]) for x in floating or images}


def _is_split(x: Tensor, sizes: set[tuple[int, ...]], mesh: Mesh) -> bool:
    dims = len(mesh.grid)
    fits = x.dim() in (dims + 1, dims + 2) and tuple(x.shape[-dims:]) in sizes
    return fits and not isinstance(x, SpatialTensor)


def _by_keys(batch: Any, mesh: Mesh, keys: Collection[str | int]) -> Any:
    if isinstance(batch, Mapping):
        there: Collection[Any] = batch.keys()
    elif isinstance(batch, tuple | list):
        there = range(len(batch))
    else:
        raise ValueError(
            f"split={keys!r} names images by key, but a batch is a {type(batch).__name__}: give a "
            "function of batch and mesh"
        )
    missing = [key for key in keys if key not in there]
    if missing:
        raise ValueError(f"split= names {missing}, but a batch has {list(there)}")
    if isinstance(batch, Mapping):
        new = dict(batch)
        new.update({key: _split_all(batch[key], mesh) for key in keys})
        return new if type(batch) is dict else type(batch)(new)  # type: ignore[call-arg]
    items = [_split_all(x, mesh) if place in keys else x for place, x in enumerate(batch)]
    is_named = isinstance(batch, tuple) and hasattr(batch, "_fields")
    return type(batch)(*items) if is_named else type(batch)(items)


def _split_all(value: Any, mesh: Mesh) -> Any:
    """All tensors of what a key names: an image, or several in a list."""
    return tree_map_only(Tensor, lambda x: shard(x, mesh), value)
