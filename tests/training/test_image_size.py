from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardWriter
from spatialdl.training.checks import check_config
from spatialdl.training.image_size import check_stored_size, common_size
from tests.composing import composed


def written(folder: Path, *sizes: tuple[int, int, str]) -> str:
    with ShardWriter(folder, kind="regions", classes=["a"]) as writer:
        for rows, cols, split in sizes:
            writer.add(np.zeros((rows, cols, 3), np.uint8), 0, split=split)
    return f"data=shards data.path={folder}"


def checked(*words: str) -> None:
    config = composed("train", " ".join(words))
    check_config(config)
    check_stored_size(config.data, config.parallel)


def test_sizes() -> None:
    assert common_size(Path("set"), [(3, 4), (3, 4)]) == (3, 4)
    with pytest.raises(ValueError, match=r"have 4 different sizes, such as 1 x 4, 2 x 4, 3 x 4"):
        common_size(Path("set"), [(3, 4), (1, 4), (3, 5), (2, 4)])
    with pytest.raises(ValueError, match=r"data\.image_size=\[slices,rows,columns\]"):
        common_size(Path("set"), [(3, 4, 5), (3, 4, 6)])


def test_regions_of_several_sizes_are_refused(tmp_path: Path) -> None:
    words = written(tmp_path / "set", (70, 60, "train"), (70, 60, "val"), (90, 60, "test"))
    checked(words, "parallel=sp")
    for more in ("data.split=null", "data.split=test"):
        with pytest.raises(ValueError, match="have 2 different sizes, such as 70 x 60, 90 x 60"):
            checked(words, more, "parallel=sp")
    checked(words, "data.split=test data.validation_split=null")
    checked(words, "data.split=null data.image_size=[64,64]")
    checked(words, "data.split=none data.validation_split=null")


def test_an_image_that_the_grid_cannot_divide_is_refused(tmp_path: Path) -> None:
    words = written(tmp_path / "set", (3, 60, "train"))
    with pytest.raises(ValueError, match="3"):
        checked(words, "parallel=sp parallel.grid=[4,1]")
