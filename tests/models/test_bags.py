from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spatialdl.models import CLAM, AttentionMIL, BagPooling, BagTransformer, TransMIL, tile_encoder
from spatialdl.models.transmil import NystromAttention
from spatialdl.training.tasks.task import BagClassification

NETWORKS = {
    "mean": lambda: BagPooling(3, 5, 8),
    "max": lambda: BagPooling(3, 5, 8, "max"),
    "abmil": lambda: AttentionMIL(3, 5, 8, 4),
    "transformer": lambda: BagTransformer(3, 5, 12, 2, 3),
    "clam": lambda: CLAM(3, 5, 8, 4),
    "clam_mb": lambda: CLAM(3, 5, 8, 4, "multi"),
    "transmil": lambda: TransMIL(3, 5, 16, 2, 4),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("tiles", [1, 2, 17])
def test_bags_of_any_length_and_what_their_tiles_count(name, tiles) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().double().eval()
    bags = torch.rand(2, 5, tiles, dtype=torch.float64)
    order = torch.randperm(tiles)
    output, attention = network(bags), network.attention(bags)
    assert output.shape == (2, 3)
    assert attention.shape in {(2, 1, tiles), (2, 3, tiles)}
    if name != "transmil":  # tiles fill a square
        torch.testing.assert_close(network(bags[:, :, order]), output)
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


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: AttentionMIL(width=0), "width=0 must be at least 1"),
        (lambda: BagTransformer(width=12, heads=5), "multiple of heads=5"),
        (lambda: BagPooling(pool="sum"), '"mean" or "max", got "sum"'),
        (lambda: AttentionMIL(2, 5)(torch.rand(1, 6, 3)), r"\(N, 5, tiles\).*got \(1, 6, 3\)"),
        (lambda: TransMIL(width=10, heads=3), "width=10 must be a multiple of heads=3"),
        (lambda: TransMIL(landmarks=0), "landmarks=0 must be at least 1"),
        (lambda: CLAM(branches="both"), '"single" or "multi", got "both"'),
        (lambda: tile_encoder(3, 6), "multiples of 4, the groups of GroupNorm, got 6"),
    ],
)
def test_what_makes_no_sense_is_refused(build, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        build()


# --- clam


@pytest.mark.parametrize("branches", ["single", "multi"])
@pytest.mark.parametrize("exclusive", [False, True])
def test_the_loss_of_instances_is_that_of_the_paper(branches, exclusive) -> None:
    """Most and least attended tiles of the true class; if exclusive, most attended of others."""
    torch.manual_seed(0)
    network = CLAM(3, 4, 6, 3, branches, 2, 0.5, exclusive, dropout=0.0).double()
    bag, label = torch.rand(1, 4, 9, dtype=torch.float64), 1
    tiles, scores = network.embed(bag)[0], network.attend(network.embed(bag))[0]
    expected = torch.zeros((), dtype=torch.float64)
    for number in range(3):
        order = scores[:, number if branches == "multi" else 0].argsort(descending=True)
        logits = network.instance_head(tiles)[:, 2 * number : 2 * number + 2]
        chosen = logits[torch.cat([order[:2], order[-2:]])]
        if number == label:
            expected += F.cross_entropy(chosen, torch.tensor([1, 1, 0, 0]))
        elif exclusive:
            expected += F.cross_entropy(chosen[:2], torch.tensor([0, 0]))
    loss = BagClassification(classes=3).loss(network(bag), torch.tensor([label]))
    logits = network.eval()(bag)
    assert logits.shape == (1, 3)
    plain = F.cross_entropy(logits, torch.tensor([label]))
    torch.testing.assert_close(loss, plain + 0.5 * expected)


@pytest.mark.parametrize("tiles", [1, 3])
def test_small_bags_and_equal_tiles_have_a_loss(tiles) -> None:
    network = CLAM(2, 4, 6, 3, instances=8)
    for bag in (torch.rand(1, 4, tiles), torch.ones(1, 4, tiles)):
        loss = BagClassification(classes=2).loss(network(bag), torch.tensor([0]))
        loss.backward()
        assert torch.isfinite(loss)


# --- transmil


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


# --- tile encoder


def test_features_of_a_tile_depend_on_it_alone() -> None:
    encoder = tile_encoder(2, 8).train()
    tiles = torch.randn(5, 2, 13, 11)
    features = encoder(tiles)
    assert features.shape == (5, 8)
    torch.testing.assert_close(encoder(tiles[1:3]), features[1:3])
