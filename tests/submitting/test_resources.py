from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from spatialdl.submitting.resources import on_nodes, resources


def launcher(*overrides: str) -> DictConfig:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return compose("train", ["launcher=slurm", *overrides]).launcher


@pytest.mark.parametrize(
    ("ranks", "nodes", "each", "expected"),
    [
        (3, None, None, (None, None)),
        (8, None, 4, (2, 4)),
        (9, None, 4, (3, 4)),
        (3, None, 4, (1, 3)),
        (8, 2, None, (2, 4)),
        (3, 2, None, (2, 2)),
        (1, 1, None, (1, 1)),
        (8, 2, 4, (2, 4)),
        (7, 2, 4, (2, 4)),
        (2, 2, 4, (2, 2)),
    ],
)
def test_ranks_share_nodes(ranks, nodes, each, expected):
    assert on_nodes(ranks, nodes, each) == expected
    if None not in expected:
        assert expected[0] * expected[1] >= ranks


@pytest.mark.parametrize(
    ("ranks", "nodes", "each", "told"),
    [
        (2, 3, None, r"launcher\.nodes=3, but the layout has 2 ranks: use at most 2"),
        (1, 2, 1, r"launcher\.nodes=2, but the layout has 1 rank: use at most 1"),
        (
            *(9, 2, 4),
            r"the layout has 9 ranks, but launcher\.nodes=2 x launcher\.tasks_per_node=4 = 8",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_told_the_arithmetic(ranks, nodes, each, told):
    with pytest.raises(ValueError, match=told):
        on_nodes(ranks, nodes, each)


def test_what_is_not_said_is_left_to_the_site():
    assert resources(launcher(), 3) == (
        *(("cpus_per_task", 1), ("ntasks", 3), ("requeue", True)),
        *(("signal", "USR1@120"), ("time", "1:00:00")),
    )


def test_every_setting_is_an_option():
    words = ["partition=gpu", "account=me", "time=90", "tasks_per_node=2", "gpus_per_task=1"]
    words += ["cpus_per_task=7", "signal=30", "requeue=0"]
    words += ["options=['--qos=long', '--mem-per-cpu=2G', --exclusive]"]
    assert dict(resources(launcher(*(f"launcher.{word}" for word in words)), 6)) == {
        **{"partition": "gpu", "account": "me", "time": 90, "nodes": 3, "ntasks": 6},
        **{"ntasks_per_node": 2, "gpus_per_task": 1, "cpus_per_task": 7, "signal": "USR1@30"},
        **{"no_requeue": True, "qos": "long", "mem_per_cpu": "2G", "exclusive": True},
    }


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("nodes=0", "launcher.nodes=0 must be at least 1, or null"),
        ("nodes=two", "launcher.nodes=two must be at least 1, or null"),
        ("cpus_per_task=1.5", "launcher.cpus_per_task=1.5 must be at least 1, or null"),
        ("gpus_per_task=true", "launcher.gpus_per_task=True must be at least 1, or null"),
        ("signal=null", "launcher.signal=None must be at least 1"),
        ("requeue=-1", "launcher.requeue=-1 must be at least 0"),
        ("time=[1]", "launcher.time=[1] must be a word or a number"),
        ("partition='a\nb'", r"launcher.partition='a\nb' must be one line"),
        ("setup=module", "launcher.setup=module must be a list of shell lines"),
        ("setup=[1]", "launcher.setup=[1] must be a list of shell lines"),
        ("options=long", "launcher.options=long must be a list of options such as --qos=long"),
        ("options=[{qos: a}]", "launcher.options=[{'qos': 'a'}] must be a list of options"),
        ("options=[-p x]", "launcher.options has '-p x': write options as --qos=long"),
        ("options=['--qos=a\nb']", r"launcher.options has '--qos=a\nb': write options as"),
        (
            "options=['--ntasks=3']",
            "launcher.options has --ntasks=3: omit it, the layout determines",
        ),
        (
            "options=['--array=0-3']",
            "launcher.options has --array=0-3: omit it, a sweep is an array",
        ),
        (
            "options=['--time=3']",
            "launcher.options has --time=3: omit it, launcher.time sets it",
        ),
    ],
)
def test_what_is_no_such_thing_is_told(word, told):
    with pytest.raises(ValueError, match="launcher") as error:
        resources(launcher(f"launcher.{word}"), 3)
    assert str(error.value).startswith(told)
