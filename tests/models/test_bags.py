from __future__ import annotations

import pytest
import torch

from spatialdl.models import CLAM, AttentionMIL, BagPooling, BagTransformer

NETWORKS = {
    "mean": lambda: BagPooling(3, 5, 8),
    "max": lambda: BagPooling(3, 5, 8, "max"),
    "abmil": lambda: AttentionMIL(3, 5, 8, 4),
    "transformer": lambda: BagTransformer(3, 5, 12, 2, 3),
    "clam": lambda: CLAM(3, 5, 8, 4),
    "clam_mb": lambda: CLAM(3, 5, 8, 4, "multi"),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("tiles", [1, 2, 9])
def test_bags_of_any_length_and_what_their_tiles_count(name, tiles) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().double().eval()
    bags = torch.rand(2, 5, tiles, dtype=torch.float64)
    order = torch.randperm(tiles)
    output, attention = network(bags), network.attention(bags)
    assert output.shape == (2, 3)
    torch.testing.assert_close(network(bags[:, :, order]), output)
    assert attention.shape in {(2, 1, tiles), (2, 3, tiles)}
    torch.testing.assert_close(network.attention(bags[:, :, order]), attention[:, :, order])
    if "clam" in name or name == "abmil":
        torch.testing.assert_close(attention.sum(2), torch.ones_like(attention[..., 0]))


def test_gated_attention_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    network = AttentionMIL(2, 4, 6, 3).double().eval()
    bag = torch.rand(1, 4, 7, dtype=torch.float64)
    state = network.state_dict()
    tiles = (state["embed.linear.weight"] @ bag[0] + state["embed.linear.bias"][:, None]).relu()
    scores = []
    for h in tiles.T:  # equation 9: w^T (tanh(V h) * sigm(U h))
        value = torch.tanh(state["attend.values.weight"] @ h + state["attend.values.bias"])
        gate = torch.sigmoid(state["attend.gate.weight"] @ h + state["attend.gate.bias"])
        scores.append(state["attend.score.weight"][0] @ (value * gate))
    weights = torch.stack(scores).exp()
    weights /= weights.sum()
    bag_of_all = sum(weight * h for weight, h in zip(weights, tiles.T, strict=True))
    expected = state["head.weight"] @ bag_of_all + state["head.bias"]
    torch.testing.assert_close(network(bag)[0], expected)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="width=0 must be at least 1"):
        AttentionMIL(width=0)
    with pytest.raises(ValueError, match="multiple of heads=5"):
        BagTransformer(width=12, heads=5)
    with pytest.raises(ValueError, match='"mean" or "max", got "sum"'):
        BagPooling(pool="sum")
    with pytest.raises(ValueError, match=r"\(N, 5, tiles\).*got \(1, 6, 3\)"):
        AttentionMIL(2, 5)(torch.rand(1, 6, 3))
