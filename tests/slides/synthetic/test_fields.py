from __future__ import annotations

import numpy as np

from spatialdl.slides.synthetic.fields import Waves, hashed


def test_a_field_is_the_same_wherever_one_looks_from() -> None:
    field = Waves(np.random.default_rng(0), 300.0, 0.3, 12)
    rows, cols = np.arange(0.0, 2000, 4), np.arange(0.0, 3000, 4)
    whole = field(rows, cols)
    np.testing.assert_allclose(field(rows[100:200], cols[50:60]), whole[100:200, 50:60], atol=1e-4)
    assert abs(float(whole.mean())) < 0.2
    assert 0.7 < float(whole.std()) < 1.3


def test_hashes_are_uniform_and_belong_to_their_cell() -> None:
    i, j = (axis.ravel() for axis in np.mgrid[-50:50, -40:60])
    u = hashed(12345, i, j, 3)
    assert u.shape == (10_000, 3)
    assert u.min() >= 0
    assert u.max() < 1
    np.testing.assert_allclose(u.mean(0), 0.5, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(u.T), np.eye(3), atol=0.05)
    assert (hashed(12345, i[7:8], j[7:8], 3) == u[7]).all()
    assert (hashed(12346, i[7:8], j[7:8], 3) != u[7]).all()
