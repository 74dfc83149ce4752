from __future__ import annotations

import pytest

from spatialdl.pipeline.shardable import check_samples


def test_every_replica_needs_samples_in_every_microbatch():
    check_samples(6, 3, 2, "a batch")
    with pytest.raises(
        ValueError,
        match=r"the last batch has 5 for parallel\.microbatches=3 x parallel\.data=2: .* 6 or none",
    ):
        check_samples(5, 3, 2, "the last batch")
