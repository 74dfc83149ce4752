from __future__ import annotations

import pytest
import torch

from spatialdl.models import TransMIL
from spatialdl.models.transmil import NystromAttention


def test_with_a_landmark_a_token_attention_is_that_of_softmax() -> None:
    torch.manual_seed(0)
    network = NystromAttention(12, 3, landmarks=7, iterations=30).double()
    torch.nn.init.zeros_(network.conv.weight)
    x = torch.rand(2, 7, 12, dtype=torch.float64)
    parts = network.qkv(x).chunk(3, -1)
    q, k, v = (one.unflatten(-1, (3, -1)).transpose(1, 2) for one in parts)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    expected = network.proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-6)
    weights = (q[:, :, :1] @ k.transpose(2, 3) / 2).softmax(-1)[:, :, 0].mean(1)
    torch.testing.assert_close(network.first_row(x), weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 17])
def test_bags_of_any_length_fill_a_square(tiles) -> None:
    network = TransMIL(3, 5, 16, 2, 4).eval()
    bag = torch.rand(1, 5, tiles)
    assert network(bag).shape == (1, 3)
    assert network.attention(bag).shape == (1, 1, tiles)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="width=10 must be a multiple of heads=3"):
        TransMIL(width=10, heads=3)
    with pytest.raises(ValueError, match="landmarks=0 must be at least 1"):
        TransMIL(landmarks=0)
