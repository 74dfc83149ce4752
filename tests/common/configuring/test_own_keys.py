from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from spatialdl.common.configuring.own_keys import (
    fit_model_keys,
    offered_keys,
    rewritten,
)
from tests.composing import compose_anew


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("model.depth=4", "++model.depth=4"),
        ("model._target_=networks.Own", "++model._target_=networks.Own"),
        ("task.loss.alpha=2", "++task.loss.alpha=2"),
        ("task.loss=mse", "task.loss=mse"),
        ("task=bag", "experiment=bag"),
        ("data.stage=/local", "data.stage.to=/local"),
        ("data.stage={to:/local}", "data.stage={to:/local}"),
        ("data.stage.keep=true", "data.stage.keep=true"),
        ("~model.width", "~model.width"),
        ("experiment=model.x=1", "experiment=model.x=1"),
    ],
)
def test_short_forms_are_written_out(word, meant):
    assert rewritten(word) == meant


def plain(num_classes=1000, in_channels=3, width=8): ...


def chans(num_classes=1000, in_chans=3, **kwargs): ...


def labels(num_labels=2, *, depth=1): ...


def anything(**kwargs): ...


def positional(num_classes, in_channels, /): ...


def neither(width=8): ...


class Own(nn.Module):
    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()


class Inherits(nn.Sequential):
    """Its signature is that of `nn.Sequential`: positional arguments only."""


pinned = partial(plain, num_classes=7, width=16)

OFFERED = {"num_classes": 5, "num_labels": 5, "in_channels": 4, "in_chans": 4}


def fitted(target: str, *words: str) -> tuple[dict[str, Any], list[str]]:
    """What a network is called with, in place of that of ``model=resnet18``; what is offered."""
    group = {"num_classes": "${data.num_classes}", "in_channels": "${data.channels}", "width": 64}
    given = {word.partition("=")[0].rpartition(".")[2]: int(word[-1]) for word in words}
    name = f"{__name__}.{target}"
    config = OmegaConf.create(
        {
            "model": {"_target_": name, **group, **given},
            "data": {"num_classes": 5, "channels": 4},
        }
    )
    OmegaConf.set_struct(config, True)
    fit_model_keys(config, ["seed=2", f"++model._target_={name}", *(f"++{one}" for one in words)])
    offered = offered_keys(config.model)
    found = OmegaConf.to_container(config.model, resolve=True)
    del found["_target_"]
    return found, offered


@pytest.mark.parametrize(
    ("target", "arguments", "offered"),
    [
        ("plain", {"num_classes": 5, "in_channels": 4}, []),
        ("pinned", {"num_classes": 5, "in_channels": 4}, []),
        ("chans", {"num_classes": 5, "in_chans": 4}, []),
        ("labels", {"num_labels": 5}, []),
        ("Own", {"num_classes": 5}, []),
        ("anything", OFFERED, list(OFFERED)),
        ("positional", {}, []),
        ("neither", {}, []),
        ("Inherits", {}, []),
    ],
)
def test_a_network_of_the_user_gets_classes_and_channels_and_no_others_defaults(
    target, arguments, offered
):
    assert fitted(target) == (arguments, offered)


def test_what_the_user_has_written_stays_for_the_network_to_take_or_refuse():
    assert fitted("plain", "model.width=6")[0] == {"num_classes": 5, "in_channels": 4, "width": 6}
    assert fitted("neither", "model.num_classes=9") == ({"num_classes": 9}, [])
    found, offered = fitted("anything", "model.num_labels=9")
    assert found == {"num_labels": 9, "in_channels": 4, "in_chans": 4}
    assert offered == ["in_channels", "in_chans"]


def test_what_the_user_takes_away_stays_away():
    config = OmegaConf.create({"model": {"_target_": f"{__name__}.plain"}})
    fit_model_keys(config, ["~model.num_classes", f"model._target_={__name__}.plain"])
    assert set(config.model) == {"_target_", "in_channels"}


def test_a_network_of_a_file_is_given_all_and_one_that_is_not_there_is_refused():
    target = "spatialdl.models.unet"  # a function with the name of its module
    config = OmegaConf.create({"model": {"_target_": target, "depth": 3}})
    fit_model_keys(config, [f"model._target_={target}"])
    assert set(config.model) == {"_target_", "num_classes", "in_channels"}
    model = {"_target_": "nobody.asks", "width": 8, "out_features": 2}
    config = OmegaConf.create({"model": model})
    fit_model_keys(config, ["model=resnet18", "model.width=8"])
    assert config.model == model
    config = OmegaConf.create({"model": {"_target_": "nobody.Knows"}})
    with pytest.raises(ValueError, match=r"model\._target_=nobody\.Knows cannot be imported"):
        fit_model_keys(config, ["model._target_=nobody.Knows"])


@contextmanager
def experiment(folder: Path, *lines: str) -> Iterator[DictConfig]:
    """The configuration of training with an experiment of the user's that sets these keys."""
    (folder / "experiment").mkdir()
    settings = "".join(f"  {line}\n" for line in lines)
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\nmodel:\n{settings}")
    words = (f"hydra.searchpath=[file://{folder}]", "experiment=mine")
    found = compose_anew("train", *words, with_hydra=True)
    held = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(found)
    try:
        with open_dict(found):
            del found["hydra"]
        yield found
    finally:
        HydraConfig.instance().cfg = held


def test_an_experiment_may_name_an_own_network(tmp_path):
    """Its file is put over that of resnet18, whose width it would get."""
    with experiment(tmp_path, f"_target_: {__name__}.labels", "depth: 3") as config:
        fit_model_keys(config, ["experiment=mine"])
    assert OmegaConf.to_container(config.model) == {
        "_target_": f"{__name__}.labels",
        "depth": 3,
        "num_labels": "${data.num_classes}",
    }


def test_an_experiment_may_set_keys_of_a_network_that_ships(tmp_path):
    with experiment(tmp_path, "width: 16") as config:
        fit_model_keys(config, ["experiment=mine"])
    assert config.model.width == 16
    assert config.model._target_ == "spatialdl.models.resnet18"


def test_a_width_that_may_be_that_of_another_network_is_refused(tmp_path):
    with experiment(tmp_path, f"_target_: {__name__}.plain") as config:
        with pytest.raises(
            ValueError, match=r"model\.width=64 is ambiguous: it may be meant for .*plain, or"
        ):
            fit_model_keys(config, [])
        fit_model_keys(config, ["model.width=64"])
    assert config.model.width == 64
