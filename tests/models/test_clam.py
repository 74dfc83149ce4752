from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spatialdl.models import CLAM
from spatialdl.training.tasks.task import BagClassification


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


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_small_bags_and_equal_tiles_have_a_loss(tiles) -> None:
    network = CLAM(2, 4, 6, 3, instances=8)
    for bag in (torch.rand(1, 4, tiles), torch.ones(1, 4, tiles)):
        loss = BagClassification(classes=2).loss(network(bag), torch.tensor([0]))
        loss.backward()
        assert torch.isfinite(loss)


def test_branches_are_single_or_multi() -> None:
    with pytest.raises(ValueError, match='"single" or "multi", got "both"'):
        CLAM(branches="both")
