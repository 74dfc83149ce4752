"""Image size of a data set if the configuration does not set it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig

from spatialdl.data.format import Manifest
from spatialdl.data.samples import RegionSample

Size = tuple[int, ...]


def common_size(path: Path, sizes: Iterable[Size]) -> Size:
    """Size (rows, columns) shared by all images of a data set.

    Raises:
        ValueError: if the images differ in size.
    """
    different = sorted(set(sizes))
    if len(different) > 1:
        dims = ("slices", "rows", "columns")[-len(different[0]) :]
        raise ValueError(
            f"the images of {path} have {len(different)} different sizes, such as "
            f"{', '.join(' x '.join(map(str, size)) for size in different[:3])}, but a batch needs "
            f"one size: crop or pad them with data.image_size=[{','.join(dims)}]"
        )
    return different[0]


def check_stored_size(data: DictConfig, parallel: DictConfig) -> None:
    """Check the size of stored images before ranks are started.

    Args:
        data: group ``data`` of the configuration.
        parallel: group ``parallel`` of the configuration.

    Raises:
        ValueError: if images differ in size, or are too small for the layout.
    """
    from spatialdl.training.layouts import check_image, placement_of

    if data.name != "shards" or data.image_size is not None:
        return
    path = Path(data.path).expanduser()
    manifest = Manifest.load(path)
    size: Size | None = manifest.tile_size
    if size is None:
        splits = {data.split, data.validation_split} - {None}
        sizes = {
            sample.size
            for sample in manifest.samples
            if isinstance(sample, RegionSample) and (data.split is None or sample.split in splits)
        }
        if not sizes:
            return  # the loader raises an error that names the available splits
        size = common_size(path, sizes)
    check_image(size, placement_of(parallel, len(size)))
