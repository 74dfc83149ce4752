"""Detection and splitting of images in a user's batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.parallel.layout import image_shape
from spatialdl.spatial.split import shard
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import tree_leaves, tree_map_only

Split = Callable[[Any, Mesh], Any] | Collection[str | int] | str | int | None
"""A function of batch and mesh, the keys of images and masks, or None for detection."""


def split_batch(batch: Any, mesh: Mesh, how: Split = None) -> Any:
    """Split the images of a batch over the grid of a mesh; collective over the mesh.

    Args:
        batch: tensors in tuples, lists, dicts and named tuples; the same on all ranks of a grid.
        mesh: the ranks.
        how: a function of batch and mesh that returns the batch with split images; or the keys of
            the images in a dict, or their indices in a tuple or list. None splits each floating
            tensor (N, C, *spatial) (without any, those of integers), and each mask: a tensor
            (N, C, *spatial) or (N, *spatial) with the spatial size of such an image. Everything
            else stays whole on every rank.

    Raises:
        ValueError: there is no image, or a key of `how` is missing.
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
            f"{mesh.grid} is {image_shape(len(mesh.grid))}; select the images with split=, by keys "
            "or by a function of batch and mesh"
        )
    return tree_map_only(
        Tensor, lambda x: shard(x, mesh) if _is_split(x, sizes, mesh) else x, batch
    )


def _image_sizes(tensors: list[Tensor], dims: int) -> set[tuple[int, ...]]:
    """Spatial sizes of the images of a batch: floating tensors, or else integer tensors."""
    images = [x for x in tensors if x.dim() == dims + 2 and not isinstance(x, SpatialTensor)]
    floating = [x for x in images if x.is_floating_point()]
    return {tuple(x.shape[-dims:]) for x in floating or images}


def _is_split(x: Tensor, sizes: set[tuple[int, ...]], mesh: Mesh) -> bool:
    dims = len(mesh.grid)
    fits = x.dim() in (dims + 1, dims + 2) and tuple(x.shape[-dims:]) in sizes
    return fits and not isinstance(x, SpatialTensor)


def _by_keys(batch: Any, mesh: Mesh, keys: Collection[str | int]) -> Any:
    if isinstance(batch, Mapping):
        known: Collection[Any] = batch.keys()
    elif isinstance(batch, tuple | list):
        known = range(len(batch))
    else:
        raise ValueError(
            f"split={keys!r} selects images by key, but a batch is a {type(batch).__name__}: give "
            "a function of batch and mesh"
        )
    missing = [key for key in keys if key not in known]
    if missing:
        raise ValueError(f"split= has keys {missing}, but a batch has {list(known)}")
    if isinstance(batch, Mapping):
        new = dict(batch)
        new.update({key: _split_all(batch[key], mesh) for key in keys})
        return new if type(batch) is dict else type(batch)(new)  # type: ignore[call-arg]
    items = [_split_all(x, mesh) if place in keys else x for place, x in enumerate(batch)]
    is_named = isinstance(batch, tuple) and hasattr(batch, "_fields")
    return type(batch)(*items) if is_named else type(batch)(items)


def _split_all(value: Any, mesh: Mesh) -> Any:
    """Split all tensors under a key: an image, or several in a list."""
    return tree_map_only(Tensor, lambda x: shard(x, mesh), value)
