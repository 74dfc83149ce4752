"""The small encoder of tiles."""

from __future__ import annotations

import pytest
import torch

from spatialdl.models import tile_encoder


def test_features_of_a_tile_depend_on_it_alone() -> None:
    encoder = tile_encoder(2, 8).train()
    tiles = torch.randn(5, 2, 13, 11)
    features = encoder(tiles)
    assert features.shape == (5, 8)
    torch.testing.assert_close(encoder(tiles[1:3]), features[1:3])


def test_numbers_that_are_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 4, the groups of GroupNorm, got 6"):
        tile_encoder(3, 6)
