from __future__ import annotations

import pytest
import torch

from spatialdl.pipeline.region import Region


def test_parts_are_made_when_they_are_asked_for():
    whole = torch.arange(2 * 3 * 5 * 4).view(2, 3, 5, 4)
    asked = []

    def read(part):
        asked.append(part)
        return whole[part]

    region = Region((2, 3, 5, 4), torch.int64, (10, 4), read)
    assert asked == []
    part = (..., slice(1, 3), slice(0, 2))
    assert torch.equal(region[part], whole[:, :, 1:3, :2])
    assert asked == [part]


def test_a_region_stays_as_it_is():
    region = Region((1, 2, 2), torch.int64, (2, 2), torch.zeros(1, 2, 2).__getitem__)
    with pytest.raises(AttributeError, match="cannot assign"):
        region.shape = (2, 2, 2)
    assert region  # which tells it from none
