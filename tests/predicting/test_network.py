"""Building the network of a checkpoint; for predictions see test_running."""

from __future__ import annotations

import pytest
from torch import nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.predicting.network import Network, no_more_weights
from spatialdl.predicting.trained import find_trained
from tests.predicting.runs import command, train


def test_a_network_that_is_far_larger_than_its_checkpoint_is_not_built(tmp_path):
    run = train(tmp_path / "run", "model=resnet18", "model.width=4")
    trained = find_trained(str(run), SingleProcess())
    Network(trained, command("ckpt_path=x"), SingleProcess()).pipeline((32, 32))
    trained.config.model.width = 30_000  # a terabyte
    with pytest.raises(ValueError, match=r"has over [0-9,]+ weights"):
        Network(trained, command("ckpt_path=x"), SingleProcess()).pipeline((32, 32))


def test_weights_are_counted_while_a_network_is_built():
    with no_more_weights(9):
        nn.Linear(3, 2)
    with pytest.raises(ValueError, match="over 7 weights"), no_more_weights(7):
        nn.Linear(3, 2)
    nn.Linear(300, 300)  # nobody counts any more
