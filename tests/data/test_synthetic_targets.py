from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.synthetic_targets import SyntheticTargets


@pytest.mark.parametrize("present", [True, False])
def test_boxes_are_parts_of_the_whole_and_targets_are_in_range(present):
    data = SyntheticTargets(5, (19, 23), 3, seed=2, present=present)
    whole = data.read(1)
    assert (data.read(1, (3, 11, 5, 20)) == whole[3:11, 5:20]).all()
    assert data.labels.shape == (5, 3)
    assert data.labels.dtype == np.float64
    if present:
        assert set(np.unique(data.labels)) == {0, 1}
    else:
        assert 0 <= data.labels.min() < data.labels.max() < 1


def test_targets_follow_from_the_seed_and_show_in_the_image():
    one, same, other = (SyntheticTargets(40, (32, 32), 1, seed=s, present=False) for s in (0, 0, 1))
    assert (one.labels == same.labels).all()
    assert not (one.labels == other.labels).any()
    contrast = [one.read(n)[..., 0].std() for n in range(40)]
    assert np.corrcoef(contrast, one.labels[:, 0])[0, 1] > 0.8
