from __future__ import annotations

import numpy as np
import pytest

from spatialdl.bench.io_reading import drop, resident
from spatialdl.data.saving import sync


def test_what_was_dropped_is_not_in_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10**6))
    assert resident([path]) == 1
    sync(path)
    drop([path])
    left = resident([path])
    if left == 1:
        pytest.skip("the pages of this file system stay in memory")
    assert left < 0.1
    with path.open("rb") as file:
        file.read()
    assert resident([path]) == 1


def test_what_is_mapped_and_touched_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10**6))
    sync(path)
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    drop([path])
    assert resident([path]) > 0.9
