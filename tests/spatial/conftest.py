"""Each test computes by itself: what another test has left in a cache would hide a fault."""

from __future__ import annotations

import pytest

from spatialdl.comm.plan import plan_for
from spatialdl.layout.layout import needed_boxes
from spatialdl.spatial.halo_geometry import cut_dim
from spatialdl.spatial.resample import interpolation_weights


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    for cached in (plan_for, needed_boxes, cut_dim, interpolation_weights):
        cached.cache_clear()
