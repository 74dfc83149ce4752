"""Maps of many images in one process; other layouts are in tests/mpi/predicting."""

from __future__ import annotations

import torch

from spatialdl.comm.alone import Alone
from spatialdl.predicting.cutting import cutting_of
from spatialdl.predicting.inputs import slide_input
from spatialdl.predicting.running import Runner
from spatialdl.predicting.trained import find_trained
from tests.predicting.runs import NETWORK, command, train, write_slide


def test_the_mean_of_what_places_give_to_a_class_is_its_logit(tmp_path):
    """Of each of the images, which are more than are predicted at a time."""
    run = train(tmp_path / "run", *NETWORK)
    slide = write_slide(tmp_path / "a.tiff", 203, 187)
    config = command(f"ckpt_path={run}", "level=0", "activation=true", "batch_size=5")
    trained = find_trained(str(run), Alone())
    given = slide_input(slide, "a", cutting_of(config, trained))
    outcome = Runner(trained, config, Alone()).run(given)
    assert len(given.places) == len(outcome.activation) > 11
    logits = torch.from_numpy(outcome.activation).double().mean((2, 3))
    assert torch.allclose(logits.softmax(1), outcome.values, rtol=0, atol=1e-6)
    assert float(outcome.values.std(0).min()) > 1e-4
