"""The size of the images of a data set, where the configuration leaves it open."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig

from spatialdl.data.format import Manifest, RegionSample
from spatialdl.parallel.placement import Placement

Size = tuple[int, ...]


def common_size(path: Path, sizes: Iterable[Size]) -> Size:
    """The size that all images of a data set have, rows and columns.

    Raises:
        ValueError: they have several.
    """
    different = sorted(set(sizes))
    if len(different) > 1:
        dims = ("slices", "rows", "columns")[-len(different[0]) :]
        raise ValueError(
            f"the images of {path} have {len(different)} different sizes, such as "
            f"{', '.join(' x '.join(map(str, size)) for size in different[:3])}: one batch needs "
            f"one size, which data.image_size=[{','.join(dims)}] cuts or pads them to"
        )
    return different[0]


def check_stored_size(data: DictConfig, placement: Placement) -> None:
    """Refuse stored images that ranks would refuse, before these are started.

    Args:
        data: of the configuration.
        placement: of the ranks to be started.

    Raises:
        ValueError: images have several sizes, or one that the ranks cannot divide.
    """
    from spatialdl.training.layouts import check_image

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
            return  # the loader names the splits that there are
        size = common_size(path, sizes)
    check_image(size, placement)
