"""A folder of images as a data set: tiles where all are of one size, else regions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.typing as npt
from tqdm import tqdm

from spatialdl.data.format import Kind
from spatialdl.data.importing.images import (
    BrokenImageError,
    FoundImage,
    class_names,
    find_images,
    image_size,
    load_image,
)
from spatialdl.data.writer import ShardWriter

Loaded = npt.NDArray[Any] | BrokenImageError


class BrokenImagesError(ValueError):
    """Some images cannot be read, and nothing was written.

    Attributes:
        broken: why, for each.
    """

    def __init__(self, broken: Sequence[str], images: int, noun: str = "images") -> None:
        self.broken = list(broken)
        super().__init__(
            f"{len(broken)} of {images} {noun} cannot be read, and nothing was written; mend or "
            "remove them, or leave them out with --skip-broken"
        )


def import_images(
    folder: Path,
    out: Path,
    *,
    rgb: bool = False,
    skip_broken: bool = False,
    jobs: int = 1,
    progress: bool = True,
    **settings: Any,
) -> list[str]:
    """Write a data set of a folder of images.

    Args:
        folder: with a folder of images for each class, or such folders for each split.
        out: the data set to be made.
        rgb: turn all images into three channels of uint8.
        skip_broken: leave out those that cannot be read.
        jobs: threads that decode.
        progress: show a bar, where somebody looks at it.
        settings: of `ShardWriter`.

    Returns:
        What was wrong with the images that were left out.

    Raises:
        BrokenImagesError: some cannot be read, and `skip_broken` is false.
        ValueError: there are no images, or they do not go together; nothing was written.
    """
    images = find_images(folder)
    broken: dict[str, str] = {}
    sizes = _sizes(images, broken, progress)
    kind: Kind = "tiles"
    if len(set(sizes.values())) != 1 or "stripes" in settings:
        kind, own = "regions", {"mpp": settings.pop("mpp", None)}
    else:
        own = {}
    whole = [image for image in images if image.name in sizes]
    off = None if progress else True
    with (
        ShardWriter(out, class_names(images), kind=kind, **settings) as writer,
        tqdm(total=len(whole), unit="image", disable=off, leave=False) as bar,
    ):
        for image, loaded in _loaded(whole, rgb, jobs):
            bar.update()
            if isinstance(loaded, BrokenImageError):
                broken[image.name] = str(loaded)
            elif skip_broken or not broken:  # else only to know which are broken
                _add(writer, image, loaded, own)
        said = [broken[image.name] for image in images if image.name in broken]
        if said and (not skip_broken or len(said) == len(images)):
            raise BrokenImagesError(said, len(images))
    return said


def _sizes(
    images: Sequence[FoundImage], broken: dict[str, str], progress: bool
) -> dict[str, tuple[int, int]]:
    """Rows and columns by name; notes in `broken` what is wrong with those that have none."""
    sizes = {}
    for image in tqdm(images, "sizes", disable=None if progress else True, leave=False):
        try:
            sizes[image.name] = image_size(image.path)
        except BrokenImageError as error:
            broken[image.name] = str(error)
    return sizes


def _add(
    writer: ShardWriter, image: FoundImage, pixels: npt.NDArray[Any], own: dict[str, Any]
) -> None:
    try:
        writer.add(pixels, image.label, image.split, slide=image.name, **own)
    except ValueError as error:
        raise ValueError(
            f"{image.path}: {error}; --rgb turns all into three channels of uint8"
        ) from error


def _loaded(
    images: Sequence[FoundImage], rgb: bool, jobs: int
) -> Iterator[tuple[FoundImage, Loaded]]:
    """The images in their order, some decoded ahead."""

    def load(image: FoundImage) -> Loaded:
        try:
            return load_image(image.path, rgb=rgb)
        except BrokenImageError as error:
            return error

    with ThreadPoolExecutor(jobs, thread_name_prefix="import") as pool:
        ahead: deque[tuple[FoundImage, Future[Loaded]]] = deque()
        try:
            for image in images:
                ahead.append((image, pool.submit(load, image)))
                if len(ahead) > 2 * jobs:
                    first, future = ahead.popleft()
                    yield first, future.result()
            for first, future in ahead:
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
