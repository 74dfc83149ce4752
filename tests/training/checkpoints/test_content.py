"""Names and tensors; whole runs are in test_checkpoints.py, other layouts in tests/mpi/training."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.content import copies, random_states, restore_random
from spatialdl.training.checkpoints.folder import stage_file
from tests.training.checkpoints.runs import losses, network, train


def draw() -> list[object]:
    return [torch.rand(3).tolist(), random.gauss(0, 1), np.random.normal(), random.random()]


def test_generators_draw_the_same_again():
    draw()  # normal numbers come in pairs, of which one is kept
    states = random_states(torch.device("cpu"))
    expected = draw() + draw()
    restore_random(states, torch.device("cpu"))
    assert draw() + draw() == expected


def test_weights_have_their_plain_names_and_optimizers_those_of_their_parameters(tmp_path):
    """And are copies: a checkpoint has the weights of its step, however late it is written."""
    trainer = train(tmp_path, "optimizer=adamw", "trainer.max_steps=2", "trainer.checkpoint.keep=0")
    (found,) = copies(trainer.parts.pipeline, trainer.parts.update, rank=0).values()
    plain = network()
    names = set(plain.state_dict())
    for name, _ in plain.named_parameters():
        names |= {f"optimizer/{name}/{key}" for key in ("exp_avg", "exp_avg_sq", "step")}
    assert set(found) == names
    assert found["optimizer/0.weight/step"] == 2.0
    assert copies(trainer.parts.pipeline, trainer.parts.update, rank=1) == {}
    before = {name: value.clone() for name, value in found.items()}
    with torch.no_grad():
        for value in trainer.parts.pipeline.state_dict().values():
            value.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in found.items())


@pytest.mark.parametrize(
    "name",
    [
        *("NAdam", "Adafactor"),  # which keep numbers, and tensors of other sizes
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Adam", "RMSprop", "Rprop")),
    ],
)
def test_other_optimizers_go_on_bit_for_bit(name, tmp_path):
    chosen = (f"optimizer._target_=torch.optim.{name}", "~optimizer.momentum")
    chosen += ("~optimizer.weight_decay",)
    saved = ("trainer.checkpoint.every_steps=3", "trainer.checkpoint.keep=9")
    train(tmp_path / "whole", *chosen, *saved, "trainer.max_steps=5")
    path = tmp_path / "whole" / "checkpoints" / "step-00000003"
    train(tmp_path / "run", *chosen, f"ckpt_path={path}", "trainer.max_steps=5")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_averages_the_scale_of_the_loss_and_all_generators_go_on_bit_for_bit(tmp_path):
    """The network draws by Python's and NumPy's, too."""
    chosen = ("trainer.precision=fp16-mixed", "trainer.ema=0.5", "trainer.validate_every=1")
    chosen += ("scheduler=cosine", "scheduler.T_max=6")
    chosen += ("++model._target_=tests.training.checkpoints.runs.noisy",)
    saved = ("trainer.checkpoint.every_steps=3", "trainer.checkpoint.keep=9")
    whole = train(tmp_path / "whole", *chosen, *saved, "trainer.max_steps=5")
    path = tmp_path / "whole" / "checkpoints" / "step-00000003"
    run = train(tmp_path / "run", *chosen, f"ckpt_path={path}", "trainer.max_steps=5")
    for name in ("metrics.csv", "validation.csv"):
        rows = [(tmp_path / one / name).read_text().splitlines() for one in ("whole", "run")]
        numbers = [[row.split(",")[:3] for row in of_one] for of_one in rows]
        assert numbers[0] == numbers[1]
    ours, expected = run.parts.update.average.state_dict(), whole.parts.update.average.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    assert run.parts.update.state() == whole.parts.update.state()
    assert run.parts.update.state()["scaler"]["steps"] == 5


def test_an_average_that_was_not_kept_begins_with_the_weights(tmp_path):
    train(tmp_path / "run", "trainer.max_steps=3", "trainer.validate_every=null")
    path = tmp_path / "run" / "checkpoints"
    more = (f"ckpt_path={path}", "trainer.ema=0.999", "trainer.max_steps=3")
    run = train(tmp_path / "more", *more)
    weights = dict(run.parts.pipeline.named_parameters())
    averages = run.parts.update.average.state_dict()
    assert all(torch.equal(averages[name], weight) for name, weight in weights.items())


class Extra(torch.nn.Linear):
    def get_extra_state(self) -> object:
        return {"anything": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_what_is_no_tensor_is_told(tmp_path):
    trainer = train(tmp_path, "trainer.max_steps=1", "trainer.checkpoint.keep=0")
    assert not (tmp_path / "checkpoints").exists()
    pipeline, update = trainer.parts.pipeline, trainer.parts.update
    state = update.optimizer.state[next(pipeline.parameters())]
    state["count"] = 3
    assert copies(pipeline, update, 0)[stage_file(0)]["number/0.weight/count"] == 3
    state["history"] = [torch.zeros(2)]
    with pytest.raises(CheckpointError, match=r"SGD has a list as 'history' of 0\.weight"):
        copies(pipeline, update, 0)
    del state["history"]
    pipeline.stages[0].add_module("extra", Extra(1, 1))
    with pytest.raises(CheckpointError, match=r"has 'extra\._extra_state', a dict, in its state"):
        copies(pipeline, update, 0)
