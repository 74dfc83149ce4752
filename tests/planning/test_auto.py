from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module

from spatialdl.planning import auto

WORDS = ["model.width=4", "data.image_size=[64,48]", "data.batch_size=4", "parallel=auto"]


def config(*overrides: str):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return compose("train", [*WORDS, "parallel.cluster=nvlink_node", *overrides])


def test_what_does_not_fit_is_not_chosen():
    limit = "parallel.device_memory_gb=0.1"
    with pytest.raises(ValueError, match=r"no layout for 1 ranks fits 0\.10 GB per rank"):
        auto.choose(config(limit), 1)


def test_what_was_asked_stays_as_it_is(capsys):
    given = config()
    before = given.copy()
    chosen, row = auto.choose(given, 2)
    assert given == before
    assert chosen.parallel.name == row.layout.name != "auto"
    shown = [line for line in capsys.readouterr().out.splitlines() if "parallel=" in line]
    assert len(shown) == auto.SHOWN + 1


@pytest.mark.parametrize("word", ["tensor=2", "late=tensor", "tensor_plan={fc: input}"])
def test_channels_are_not_divided_by_both(word):
    with pytest.raises(ValueError, match=f"leave parallel.{word.split('=', maxsplit=1)[0]}=.* out"):
        auto.choose(config(f"parallel.{word}"), 2)


def test_layouts_that_leave_one_value_a_channel_are_passed_over():
    """BatchNorm refuses it in training; a dry run divided by zero."""
    small = ["data.image_size=[32,32]", "data.batch_size=4", "model.width=8"]
    chosen, _ = auto.choose(config(*small), 2)
    assert chosen.parallel.name


def test_words_of_auto_alone_are_not_handed_on():
    own = ["++parallel.cluster=nvlink_node", "parallel.world=1", "parallel.device_memory_gb=9"]
    words = [*own, "+parallel.recompute=none", "seed=3"]
    _, written = auto.choose_alone(config(*own[1:]), [*WORDS, *words])
    assert written[-5:] == [*WORDS[:3], *words[3:]]
    assert not any("cluster" in word or "world" in word or "device" in word for word in written)
