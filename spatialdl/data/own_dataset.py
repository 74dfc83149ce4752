"""Datasets that lie in the HDF5 file itself.

A name in HDF5 may also be a link to another file, and a dataset may have its values in other files
(external storage, virtual datasets): a shard from elsewhere could so name any file of this machine
as its pixels. Nothing that we write has such, so it is refused, before the other file is opened.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import h5py


def own_dataset(h5: h5py.File, name: str) -> h5py.Dataset:
    """The dataset of a name.

    Args:
        h5: open.
        name: with the groups that lead to it, such as `regions/000000/image`.

    Raises:
        KeyError: there is none.
        ValueError: a link, a group or a dataset whose values lie elsewhere is there.
    """
    for part in accumulate(name.split("/"), "{}/{}".format):
        link: Any = h5.get(part, getlink=True)
        if link is None:
            raise KeyError(f"there is no {part}")
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{part} is a link, which shards have not")
        dataset = h5[part]
    return checked_dataset(dataset, name)


def checked_dataset(dataset: Any, name: str) -> h5py.Dataset:
    """A dataset whose values lie in its file.

    Raises:
        ValueError: they do not, or it is none.
    """
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name} is no dataset")
    if is_elsewhere(dataset):
        raise ValueError(f"{name} has its values in other files, which shards have not")
    return dataset


def is_elsewhere(dataset: h5py.Dataset) -> bool:
    """Whether a dataset has its values in other files, which asking for its shape may open."""
    settings = dataset.id.get_create_plist()
    return bool(settings.get_layout() == h5py.h5d.VIRTUAL or settings.get_external_count())
