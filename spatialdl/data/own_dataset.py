"""Datasets whose values are in the HDF5 file itself.

An HDF5 name can be a link to another file, and a dataset can have its values in other files
(external storage, virtual datasets), so a foreign shard could use any local file as pixels.
spatialdl never writes such, so they are rejected before the other file is opened.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import h5py


def own_dataset(h5: h5py.File, name: str) -> h5py.Dataset:
    """Look up a dataset by name.

    Args:
        h5: open file.
        name: full path, such as `regions/000000/image`.

    Raises:
        KeyError: it does not exist.
        ValueError: it is a link, a group, or a dataset with values in other files.
    """
    for part in accumulate(name.split("/"), "{}/{}".format):
        link: Any = h5.get(part, getlink=True)
        if link is None:
            raise KeyError(f"no dataset {part}")
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{part} is a link, which is not allowed in shards")
        dataset = h5[part]
    return checked_dataset(dataset, name)


def checked_dataset(dataset: Any, name: str) -> h5py.Dataset:
    """Check that an object is a dataset with its values in its file.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name} is not a dataset")
    if is_elsewhere(dataset):
        raise ValueError(f"{name} has values in other files, which is not allowed in shards")
    return dataset


def is_elsewhere(dataset: h5py.Dataset) -> bool:
    """Whether a dataset has values in other files, which reading its shape may open."""
    settings = dataset.id.get_create_plist()
    return bool(settings.get_layout() == h5py.h5d.VIRTUAL or settings.get_external_count())
